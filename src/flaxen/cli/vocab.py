"""flaxen vocab OUT --data.train …: train a tokenizer."""

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

SHOWN = 1_000_000  # number of characters of text on which the vocabulary is measured


@dataclass(frozen=True)
class Vocab:
    """Train a tokenizer vocabulary on text: SentencePiece as in T5, or byte-level BPE.

    Example: flaxen vocab vocabulary --data.train 'texts/*.txt' --size 8000
    """

    out: tyro.conf.Positional[Path]
    """Directory to write the vocabulary to."""
    data: Corpus = field(default_factory=Corpus)
    kind: Literal["sentencepiece", "bpe"] = "sentencepiece"
    """Type of tokenizer: sentencepiece normalises text and drops line breaks, as in T5; bpe preserves every byte."""
    size: int = 32000
    """Vocabulary size: total number of special tokens, pieces and sentinels."""
    sentinels: int = 100
    """Number of sentinel tokens, which stand for masked spans; they take the last ids of the vocabulary."""
    coverage: float = 0.9995
    """SentencePiece character coverage: fraction of the text's characters to include; the rarest become <unk>."""
    byte_fallback: bool = False
    """SentencePiece: encode rare characters as bytes instead of <unk>. transformers 5 ignores this and uses <unk>."""
    sample: int = 1_000_000
    """SentencePiece: number of sentences, of at most 256 characters, sampled for training; a million may need 6 GB of
    memory."""
    model_type: ModelType = "unigram"
    """SentencePiece algorithm: unigram, as in T5, or bpe on characters, as in the Transformer-VQ paper for PG-19
    (--kind bpe works on bytes instead). transformers 5 treats bpe as unigram and tokenizes differently."""
    overwrite: bool = False
    """Replace OUT even if it contains files that Flaxen did not write; all of them are deleted."""

    def run(self, given_flags: set[str]) -> None:
        from flaxen.atomic_directory import atomic_directory, check_directory

        sentencepiece_only = [
            name for name in ("coverage", "byte_fallback", "sample", "model_type") if name in given_flags
        ]
        if self.kind == "bpe" and sentencepiece_only:
            raise InputError(f"--{sentencepiece_only[0].replace('_', '-')} has no effect with --kind bpe; remove it")
        out = self.out.expanduser()
        check_directory(out, self.overwrite)  # before training, which takes a while
        _check_writable(out)
        files, excerpt = self._train()
        with atomic_directory(out, self.overwrite) as directory:
            for name, content in files.items():
                (directory / name).write_bytes(content)
        tokenizer = load_tokenizer(out)
        assert tokenizer is not None
        self._report(tokenizer, excerpt)

    def _train(self) -> tuple[Files, list[str]]:
        """Train the vocabulary; return its files and an excerpt of the text."""
        from rich.console import Console
        from rich.progress import Progress

        source, excerpt = self.data.train_source(), list[str]()
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
            reading = bar.add_task("reading", total=source.size)

            def texts() -> Iterator[str]:
                remaining = SHOWN
                for text in source.texts(lambda position: bar.update(reading, completed=position)):
                    if remaining:
                        excerpt.append(text[:remaining])
                        remaining -= len(excerpt[-1])
                    yield text
                bar.update(reading, total=1, completed=1)
                bar.add_task("training", total=None)

            if self.kind == "bpe":
                files = _interruptible(lambda: train_bpe(texts(), self.size, self.sentinels))
            else:
                options = (self.coverage, self.byte_fallback, self.sample, self.model_type)
                files = _interruptible(lambda: train_sentencepiece(texts(), self.size, self.sentinels, *options))
        return files, excerpt

    def _report(self, tokenizer: Tokenizer, excerpt: list[str]) -> None:
        """Print statistics and examples of the vocabulary, and a command to continue with."""
        rows = tokenizer.encode_batch(excerpt, eos=False, specials=False)
        n_characters, n_tokens = sum(map(len, excerpt)), max(1, sum(map(len, rows)))
        unknown = sum(id == tokenizer.unk_id for row in rows for id in row) / n_tokens
        print(f"wrote     {self.out}")
        print(f"ids       {tokenizer.size:,}, including {len(tokenizer.sentinels):,} sentinels")
        print(f"text      {n_characters / n_tokens:.2f} characters per token, {unknown:.2%} unknown tokens")
        for text in sorted(excerpt, key=len, reverse=True)[:3]:
            example = textwrap.shorten(text[:1000], 100, placeholder="") or text[:100]
            ids = tokenizer.encode(example, eos=False, specials=False)
            print(f"example   {' '.join(map(tokenizer.token, ids))}")
        data = ["--data.dataset", self.data.dataset] if self.data.dataset else ["--data.train", *self.data.train]
        if self.data.unit != "line":
            data += ["--data.unit", self.data.unit]
        # Span corruption needs sentinels; a vocabulary without them is for a language model.
        task, preset = ("denoise", "t5-v1_1-mini") if self.sentinels else ("language", "vq-tiny")
        flags = shlex.join(["--model.preset", preset, "--model.tokenizer", str(self.out), *data])
        print(f"next      flaxen train {task} --out run {flags}")


def _check_writable(out: Path) -> None:
    """Raise unless `out` can be created."""
    parent = next(path for path in out.absolute().parents if path.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"cannot write {out}: {parent} is not a writable directory")


def _interruptible(work: Callable[[], Files]) -> Files:
    """Run `work` in another thread and return its result.

    The trainers are native code that ignores Ctrl-C for minutes; waiting for a thread can be interrupted at once.
    """
    result: Future[Files] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result()
