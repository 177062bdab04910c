"""flaxen vocab OUT --data.train …"""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from flaxen.data.corpus import Corpus
from flaxen.errors import InputError

if TYPE_CHECKING:
    from flaxen.data.tokenizers import Files, Tokenizer

SHOWN = 1_000_000  # characters to measure the vocabulary on


@dataclass(frozen=True)
class Vocab:
    """Train a vocabulary: SentencePiece (as T5's) or byte-level BPE."""

    out: tyro.conf.Positional[Path]
    """Directory to write; it must not exist, or be empty."""
    data: Corpus = field(default_factory=Corpus)
    kind: Literal["sentencepiece", "bpe"] = "sentencepiece"
    """SentencePiece normalizes text and drops line breaks, as T5 does; BPE keeps every byte."""
    size: int = 32000
    """Ids in all: special tokens, pieces and sentinels."""
    sentinels: int = 100
    """Ids that span corruption puts in place of text, at the end of the vocabulary."""
    coverage: float = 0.9995
    """SentencePiece: this part of the text's characters are pieces of their own, the rest are unknown."""
    byte_fallback: bool = False
    """SentencePiece: spell other characters in bytes. (Unknown to transformers 5, which reads such text as <unk>.)"""
    sample: int = 1_000_000
    """SentencePiece: sentences to train on, drawn from all (256 characters at most; up to 6 GB for a million)."""

    def run(self, given: set[str]) -> None:
        self._check(given)
        shown: list[str] = []
        files = _interruptible(lambda: self._train(shown))

        from flaxen.data.tokenizers import load_tokenizer
        from flaxen.hf.files import whole_directory

        self._check_out()  # again: training takes a while
        with whole_directory(self.out) as directory:
            for name, content in files.items():
                (directory / name).write_bytes(content)
            tokenizer = load_tokenizer(directory)
            assert tokenizer is not None
        self._report(tokenizer, shown)

    def _check(self, given: set[str]) -> None:
        alone = [name for name in ("coverage", "byte_fallback", "sample") if name in given]
        if self.kind == "bpe" and alone:
            raise InputError(f"--{alone[0].replace('_', '-')} belongs to SentencePiece; leave it out for --kind bpe")
        self._check_out()

    def _check_out(self) -> None:
        out = self.out.expanduser()
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"{out} exists and is no empty directory; choose another name, or remove it")

    def _train(self, shown: list[str]) -> "Files":
        """The vocabulary's files; `shown` receives some of the text."""
        from rich.console import Console
        from rich.progress import Progress

        from flaxen.data.vocabulary import train_bpe, train_sentencepiece

        source = self.data.train_source()
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
            reading = bar.add_task("reading", total=source.size)

            def texts() -> Iterator[str]:
                n_shown = 0
                for text in source.texts(lambda position: bar.update(reading, completed=position)):
                    if n_shown < SHOWN:
                        shown.append(text[: SHOWN - n_shown])
                        n_shown += len(shown[-1])
                    yield text
                bar.update(reading, completed=source.size, total=source.size or 1)
                bar.add_task("training", total=None)

            if self.kind == "bpe":
                return train_bpe(texts(), self.size, self.sentinels)
            return train_sentencepiece(
                texts(), self.size, self.sentinels, self.coverage, self.byte_fallback, self.sample
            )

    def _report(self, tokenizer: "Tokenizer", shown: list[str]) -> None:
        rows = tokenizer.encode_batch(shown, eos=False, specials=False)
        n_characters, n_tokens = sum(map(len, shown)), sum(map(len, rows))
        unknown = sum(row.count(tokenizer.unk_id) for row in rows) if tokenizer.unk_id is not None else 0
        print(f"wrote      {self.out}")
        print(f"ids        {tokenizer.size:,}, {len(tokenizer.sentinels):,} of them sentinels")
        print(f"text       {n_characters / n_tokens:.2f} characters per token, {100 * unknown / n_tokens:.2g} % unknown")
        for text in sorted(shown, key=len, reverse=True)[:3]:
            example = " ".join(text.split())[:100].rpartition(" ")[0]
            ids = tokenizer.encode(example, eos=False, specials=False)
            print(f"example    {' '.join(map(tokenizer.token, ids))}")
        data = f"--data.dataset {self.data.dataset}" if self.data.dataset else f"--data.train {' '.join(self.data.train)}"
        print(f"next       flaxen train denoise --model.tokenizer {self.out} {data}")


def _interruptible(work: Callable[[], "Files"]) -> "Files":
    """What `work` returns; Ctrl-C ends the wait for it, while the libraries would finish their minutes first."""
    result: Future[Files] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result()
