"""Long rows of tokens to predict: raw bytes, the pixels of pictures, or the tokens of texts laid end to end."""

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

FIRST = 3  # the id of byte 0: pad, end and unknown come before
MEASURED = 1 << 22  # tokens that words and bytes are counted in, at most
SPLITS = ("train", "validation", "test")


@runtime_checkable
class Stream(Protocol):
    """A row of token ids."""

    def __len__(self) -> int: ...

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """int32 [len(starts), length]: the tokens from each start on."""

    @property
    def identity(self) -> str:
        """What it holds, for the record of a run."""

    def measured(self) -> "TextSize":
        """How long it is in other units."""


class TextSize(NamedTuple):
    """Tokens of a text, and what they are in words, which white space separates, and in bytes of UTF-8."""

    tokens: float
    words: float
    bytes: float


@dataclass(frozen=True)
class ByteStream:
    """Bytes first … last - 1 of an array, as ids."""

    array: np.ndarray  # uint8
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        starts = np.asarray(starts, np.int64)
        if len(starts) and (starts.min() < 0 or starts.max() + length > len(self)):
            raise IndexError(f"rows of {length} from {starts.min()} … {starts.max()} leave the {len(self)} bytes")
        found = np.empty((len(starts), length), np.int32)
        for row, start in enumerate(starts):
            found[row] = self.array[self.first + start : self.first + start + length]
        return found + FIRST

    def measured(self) -> TextSize:
        return TextSize(len(self), 0, len(self))

    @property
    def identity(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for at in range(self.first, self.last, 1 << 24):
            digest.update(self.array[at : min(at + (1 << 24), self.last)].tobytes())
        return f"{digest.hexdigest()}[{len(self)}]"


def open_streams(data: LanguageData, tokenizer: Tokenizer, progress: bool = True) -> "Splits":
    """The splits that the settings name."""
    if data.kind == "text":
        return Splits({name: _text(data, name, tokenizer, progress) for name in SPLITS}, ())
    if data.dataset:
        raise InputError(f"data.kind {data.kind} reads files; data.dataset is for data.kind text")
    given = {"train": data.train, "validation": data.validation, "test": data.test}
    if not data.train:
        raise InputError("expected files to train on; name them with --data.train")
    shape: tuple[int, ...] = ()
    arrays: dict[str, np.ndarray] = {}
    for name, places in given.items():
        if places and data.kind == "bytes":
            arrays[name] = _joined([_raw(path) for path in find_files(places, any_kind=True)])
        elif places:
            from flaxen.data.pixels import open_pixels

            pictures = open_pixels(places, data.image_size)
            if shape and pictures.shape[1:] != shape:
                raise InputError(f"pictures to {name} on have shape {pictures.shape[1:]}, others {shape}")
            shape, arrays[name] = pictures.shape[1:], pictures.reshape(-1)
    return Splits(_shared(data, arrays, int(np.prod(shape)) or 1), shape)


def _shared(data: LanguageData, arrays: dict[str, np.ndarray], unit: int) -> dict[str, Stream]:
    """Splits with files of their own are whole; the others share the training data, cut at whole units."""
    train = arrays["train"]
    for name, array in arrays.items():
        if not len(array):
            raise InputError(f"{', '.join(getattr(data, name))}: empty; expected {data.kind}")
    alone = ["train"] + [name for name in SPLITS[1:] if name not in arrays]
    cuts = np.cumsum([share if name in alone else 0.0 for name, share in zip(SPLITS, data.proportions)])
    if not cuts[-1]:
        raise InputError(f"data.shares leave nothing to train on: {data.proportions}")
    cuts = np.round(len(train) // unit * cuts / cuts[-1]).astype(int) * unit
    cuts[-1] = len(train)
    parts: dict[str, Stream] = {}
    for name, first, last in zip(SPLITS, [0, *cuts[:-1].tolist()], cuts.tolist()):
        parts[name] = (
            ByteStream(train, first, last) if name in alone else ByteStream(arrays[name], 0, len(arrays[name]))
        )
    return parts


def _text(data: LanguageData, name: str, tokenizer: Tokenizer, progress: bool) -> Stream:
    """As `open_corpus` divides, and files to test on if there are any."""
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
    """Tokens of a store, and the texts that it was made of."""

    tokens: Tokens
    source: DataSource

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        return self.tokens.rows(starts, length)

    def measured(self) -> TextSize:
        """Of its first documents, up to MEASURED tokens. They are read again: tokens do not tell what is unknown to the
        vocabulary, nor where lines ended."""
        store, first, last = self.tokens.store, self.tokens.first, self.tokens.last
        begins = np.concatenate([[0], np.cumsum(store.document_lengths())])
        one, end = np.searchsorted(begins, [first, min(last, first + MEASURED)]).tolist()
        end = min(max(end, one + 1), store.n_documents)
        one = min(one, end - 1)
        words = size = 0
        for text in islice(self.source.texts(), one, end):
            words, size = words + len(text.split()), size + len(text.encode())
        tokens = int(begins[end] - begins[one])
        return TextSize(tokens, words, size)

    @property
    def identity(self) -> str:
        return f"{self.tokens.store.digest}[{self.tokens.first}:{self.tokens.last}]"


@dataclass(frozen=True)
class Splits:
    """The splits of a corpus, and the shape of a picture if it has pictures."""

    splits: dict[str, Stream]
    shape: tuple[int, ...]


def _raw(path: Path) -> np.ndarray:
    """The bytes of a file; of a .gz, what it holds."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                return np.frombuffer(file.read(), np.uint8)
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def sequences(stream: Stream, numbers: np.ndarray, length: int, eos: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets) [rows, length] of sequences by number: the tokens number · length … of the stream, the last one
    filled up with padding. Each is prompted with an end token."""
    return pieces(stream, numbers * length, np.zeros(len(numbers), bool), length, eos, pad)


def pieces(
    stream: Stream, starts: np.ndarray, inner: np.ndarray, length: int, eos: int, pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets) from each start on. An `inner` piece goes on: it is prompted with the token before it."""
    starts = np.asarray(starts, np.int64)
    targets = np.full((len(starts), length), pad, np.int32)
    prompts = np.full((len(starts), 1), eos, np.int32)
    whole = starts + length <= len(stream)
    targets[whole] = stream.rows(starts[whole], length)
    for row in np.flatnonzero(~whole & (starts < len(stream))):
        rest = len(stream) - int(starts[row])
        targets[row, :rest] = stream.rows(starts[row : row + 1], rest)[0]
    going = inner & (starts > 0) & (starts <= len(stream))
    prompts[going] = stream.rows(starts[going] - 1, 1)
    return np.concatenate([prompts, targets[:, :-1]], axis=1), targets
