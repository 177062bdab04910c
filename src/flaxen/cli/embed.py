"""flaxen embed MODEL --text … | --file …"""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from flaxen.cli.prompts import ResumableArray, ResumableLines, checkpoint_stamps, progress, read_prompts, windows
from flaxen.data.files import kind_of, stamps
from flaxen.data.tables import READERS
from flaxen.errors import InputError

if TYPE_CHECKING:
    import numpy

    from flaxen.pretrained.embedding import Embedder

Texts = Iterable[tuple[str | None, str]]


@dataclass(frozen=True)
class Embed:
    """Embed texts with the encoder of a T5: one vector for each."""

    model: tyro.conf.Positional[str]
    """Checkpoint directory or hub id."""
    text: tuple[str, ...] = ()
    """Texts."""
    file: str | None = None
    """Texts from a file: one per line, or the rows of .jsonl .json .csv .tsv .parquet; '-' reads standard input."""
    column: str = "text"
    """Column of a table that holds the text, or a template such as 'query: {question}'."""
    out: Path | None = None
    """Write to this .npy file (float32, a row per text) or .jsonl file; appears when complete. After a kill, rerun the
    command to resume. Default: JSON lines on standard output."""
    pooling: Literal["mean", "first", "cls", "max", "none"] | None = None
    """How the states of the tokens become one vector; 'none' keeps them all. Default: the checkpoint's, else mean."""
    normalise: bool = False
    """Scale every embedding to length 1. Default: as the checkpoint says, else no."""
    length: int | None = None
    """Tokens that longer texts are cut to. Default: the checkpoint's limit, if it has one."""
    subfolder: str | None = None
    """Folder of the checkpoint in MODEL, such as text_encoder_2 of a diffusion model."""
    adapter: str | None = None
    """Directory or hub id of a LoRA adapter to add to the model."""
    batch_size: int = 16
    """Texts computed together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the weights in memory and of matrix products."""

    def run(self, given: set[str]) -> None:
        if bool(self.text) + (self.file is not None) != 1:
            raise InputError("give texts either with --text or with --file")
        if "column" in given and (self.file is None or kind_of(Path(self.file)) not in READERS):
            raise InputError("--column is of a table: give one with --file")
        if self.out is not None and self.out.suffix not in (".npy", ".jsonl"):
            raise InputError(f"--out {self.out}: expected a name that ends in .npy or .jsonl")
        if self.out is not None and self.out.suffix == ".npy" and self.pooling == "none":
            raise InputError("--pooling none has a row for every token, and texts differ in length; write .jsonl")
        texts, n = read_prompts(self.text, self.file, self.column)

        import flaxen
        from flaxen.pretrained.embedding import Embedder

        pretrained = flaxen.load(self.model, dtype=self.dtype, adapter=self.adapter, subfolder=self.subfolder)
        normalise = self.normalise if "normalise" in given else None  # else as the checkpoint says
        embedder = Embedder(pretrained, self.pooling, normalise, self.batch_size, self.length)
        started, done = time.monotonic(), 0
        if self.out is None:
            for first, ids, found in self._windows(embedder, texts, n, 0):
                for line in _lines(first, ids, found):
                    print(line, flush=True)
        else:
            done = self._to_file(self.out, embedder, texts, n)
        where = "" if self.out is None else f" in {self.out}"
        cut = f"; {embedder.cut:,} texts were cut to {embedder.length} tokens" if embedder.cut else ""
        rate = (n - done) / max(time.monotonic() - started, 1e-9)
        print(f"{n:,} embeddings of {embedder.width:,} numbers{where}, {rate:,.1f} texts/s{cut}", file=sys.stderr)

    def _to_file(self, out: Path, embedder: "Embedder", texts: Texts, n: int) -> int:
        """How many embeddings were there already, from a command that was killed."""
        key = {
            "model": checkpoint_stamps(self.model, self.subfolder), "adapter": checkpoint_stamps(self.adapter),
            "texts": [*self.text, self.file], "column": self.column, "dtype": self.dtype, "batch": self.batch_size,
            "file": stamps((Path(self.file),)) if self.file not in (None, "-") else None,
            "how": [embedder.pooling, embedder.normalise, embedder.length],
        }  # fmt: skip
        # Whole windows are kept, so that the batches after them are those of a command that was never killed.
        stride = self._stride
        rows = out.suffix == ".npy"
        opened: Any = ResumableArray(out, key, stride, n, embedder.width) if rows else ResumableLines(out, key, stride)
        with closing(opened) as written:
            done = min(written.items * stride, n)
            if done:
                print(f"resuming after text {done:,} of {n:,}", file=sys.stderr)
            for first, ids, found in self._windows(embedder, texts, n, done):
                written.write(_array(found) if rows else _lines(first, ids, found))
            written.finish()
        return done

    @property
    def _stride(self) -> int:
        return 8 * self.batch_size

    def _windows(
        self, embedder: "Embedder", texts: Texts, n: int, done: int
    ) -> Iterator[tuple[int, tuple[str | None, ...], "list[numpy.ndarray]"]]:
        """Embeddings of some batches at a time, whose texts are sorted by length among themselves."""
        with progress("embedding", n, done, n > self.batch_size) as report:
            for window in windows(islice(texts, done, None), self._stride):
                ids, chosen = zip(*window)
                yield done, ids, embedder(chosen)
                done += len(window)
                report(done)


def _array(found: "list[numpy.ndarray]") -> "numpy.ndarray":
    import numpy as np

    return np.stack(found)


def _lines(first: int, ids: tuple[str | None, ...], found: "list[numpy.ndarray]") -> Iterator[str]:
    for i, (id, one) in enumerate(zip(ids, found), first):
        named = {} if id is None else {"id": id}
        yield json.dumps(named | {"index": i, "embedding": _numbers(one)})


def _numbers(array: "numpy.ndarray") -> list[Any]:
    """As few digits as spell the same float32."""
    return [float(str(one)) if array.ndim == 1 else _numbers(one) for one in array]
