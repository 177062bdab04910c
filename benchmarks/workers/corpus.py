"""The text and the vocabulary of the data benchmarks, made out of Python's own help."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

DISTINCT = 1 << 23  # bytes of text before it begins to repeat
RARE = 0.02  # share of words that occur hardly anywhere else, as names and misspellings do in natural text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["text", "vocabulary"])
    parser.add_argument("text", type=Path)
    parser.add_argument("--megabytes", type=float, default=8.0, help="of the text")
    parser.add_argument("--out", type=Path, help="directory of the vocabulary")
    parser.add_argument("--size", type=int, default=8000, help="of the vocabulary")
    flags = parser.parse_args()
    if flags.what == "text":
        write_text(flags.text, round(flags.megabytes * 1e6))
    else:
        write_vocabulary(flags.text, flags.out, flags.size)


def write_text(path: Path, size: int) -> None:
    """A document on each line. The same size gives the same text, and a longer text begins with the shorter one."""
    with path.open("wb") as file:
        lines: list[bytes] = []
        for document in documents(random.Random(0)):
            line = document.encode() + b"\n"
            file.write(line)
            lines.append(line)
            if file.tell() >= min(size, DISTINCT):
                break
        # Again and again in another order: what is measured beyond the first megabytes is memory, not speed.
        draw = random.Random(1)
        while file.tell() < size:
            draw.shuffle(lines)
            for first in range(0, len(lines), 100):
                file.writelines(lines[first : first + 100])
                if file.tell() >= size:
                    break


def documents(draw: random.Random) -> Iterator[str]:
    """Paragraphs of one to twelve sentences of the help, with rare words in them."""
    from pydoc_data.topics import topics

    words = " ".join(topics[name] for name in sorted(topics)).split()
    sentences: list[list[str]] = [[]]
    for word in words:
        sentences[-1].append(word)
        if word[-1] in ".:" or len(sentences[-1]) == 40:
            sentences.append([])
    known = sorted(set(words))

    def rare() -> str:
        begin, end = draw.choice(known), draw.choice(known)
        return begin[: len(begin) // 2 + 1] + end[len(end) // 2 :]

    while True:
        paragraph = [word for _ in range(draw.randint(1, 12)) for word in draw.choice(sentences)]
        yield " ".join(rare() if draw.random() < RARE else word for word in paragraph)


def write_vocabulary(text: Path, out: Path, size: int) -> None:
    """A spiece.model, from which both Flaxen and transformers make their tokenizers."""
    from flaxen.data.vocabulary import train_sentencepiece

    with text.open(encoding="utf-8") as lines:
        files = train_sentencepiece(lines, size)
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (out / name).write_bytes(content)


if __name__ == "__main__":
    main()
