"""The tokens of pairs on disk, and in which shapes they meet a model."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from flaxen.data.order import examples, permute
from flaxen.data.pairs import Pairs, PairSource
from flaxen.data.store import TokenStore, open_store
from flaxen.data.tokenizers import Tokenizer
from flaxen.errors import InputError

WINDOW = 32  # batches among which pairs are sorted by length: enough for even batches, few for a random order
OPEN_ROWS = 512  # that packing looks at for room
MIXED = 0x5EED  # so that the order of a window's batches is not that of its pairs


class PairLengths(NamedTuple):
    """Tokens of a source and of a target, their ends included."""

    source: int
    target: int


@dataclass(frozen=True)
class PairTokens:
    """The pairs first … last - 1 of a store, whose documents are sources and targets by turns."""

    source: PairSource
    store: TokenStore
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    @cached_property
    def lengths(self) -> Int64[np.ndarray, "P 2"]:
        return self.store.document_lengths()[2 * self.first : 2 * self.last].reshape(-1, 2)

    def pair(self, number: int, limits: PairLengths) -> tuple[np.ndarray, np.ndarray]:
        """Source and target, cut to their limits; what is cut still has its end token."""
        at = 2 * (self.first + number)
        source, target = (_cut(self.store.document(at + side), limit) for side, limit in enumerate(limits))
        return source, target

    @property
    def name(self) -> str:
        return f"{self.store.digest}[{self.first}:{self.last}]"


def _cut(ids: np.ndarray, limit: int) -> np.ndarray:
    return ids if len(ids) <= limit else np.append(ids[: limit - 1], ids[-1])


def open_pairs(pairs: Pairs, tokenizer: Tokenizer, progress: bool = True) -> tuple[PairTokens, PairTokens]:
    """The pairs to train on, and those to validate on."""
    train, validation = pairs.train_source(), pairs.validation_source()
    assert isinstance(train, PairSource)
    store = open_store(train, tokenizer, pairs.cache, progress)
    n = store.n_documents // 2
    if isinstance(validation, PairSource):
        other = open_store(validation, tokenizer, pairs.cache, progress)
        return PairTokens(train, store, 0, n), PairTokens(validation, other, 0, other.n_documents // 2)
    held = min(max(round(n * pairs.validation_percent / 100), 1), n - 1) if pairs.validation_percent else 0
    return PairTokens(train, store, held, n), PairTokens(train, store, 0, held)


def shapes(lengths: Int64[np.ndarray, "P"], count: int) -> tuple[int, ...]:
    """At most `count` lengths to pad to: each holds an equal share of what there is. Few, because each is compiled."""
    marks = np.quantile(lengths, np.arange(1, count + 1) / count, method="higher")
    return tuple(sorted({16 * -(-int(mark) // 16) for mark in marks}))


def fitting(length: int, among: tuple[int, ...]) -> int:
    return next(shape for shape in among if shape >= length)


class Groups:
    """Batches of pairs of like lengths, in an order that is a function of (seed, step)."""

    def __init__(self, lengths: Int64[np.ndarray, "P 2"], seed: int):
        self.lengths, self.seed = lengths, seed
        self._window = lru_cache(maxsize=2)(self._sorted)

    def batch(self, step: int, size: int) -> Int64[np.ndarray, "B"]:
        batches = self.window(size)
        window, place = divmod(step, batches)
        mixed = permute(np.array([place]), batches, (self.seed ^ MIXED, window))[0]
        return self._window(window, size)[mixed * size :][:size]

    def window(self, size: int) -> int:
        """No more batches than an epoch has, or a pair would stand beside itself."""
        return min(WINDOW, max(1, len(self.lengths) // size))

    def _sorted(self, window: int, size: int) -> Int64[np.ndarray, "R"]:
        """The pairs of so many batches, the shortest first."""
        count = self.window(size) * size
        numbers = examples(window, (0, count), count, len(self.lengths), self.seed)
        return numbers[np.lexsort((self.lengths[numbers, 1], self.lengths[numbers, 0]))]


def pack(lengths: Int64[np.ndarray, "P 2"], limits: PairLengths) -> list[list[int]]:
    """The pairs of each row, several to a row while there is room: the longest first, each where it fits first."""
    if len(lengths) and (lengths > np.array(limits)).any():
        raise InputError(f"a pair is longer than a row of {limits.source} and {limits.target} tokens")
    rows: list[list[int]] = []
    room = np.zeros((0, 2), np.int64)
    for number in np.lexsort((lengths[:, 1], lengths[:, 0]))[::-1]:
        fits = np.flatnonzero((room[-OPEN_ROWS:] >= lengths[number]).all(axis=1))
        if not len(fits):
            rows.append([])
            room = np.concatenate([room[-OPEN_ROWS:], [limits]])
            fits = np.array([len(room) - 1])
        place = int(fits[0])
        rows[len(rows) - len(room) + place].append(int(number))
        room[place] -= lengths[number]
    return rows
