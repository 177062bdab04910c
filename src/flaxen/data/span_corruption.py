"""T5's span corruption of a whole batch at once, and its inverse."""

import math
from bisect import bisect_right
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64, Integer

from flaxen.errors import InputError

# Rows gathered together. Their indices stay in the cache; those of 256 rows are also so large that malloc
# hands them back to the system each time, and fresh pages cost more than the gathering.
BLOCK = 32


class SpanLengths(NamedTuple):
    """Token counts of one corrupted row; `inputs` and `targets` count their sentinels and eos."""

    raw: int
    noise: int
    spans: int
    inputs: int
    targets: int


def lengths(input_length: int, noise_density: float, mean_span: float) -> SpanLengths:
    """The longest raw row whose corrupted inputs fit in `input_length`."""
    if input_length < 4:
        raise InputError(f"expected an input_length of at least 4, got {input_length}; T5 used 512")
    if not 0 < noise_density < 1:
        raise InputError(f"expected a noise density between 0 and 1, got {noise_density}; T5 used 0.15")
    if not 1 <= mean_span < math.inf:
        raise InputError(f"expected a mean span of at least 1 token, got {mean_span}; T5 used 3, ByT5 20")

    def of(raw: int) -> SpanLengths:
        noise = min(max(round(raw * noise_density), 1), raw - 1)
        spans = min(max(round(noise / mean_span), 1), noise, raw - noise)
        return SpanLengths(raw, noise, spans, raw - noise + spans + 1, noise + spans + 1)

    # One raw token more adds one token to the text that is kept, or one to the noise and at most one
    # sentinel, so the inputs never shrink and bisection applies.
    too_long = math.ceil((input_length + 1) / (1 - noise_density)) + 1
    found = of(bisect_right(range(too_long), input_length, lo=2, key=lambda raw: of(raw).inputs) - 1)
    # As in t5: an odd row at density 0.5 may round to more noise than text, and then loses a token, so that
    # targets are no longer than inputs.
    return of(found.raw - 1) if noise_density == 0.5 and found.targets > found.inputs else found


def corrupt(
    raw: Integer[np.ndarray, "R raw"],
    lengths: SpanLengths,
    sentinels: tuple[int, ...],
    eos_id: int,
    key: tuple[int, int],
    first_row: int = 0,
) -> tuple[Int32[np.ndarray, "R inputs"], Int32[np.ndarray, "R targets"]]:
    """Text with a sentinel for each noise span, and the spans, each after its sentinel; both end in eos."""
    if raw.ndim != 2 or raw.shape[1] != lengths.raw:
        raise ValueError(f"expected raw rows of {lengths.raw} tokens, got an array of shape {raw.shape}")
    if lengths.spans > len(sentinels):
        raise InputError(
            f"expected at most {len(sentinels)} noise spans, one for each sentinel of the tokenizer, "
            f"got {lengths.spans}; raise mean_span or lower input_length"
        )
    kept, noise = draw_ends(lengths, len(raw), key, first_row)
    kept_length, noise_length = np.diff(kept, prepend=0), np.diff(noise, prepend=0)
    span = np.arange(lengths.spans)
    # Both are runs of raw with a slot for the sentinel: behind each kept run, before each noise run.
    before = noise - noise_length
    inputs = _gather(raw, before - span, kept_length + 1, lengths.inputs)
    targets = _gather(raw, kept - span - 1, noise_length + 1, lengths.targets)
    for result, slot in ((inputs, kept + span), (targets, before + span)):
        slot += np.arange(len(raw))[:, None] * result.shape[1]
        result.reshape(-1)[slot] = sentinels[: lengths.spans]  # half the time of put_along_axis
        result[:, -1] = eos_id
    return inputs, targets


def restore(
    inputs: Integer[np.ndarray, "inputs"],
    targets: Integer[np.ndarray, "targets"],
    sentinels: tuple[int, ...],
    eos_id: int,
) -> Integer[np.ndarray, "raw"]:
    """The raw row that `corrupt` made a row of inputs and targets of."""
    # Sentinels are looked for in turn, so the text may hold eos, pad and sentinels of later spans than there
    # are. Only ByT5, whose twelfth sentinel on are also bytes of text, can mislead this.
    if len(inputs) < 3 or inputs[-1] != eos_id or targets[-1:] != eos_id or inputs[-2] not in sentinels:
        raise ValueError(f"expected inputs that end in a sentinel and eos, targets in eos; got {inputs}, {targets}")
    used = sentinels[: sentinels.index(inputs[-2]) + 1]
    kept = np.split(inputs[:-1], _places(inputs, used, first=1))
    noise = np.split(targets[:-1], _places(targets, used, first=0))[1:]
    # All but the first kept part begin with a sentinel; behind the last one there is no text.
    parts = [kept[0], *(part[1:] for pair in zip(noise, kept[1:]) for part in pair)]
    return np.concatenate(parts)


def draw_ends(
    lengths: SpanLengths, rows: int, key: tuple[int, int], first_row: int = 0
) -> tuple[Int64[np.ndarray, "R spans"], Int64[np.ndarray, "R spans"]]:
    """How much text is kept, and how much is noise, up to the end of each span."""
    # T5's law: either count is divided into positive parts, all ways being equally likely. That is to choose
    # spans-1 of count-1 cut points, which Floyd's method does with as many draws, here for all rows at once.
    counts = (lengths.raw - lengths.noise, lengths.noise)
    cuts = lengths.spans - 1

    # Philox makes four words per count of its counter; whole counts per row let a row start anywhere.
    blocks = -(-cuts // 4)
    philox = np.random.Philox(key=_words(key), counter=first_row * blocks)
    fraction = np.random.Generator(philox).random((rows, blocks * 4))[:, :cuts].T.copy()
    # One word serves both counts, the fraction left by the first being the second's. With 53 bits a row's law
    # is off by about cuts * counts[0] * counts[1] / 2**54: 2**-34 for 568 tokens, 2**-20 for 14,000.
    draws = np.empty((cuts, 2, rows), np.int64)
    for part, count in enumerate(counts):
        fraction *= np.arange(count - cuts, count)[:, None]
        draws[:, part] = fraction  # rounded down
        fraction -= draws[:, part]

    origin = np.add.outer((0, counts[0]), np.arange(rows) * lengths.raw)
    draws += origin
    taken = np.zeros(rows * lengths.raw, bool)
    last = origin + np.array(counts)[:, None] - 1 - cuts
    for place in draws:  # drawn from the places up to `last`, which no earlier step could choose
        np.copyto(place, last, where=taken[place])
        taken[place] = True
        last += 1
    draws -= origin

    ends = np.empty((2, rows, lengths.spans), np.int64)
    ends[..., :-1] = draws.transpose(1, 2, 0) + 1
    ends[0, :, -1], ends[1, :, -1] = counts
    ends.sort(axis=-1)
    return ends[0], ends[1]


def _gather(
    raw: Integer[np.ndarray, "R raw"],
    shift: Int64[np.ndarray, "R spans"],
    count: Int64[np.ndarray, "R spans"],
    width: int,
) -> Int32[np.ndarray, "R width"]:
    """Rows of `width` in which the next `count` places take the raw token that is `shift` further on."""
    count[:, -1] += 1  # the place of eos
    result = np.empty((len(raw), width), np.int32)
    place = np.add.outer(np.arange(BLOCK) * raw.shape[1], np.arange(width))
    for first in range(0, len(raw), BLOCK):
        block = slice(first, first + BLOCK)
        index = np.repeat(shift[block].ravel(), count[block].ravel()).reshape(-1, width)
        index += place[: len(index)]
        result[block] = raw[block].take(index, mode="clip")  # what clips is eos' place, filled in later
    return result


def _places(ids: Integer[np.ndarray, "T"], sentinels: tuple[int, ...], first: int) -> list[int]:
    """Where each sentinel stands, with a token or more between two of them."""
    places: list[int] = []
    for sentinel in sentinels:
        hits = np.flatnonzero(ids[first:] == sentinel)
        if not hits.size:
            raise ValueError(f"expected the sentinels {sentinels} in this order, got {ids}")
        places.append(first + int(hits[0]))
        first = places[-1] + 2
    return places


def _words(key: tuple[int, int]) -> np.ndarray:
    return np.array([part % 2**64 for part in key], np.uint64)
