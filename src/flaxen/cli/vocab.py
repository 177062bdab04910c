"""flaxen vocab OUT --data.train …"""

import os
import shlex
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from flaxen.data.corpus import Corpus
from flaxen.data.tokenizers import Files, Tokenizer, load_tokenizer
from flaxen.data.vocabulary import ModelType, train_bpe, train_sentencepiece
from flaxen.errors import InputError

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
    model_type: ModelType = "unigram"
    """SentencePiece: pieces are the likeliest (unigram, as T5's), or merged pair by pair from characters (bpe, as
    Transformer-VQ's for PG-19; --kind bpe merges bytes). transformers 5 takes bpe for unigram: other tokens."""

    def run(self, given: set[str]) -> None:
        from flaxen.hf.files import atomic_directory

        alone = [name for name in ("coverage", "byte_fallback", "sample", "model_type") if name in given]
        if self.kind == "bpe" and alone:
            raise InputError(f"--{alone[0].replace('_', '-')} belongs to SentencePiece; leave it out for --kind bpe")
        out = self.out.expanduser()
        _check_free(out)
        files, shown = self._train()
        _check_free(out)  # training takes a while, and whole_directory would replace a checkpoint
        with atomic_directory(out) as directory:
            for name, content in files.items():
                (directory / name).write_bytes(content)
        tokenizer = load_tokenizer(out)
        assert tokenizer is not None
        self._report(tokenizer, shown)

    def _train(self) -> tuple[Files, list[str]]:
        """The vocabulary's files, and some of the text."""
        from rich.console import Console
        from rich.progress import Progress

        source, shown = self.data.train_source(), list[str]()
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
            reading = bar.add_task("reading", total=source.size)

            def texts() -> Iterator[str]:
                left = SHOWN
                for text in source.texts(lambda position: bar.update(reading, completed=position)):
                    if left:
                        shown.append(text[:left])
                        left -= len(shown[-1])
                    yield text
                bar.update(reading, total=1, completed=1)
                bar.add_task("training", total=None)

            if self.kind == "bpe":
                files = _interruptible(lambda: train_bpe(texts(), self.size, self.sentinels))
            else:
                options = (self.coverage, self.byte_fallback, self.sample, self.model_type)
                files = _interruptible(lambda: train_sentencepiece(texts(), self.size, self.sentinels, *options))
        return files, shown

    def _report(self, tokenizer: Tokenizer, shown: list[str]) -> None:
        rows = tokenizer.encode_batch(shown, eos=False, specials=False)
        n_characters, n_tokens = sum(map(len, shown)), max(1, sum(map(len, rows)))
        unknown = sum(id == tokenizer.unk_id for row in rows for id in row) / n_tokens
        print(f"wrote     {self.out}")
        print(f"ids       {tokenizer.size:,}, {len(tokenizer.sentinels):,} of them sentinels")
        print(f"text      {n_characters / n_tokens:.2f} characters per token, {unknown:.2%} unknown")
        for text in sorted(shown, key=len, reverse=True)[:3]:
            example = textwrap.shorten(text[:1000], 100, placeholder="") or text[:100]
            ids = tokenizer.encode(example, eos=False, specials=False)
            print(f"example   {' '.join(map(tokenizer.token, ids))}")
        data = ["--data.dataset", self.data.dataset] if self.data.dataset else ["--data.train", *self.data.train]
        # Span corruption needs sentinels; without them it is a vocabulary of a language model.
        if self.data.unit != "line":
            data += ["--data.unit", self.data.unit]
        task, preset = ("denoise", "t5-v1_1-mini") if self.sentinels else ("language", "vq-tiny")
        flags = shlex.join(["--model.preset", preset, "--model.tokenizer", str(self.out), *data])
        print(f"next      flaxen train {task} --out run {flags}")


def _check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is no empty directory; choose another name, or remove it")
    above = next(path for path in out.absolute().parents if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"cannot write {out}: {above} is no directory that you may write to")


def _interruptible(work: Callable[[], Files]) -> Files:
    """What `work` returns. Ctrl-C ends the wait for it; in this thread it would wait for the trainer, for minutes."""
    result: Future[Files] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result()
