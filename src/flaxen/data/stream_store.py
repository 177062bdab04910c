"""Token streams for language modelling: raw bytes, pixels of images, or concatenated texts, cut into sequences."""

import gzip
import hashlib
import zlib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from flaxen.data.corpus import DataSource
from flaxen.data.files import find_files
from flaxen.data.store import Tokens, open_corpus, open_store
from flaxen.data.streams import LanguageData
from flaxen.data.tokenizers import Tokenizer
from flaxen.errors import InputError

FIRST = 3  # id of byte 0, after pad, eos and unk
MEASURED = 1 << 22  # at most this many tokens are used to estimate words and bytes per token
SPLITS = ("train", "validation", "test")


@runtime_checkable
class Stream(Protocol):
    """A long sequence of token ids."""

    def __len__(self) -> int: ...

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return `length` tokens starting at each of `starts`, as int32 [len(starts), length]."""

    @property
    def identity(self) -> str:
        """Digest of the contents, for the record of a run."""

    def measured(self) -> "TextSize":
        """Return the size of the text in tokens, words and bytes, to convert losses per token to other units."""


class TextSize(NamedTuple):
    """Size of a text in tokens, in words (separated by whitespace) and in UTF-8 bytes."""

    tokens: float
    words: float
    bytes: float


@dataclass(frozen=True)
class ByteStream:
    """Bytes first … last - 1 of an array, as token ids."""

    array: np.ndarray  # uint8
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return `length` tokens starting at each of `starts`, as int32 [len(starts), length]."""
        starts = np.asarray(starts, np.int64)
        if len(starts) and (starts.min() < 0 or starts.max() + length > len(self)):
            raise IndexError(
                f"rows of {length} bytes at positions {starts.min()} to {starts.max()} "
                f"extend past the end of the data ({len(self)} bytes)"
            )
        result = np.empty((len(starts), length), np.int32)
        for row, start in enumerate(starts):
            result[row] = self.array[self.first + start : self.first + start + length]
        return result + FIRST

    def measured(self) -> TextSize:
        """Return the size in tokens and bytes, which are the same; words are not counted."""
        return TextSize(len(self), 0, len(self))

    @property
    def identity(self) -> str:
        """Digest of the bytes, for the record of a run."""
        digest = hashlib.blake2b(digest_size=16)
        # In pieces of 16 MB, because tobytes() copies.
        for start in range(self.first, self.last, 1 << 24):
            digest.update(self.array[start : min(start + (1 << 24), self.last)].tobytes())
        return f"{digest.hexdigest()}[{len(self)}]"


def open_streams(data: LanguageData, tokenizer: Tokenizer, progress: bool = True) -> "Splits":
    """Open the training, validation and test streams."""
    if data.kind == "text":
        return Splits({name: _open_text(data, name, tokenizer, progress) for name in SPLITS}, ())
    if data.dataset:
        raise InputError(
            f"data.dataset has no effect with data.kind {data.kind}, which reads files; remove it or set data.kind text"
        )
    patterns = {"train": data.train, "validation": data.validation, "test": data.test}
    if not data.train:
        raise InputError("--data.train is required; pass the files to train on")
    shape: tuple[int, ...] = ()
    arrays: dict[str, np.ndarray] = {}
    for name, files in patterns.items():
        if files and data.kind == "bytes":
            arrays[name] = _concatenate([_read_bytes(path) for path in find_files(files, any_kind=True)])
        elif files:
            from flaxen.data.pixels import open_pixels

            images = open_pixels(files, data.image_size)
            if shape and images.shape[1:] != shape:
                raise InputError(
                    f"data.{name}: expected images of shape {shape}, as in data.train, got {images.shape[1:]}"
                )
            shape, arrays[name] = images.shape[1:], images.reshape(-1)
    return Splits(_split_bytes(data, arrays, int(np.prod(shape)) or 1), shape)


def _split_bytes(data: LanguageData, arrays: dict[str, np.ndarray], unit: int) -> dict[str, Stream]:
    """Build the splits: those without files of their own are cut from the training data, at multiples of `unit`."""
    train = arrays["train"]
    for name, array in arrays.items():
        if not len(array):
            raise InputError(f"{', '.join(getattr(data, name))}: expected {data.kind}, got an empty file")
    from_train = ["train"] + [name for name in SPLITS[1:] if name not in arrays]
    cuts = np.cumsum([share if name in from_train else 0.0 for name, share in zip(SPLITS, data.proportions)])
    if not cuts[-1]:
        raise InputError(f"data.shares {data.proportions} leaves no training data; increase the first number")
    # A unit is an image, which must not be cut in two, or a single byte.
    cuts = np.round(len(train) // unit * cuts / cuts[-1]).astype(int) * unit
    cuts[-1] = len(train)  # a remainder smaller than a unit belongs to the last split
    parts: dict[str, Stream] = {}
    for name, first, last in zip(SPLITS, [0, *cuts[:-1].tolist()], cuts.tolist()):
        parts[name] = (
            ByteStream(train, first, last) if name in from_train else ByteStream(arrays[name], 0, len(arrays[name]))
        )
    return parts


def _open_text(data: LanguageData, name: str, tokenizer: Tokenizer, progress: bool) -> Stream:
    """Open a split of texts. Training and validation are split by `open_corpus`; without test files, test is empty."""
    source = data.train_source()
    if name == "test":
        source = data.of_files(data.test) if data.test else source
        store = open_store(source, tokenizer, data.cache, progress)
        return TextStream(Tokens(store, 0, store.n_tokens if data.test else 0), source)
    train, validation = open_corpus(data, tokenizer, progress)
    if name == "train":
        return TextStream(train, source)
    return TextStream(validation, data.validation_source() or source)


@dataclass(frozen=True)
class TextStream:
    """Tokens of a store, and the texts they encode."""

    tokens: Tokens
    source: DataSource

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return `length` tokens starting at each of `starts`, as int32 [len(starts), length]."""
        return self.tokens.rows(starts, length)

    def measured(self) -> TextSize:
        """Measure the first documents, up to MEASURED tokens.

        The texts are read again, because tokens preserve neither the spelling of unknown words nor the ends of lines.
        """
        store, first, last = self.tokens.store, self.tokens.first, self.tokens.last
        document_starts = np.concatenate([[0], np.cumsum(store.document_lengths())])
        begin, end = np.searchsorted(document_starts, [first, min(last, first + MEASURED)]).tolist()
        # At least one document: a part may be smaller than that, if the only document was split.
        end = min(max(end, begin + 1), store.n_documents)
        begin = min(begin, end - 1)
        words = size = 0
        for text in islice(self.source.texts(), begin, end):
            words, size = words + len(text.split()), size + len(text.encode())
        tokens = int(document_starts[end] - document_starts[begin])
        return TextSize(tokens, words, size)

    @property
    def identity(self) -> str:
        """Digest and range of the tokens, for the record of a run."""
        return f"{self.tokens.store.digest}[{self.tokens.first}:{self.tokens.last}]"


@dataclass(frozen=True)
class Splits:
    """The streams of a corpus by split, and the shape of its images, () for text and bytes."""

    splits: dict[str, Stream]
    shape: tuple[int, ...]


def _read_bytes(path: Path) -> np.ndarray:
    """Memory-map a file as bytes, or decompress it if it ends in .gz."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                return np.frombuffer(file.read(), np.uint8)
        # An empty file cannot be memory-mapped.
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from None


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    """Concatenate arrays; a single one is returned without a copy, so that it stays memory-mapped."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def sequences(stream: Stream, numbers: np.ndarray, length: int, eos: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (inputs, targets) [rows, length] of the sequences with these numbers.

    Sequence i starts at token i · length; the last one is padded. Inputs are targets shifted right, starting with eos.
    """
    return pieces(stream, numbers * length, np.zeros(len(numbers), bool), length, eos, pad)


def pieces(
    stream: Stream, starts: np.ndarray, inner: np.ndarray, length: int, eos: int, pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (inputs, targets) starting at each of `starts`, padded at the end of the stream.

    Inputs are targets shifted right. Their first token is eos or, if the piece is `inner` (continues a sequence),
    the token before the piece.
    """
    starts = np.asarray(starts, np.int64)
    targets = np.full((len(starts), length), pad, np.int32)
    first = np.full((len(starts), 1), eos, np.int32)
    complete = starts + length <= len(stream)
    targets[complete] = stream.rows(starts[complete], length)
    for row in np.flatnonzero(~complete & (starts < len(stream))):
        rest = len(stream) - int(starts[row])
        targets[row, :rest] = stream.rows(starts[row : row + 1], rest)[0]
    # A piece beyond the end of the stream is all padding and has no token before it.
    continued = inner & (starts > 0) & (starts <= len(stream))
    first[continued] = stream.rows(starts[continued] - 1, 1)
    return np.concatenate([first, targets[:, :-1]], axis=1), targets
