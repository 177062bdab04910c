"""Generate the text and the vocabulary of the data benchmarks from Python's help topics."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

DISTINCT = 1 << 23  # bytes of text before it begins to repeat
RARE = 0.02  # fraction of words that occur almost nowhere else, like names and misspellings in natural text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["text", "vocabulary"])
    parser.add_argument("text", type=Path)
    parser.add_argument("--megabytes", type=float, default=8.0, help="size of the text")
    parser.add_argument("--out", type=Path, help="directory to write the vocabulary to")
    parser.add_argument("--size", type=int, default=8000, help="size of the vocabulary")
    flags = parser.parse_args()
    if flags.what == "text":
        write_text(flags.text, round(flags.megabytes * 1e6))
    else:
        write_vocabulary(flags.text, flags.out, flags.size)


def write_text(path: Path, size: int) -> None:
    """Write one document per line. Deterministic: a longer text starts with the shorter one."""
    with path.open("wb") as file:
        lines: list[bytes] = []
        for document in documents(random.Random(0)):
            line = document.encode() + b"\n"
            file.write(line)
            lines.append(line)
            if file.tell() >= min(size, DISTINCT):
                break
        # Repeat the documents in another order: longer texts serve to measure memory, not speed.
        draw = random.Random(1)
        while file.tell() < size:
            draw.shuffle(lines)
            for first in range(0, len(lines), 100):
                file.writelines(lines[first : first + 100])
                if file.tell() >= size:
                    break


def documents(draw: random.Random) -> Iterator[str]:
    """Yield paragraphs of one to twelve sentences from the help topics, with some rare words."""
    from pydoc_data.topics import topics

    words = " ".join(topics[name] for name in sorted(topics)).split()
    sentences: list[list[str]] = [[]]
    for word in words:
        sentences[-1].append(word)
        if word[-1] in ".:" or len(sentences[-1]) == 40:
            sentences.append([])
    vocabulary = sorted(set(words))

    def rare() -> str:
        """Join the first half of one word to the second half of another."""
        begin, end = draw.choice(vocabulary), draw.choice(vocabulary)
        return begin[: len(begin) // 2 + 1] + end[len(end) // 2 :]

    while True:
        paragraph = [word for _ in range(draw.randint(1, 12)) for word in draw.choice(sentences)]
        yield " ".join(rare() if draw.random() < RARE else word for word in paragraph)


def write_vocabulary(text: Path, out: Path, size: int) -> None:
    """Train a spiece.model, which both Flaxen and transformers can load."""
    from flaxen.data.vocabulary import train_sentencepiece

    with text.open(encoding="utf-8") as lines:
        files = train_sentencepiece(lines, size)
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (out / name).write_bytes(content)


if __name__ == "__main__":
    main()
