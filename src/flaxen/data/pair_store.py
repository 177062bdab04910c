"""Tokens of source/target pairs on disk, batching by length (bucketing) and sequence packing."""

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

# Number of batches to sort by length together: enough for batches of similar lengths, few enough for a random order.
WINDOW = 32
OPEN_ROWS = 512  # number of most recent rows that packing tries to fill
MIXED = 0x5EED  # xored into the seed, to shuffle batches independently of pairs


class PairLengths(NamedTuple):
    """Number of tokens in a source and in a target, eos included."""

    source: int
    target: int


@dataclass(frozen=True)
class PairTokens:
    """Pairs first … last - 1 of a token store whose documents alternate between source and target."""

    source: PairSource
    store: TokenStore
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    @cached_property
    def lengths(self) -> Int64[np.ndarray, "P 2"]:
        """Tokens of the source and of the target of each pair."""
        return self.store.document_lengths()[2 * self.first : 2 * self.last].reshape(-1, 2)

    def pair(self, number: int, limits: PairLengths) -> tuple[np.ndarray, np.ndarray]:
        """Return source and target, truncated to their limits; a truncated text still ends in eos."""
        document = 2 * (self.first + number)
        # Document 2 i is the source of pair i, document 2 i + 1 its target.
        source, target = (_truncate(self.store.document(document + side), limit) for side, limit in enumerate(limits))
        return source, target

    @property
    def name(self) -> str:
        """Identity of the pairs, for the record of a run."""
        return f"{self.store.digest}[{self.first}:{self.last}]"


def _truncate(ids: np.ndarray, limit: int) -> np.ndarray:
    return ids if len(ids) <= limit else np.append(ids[: limit - 1], ids[-1])


def open_pairs(pairs: Pairs, tokenizer: Tokenizer, progress: bool = True) -> tuple[PairTokens, PairTokens]:
    """Open the training and the validation pairs; without separate validation data, hold out the first pairs."""
    train, validation = pairs.train_source(), pairs.validation_source()
    assert isinstance(train, PairSource)
    store = open_store(train, tokenizer, pairs.cache, progress)
    n = store.n_documents // 2
    if isinstance(validation, PairSource):
        validation_store = open_store(validation, tokenizer, pairs.cache, progress)
        return PairTokens(train, store, 0, n), PairTokens(
            validation, validation_store, 0, validation_store.n_documents // 2
        )
    held = min(max(round(n * pairs.validation_percent / 100), 1), n - 1) if pairs.validation_percent else 0
    return PairTokens(train, store, held, n), PairTokens(train, store, 0, held)


def shapes(lengths: Int64[np.ndarray, "P"], count: int) -> tuple[int, ...]:
    """Choose at most `count` lengths to pad to (buckets), each for an equal fraction of the data.

    They should be few, because XLA compiles the step once per shape.
    """
    quantiles = np.quantile(lengths, np.arange(1, count + 1) / count, method="higher")
    return tuple(sorted({16 * -(-int(length) // 16) for length in quantiles}))  # rounded up to multiples of 16


def fitting(length: int, among: tuple[int, ...]) -> int:
    """Return the smallest of the (sorted) shapes that holds `length` tokens."""
    return next(shape for shape in among if shape >= length)


class Groups:
    """Batches of pairs of similar length, in an order that depends only on (seed, step)."""

    def __init__(self, lengths: Int64[np.ndarray, "P 2"], seed: int):
        self.lengths, self.seed = lengths, seed
        self._window = lru_cache(maxsize=2)(self._sort_window)

    def batch(self, step: int, size: int) -> Int64[np.ndarray, "B"]:
        """Return the pair numbers of the batch of a step."""
        batches = self.window(size)
        window, position = divmod(step, batches)
        # A window is sorted by length; without this shuffle, every window would begin with its shortest pairs.
        mixed = permute(np.array([position]), batches, (self.seed ^ MIXED, window))[0]
        return self._window(window, size)[mixed * size :][:size]

    def window(self, size: int) -> int:
        """Return the number of batches per window: at most one epoch, since sorting puts repeated pairs together."""
        return min(WINDOW, max(1, len(self.lengths) // size))

    def _sort_window(self, window: int, size: int) -> Int64[np.ndarray, "R"]:
        """Return the pair numbers of all batches of a window, shortest first (by source, then target)."""
        count = self.window(size) * size
        numbers = examples(window, (0, count), count, len(self.lengths), self.seed)
        return numbers[np.lexsort((self.lengths[numbers, 1], self.lengths[numbers, 0]))]


def pack(lengths: Int64[np.ndarray, "P 2"], limits: PairLengths) -> list[list[int]]:
    """Pack pairs into rows: first-fit decreasing, with room for `limits` tokens of source and target per row."""
    if len(lengths) and (lengths > np.array(limits)).any():
        raise InputError(
            f"cannot pack a pair longer than a row ({limits.source} source and {limits.target} target tokens)"
        )
    rows: list[list[int]] = []
    room = np.zeros((0, 2), np.int64)  # tokens left in each of the last OPEN_ROWS rows
    # Longest first: short pairs then fill the room that the long ones leave.
    for number in np.lexsort((lengths[:, 1], lengths[:, 0]))[::-1]:
        fits = np.flatnonzero((room >= lengths[number]).all(axis=1))
        if not len(fits):
            rows.append([])
            room = np.concatenate([room, [limits]])[-OPEN_ROWS:]
            fits = np.array([len(room) - 1])
        first = int(fits[0])
        rows[len(rows) - len(room) + first].append(int(number))
        room[first] -= lengths[number]
    return rows
