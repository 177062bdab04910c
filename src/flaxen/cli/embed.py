"""flaxen embed MODEL --text … | --file …: embed texts with a T5 encoder."""

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

from flaxen.atomic import check_output
from flaxen.cli.prompts import checkpoint_stamps, file_stamps, progress, read_prompts, windows
from flaxen.cli.resumable import ResumableArray, ResumableLines
from flaxen.data.files import kind_of
from flaxen.data.tables import READERS
from flaxen.errors import InputError

if TYPE_CHECKING:
    import numpy

    from flaxen.pretrained.embedding import Embedder

Texts = Iterable[tuple[str | None, str]]


@dataclass(frozen=True)
class Embed:
    """Embed texts with a T5 encoder, one vector per text.

    Example: flaxen embed google/flan-t5-small --file texts.jsonl --column text --out embeddings.npy
    """

    model: tyro.conf.Positional[str]
    """Checkpoint directory or Hugging Face hub id."""
    text: tuple[str, ...] = ()
    """Texts to embed."""
    file: str | None = None
    """File with the texts: one per line, or one per row of a .jsonl, .json, .csv, .tsv or .parquet table; '-' reads
    standard input. Default: none."""
    column: str = "text"
    """Table column with the text, or a template of columns such as 'query: {question}'."""
    out: Path | None = None
    """Output file: .npy (float32, one row per text) or .jsonl. The file appears once all output is written; if
    interrupted, rerun the command to resume. Default: JSON lines on standard output."""
    pooling: Literal["mean", "first", "cls", "max", "none"] | None = None
    """How to pool the token vectors of a text into one vector; 'cls' is another name for 'first'; 'none' outputs one
    vector per token (not for .npy).
    Default: the checkpoint's pooling, else mean."""
    normalise: bool = False
    """Normalise each embedding to unit length (L2 norm 1). Default: the checkpoint's setting, else off."""
    length: int | None = None
    """Maximum number of tokens per text; longer texts are truncated. Default: the checkpoint's limit, if any."""
    subfolder: str | None = None
    """Subfolder of MODEL that contains the checkpoint, such as text_encoder_2 of a diffusion model. Default: MODEL
    itself."""
    adapter: str | None = None
    """Directory or hub id of a LoRA adapter to merge into the model. Default: none."""
    batch_size: int = 16
    """Number of texts per batch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights in memory and of matrix products."""

    def run(self, given_flags: set[str]) -> None:
        if bool(self.text) + (self.file is not None) != 1:
            raise InputError("exactly one of --text and --file is required")
        if "column" in given_flags and (self.file is None or kind_of(Path(self.file)) not in READERS):
            raise InputError("--column requires a table; pass one with --file")
        if self.out is not None and self.out.suffix not in (".npy", ".jsonl"):
            raise InputError(f"--out must end in .npy or .jsonl, got {self.out}")
        if self.out is not None and self.out.suffix == ".npy" and self.pooling == "none":
            raise InputError(
                "embeddings with --pooling none cannot be written to .npy, because texts differ in length; "
                "use a .jsonl file"
            )
        if self.out is not None:
            check_output(self.out, (self.file,) if self.file else ())
        texts, n = read_prompts(self.text, self.file, self.column)

        import flaxen
        from flaxen.pretrained.embedding import Embedder

        pretrained = flaxen.load(self.model, dtype=self.dtype, adapter=self.adapter, subfolder=self.subfolder)
        normalise = self.normalise if "normalise" in given_flags else None  # None: use the checkpoint's setting
        embedder = Embedder(pretrained, self.pooling, normalise, self.batch_size, self.length)
        started, done = time.monotonic(), 0
        if self.out is None:
            for first, ids, embeddings in self._windows(embedder, texts, n, 0):
                for line in _lines(first, ids, embeddings):
                    print(line, flush=True)
        else:
            done = self._to_file(self.out, embedder, texts, n)
        destination = "" if self.out is None else f" in {self.out}"
        cut = f"; truncated {embedder.cut:,} texts to {embedder.length} tokens" if embedder.cut else ""
        rate = (n - done) / max(time.monotonic() - started, 1e-9)
        print(
            f"{n:,} embeddings of dimension {embedder.width:,}{destination}, {rate:,.1f} texts/s{cut}", file=sys.stderr
        )

    def _to_file(self, out: Path, embedder: "Embedder", texts: Texts, n: int) -> int:
        """Write the embeddings to a file; return how many an earlier, interrupted command had already written."""
        key = {
            "model": checkpoint_stamps(self.model, self.subfolder), "adapter": checkpoint_stamps(self.adapter),
            "texts": [*self.text, self.file], "column": self.column, "dtype": self.dtype, "batch": self.batch_size,
            "file": file_stamps(self.file, texts),
            "how": [embedder.pooling, embedder.normalise, embedder.length],
        }  # fmt: skip
        # Resume at a window boundary, so that batches and results are the same as without the interruption.
        stride = self._stride
        is_array = out.suffix == ".npy"
        opened: Any = (
            ResumableArray(out, key, stride, n, embedder.width) if is_array else ResumableLines(out, key, stride)
        )
        with closing(opened) as written:
            done = min(written.items * stride, n)
            if done:
                print(f"resuming after text {done:,} of {n:,}", file=sys.stderr)
            for first, ids, embeddings in self._windows(embedder, texts, n, done):
                written.write(_array(embeddings) if is_array else _lines(first, ids, embeddings))
            written.finish()
        return done

    @property
    def _stride(self) -> int:
        """Return the number of texts per window."""
        return 8 * self.batch_size

    def _windows(
        self, embedder: "Embedder", texts: Texts, n: int, done: int
    ) -> Iterator[tuple[int, tuple[str | None, ...], "list[numpy.ndarray]"]]:
        """Yield (index of the first text, ids, embeddings) for a few batches at a time.

        The embedder sorts the texts of a window by length, so that batches have little padding.
        """
        with progress("embedding", n, done, n > self.batch_size) as report:
            for window in windows(islice(texts, done, None), self._stride):
                ids, prompts = zip(*window)
                yield done, ids, embedder(prompts)
                done += len(window)
                report(done)


def _array(embeddings: "list[numpy.ndarray]") -> "numpy.ndarray":
    import numpy as np

    return np.stack(embeddings)


def _lines(first: int, ids: tuple[str | None, ...], embeddings: "list[numpy.ndarray]") -> Iterator[str]:
    for i, (id, embedding) in enumerate(zip(ids, embeddings), first):
        named = {} if id is None else {"id": id}
        yield json.dumps(named | {"index": i, "embedding": _numbers(embedding)})


def _numbers(array: "numpy.ndarray") -> list[Any]:
    """Convert to a list of floats with the fewest digits that identify the same float32."""
    return [float(str(value)) if array.ndim == 1 else _numbers(value) for value in array]
