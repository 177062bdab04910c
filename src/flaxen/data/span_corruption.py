"""T5 span corruption: replace random noise spans with sentinels, for a whole batch at once, and the inverse.

A span corruption mask is never materialised; it is held as the cumulative lengths of kept and noise spans.
"""

import math
from bisect import bisect_right
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64, Integer

from flaxen.errors import InputError

# Rows gathered at a time, so that their indices fit in the CPU cache. For 256 rows, malloc would also return the
# index arrays to the system each time, and mapping fresh pages costs more than the gather itself.
BLOCK = 32


class SpanLengths(NamedTuple):
    """Token counts of one corrupted row; `inputs` and `targets` count their sentinels and eos."""

    raw: int
    noise: int
    spans: int
    inputs: int
    targets: int


def lengths(input_length: int, noise_density: float, mean_span: float) -> SpanLengths:
    """Return the lengths for the longest raw row whose corrupted inputs fit in `input_length`."""
    if input_length < 4:
        raise InputError(f"input_length must be at least 4, got {input_length}; T5 used 512")
    if not 0 < noise_density < 1:
        raise InputError(f"noise_density must be above 0 and below 1, got {noise_density}; T5 used 0.15")
    if not 1 <= mean_span < math.inf:
        raise InputError(f"mean_span must be at least 1 token, got {mean_span}; T5 used 3, ByT5 20")

    def lengths_for(raw: int) -> SpanLengths:
        noise = min(max(round(raw * noise_density), 1), raw - 1)
        spans = min(max(round(noise / mean_span), 1), noise, raw - noise)
        return SpanLengths(raw, noise, spans, raw - noise + spans + 1, noise + spans + 1)

    # An additional raw token adds either one kept token, or one noise token and at most one sentinel, so the inputs
    # never get shorter and bisection applies.
    too_long = math.ceil((input_length + 1) / (1 - noise_density)) + 1
    longest = lengths_for(
        bisect_right(range(too_long), input_length, lo=2, key=lambda raw: lengths_for(raw).inputs) - 1
    )
    # As in the t5 repository: at density 0.5, rounding may give more noise than text. Then the row is shortened by one
    # token, so that targets are not longer than inputs.
    return lengths_for(longest.raw - 1) if noise_density == 0.5 and longest.targets > longest.inputs else longest


def corrupt(
    raw: Integer[np.ndarray, "R raw"],
    lengths: SpanLengths,
    sentinels: tuple[int, ...],
    eos_id: int,
    key: tuple[int, int],
    first_row: int = 0,
) -> tuple[Int32[np.ndarray, "R inputs"], Int32[np.ndarray, "R targets"]]:
    """Corrupt rows. The inputs have a sentinel in place of each noise span; the targets are the spans, each after its
    sentinel.

    Both end in eos. The noise depends only on `lengths`, `key` and the row number, counted from `first_row`.
    """
    if raw.ndim != 2 or raw.shape[1] != lengths.raw:
        raise ValueError(f"expected raw rows of {lengths.raw} tokens, got an array of shape {raw.shape}")
    if lengths.spans > len(sentinels):
        raise InputError(
            f"the inputs have {lengths.spans} masked spans, but the tokenizer has only {len(sentinels)} sentinels; "
            "reduce input_length or increase mean_span"
        )
    kept, noise = draw_ends(lengths, len(raw), key, first_row)
    kept_length, noise_length = np.diff(kept, prepend=0), np.diff(noise, prepend=0)
    span = np.arange(lengths.spans)
    # Both results are runs of raw tokens with a slot for a sentinel: after each kept run in the inputs, before each
    # noise run in the targets. `before` counts the noise tokens before each span.
    before = noise - noise_length
    inputs = _gather(raw, before - span, kept_length + 1, lengths.inputs)
    targets = _gather(raw, kept - span - 1, noise_length + 1, lengths.targets)
    for result, slot in ((inputs, kept + span), (targets, before + span)):
        slot += np.arange(len(raw))[:, None] * result.shape[1]
        result.reshape(-1)[slot] = sentinels[: lengths.spans]  # twice as fast as put_along_axis
        result[:, -1] = eos_id
    return inputs, targets


def restore(
    inputs: Integer[np.ndarray, "inputs"],
    targets: Integer[np.ndarray, "targets"],
    sentinels: tuple[int, ...],
    eos_id: int,
) -> Integer[np.ndarray, "raw"]:
    """Recover the raw row from a row of inputs and targets: the inverse of `corrupt`."""
    # Sentinels are found in order, so the text itself may contain eos, pad and sentinels beyond the last one used.
    # Only ByT5 is ambiguous: from the twelfth on, its sentinels are also bytes of text.
    if len(inputs) < 3 or inputs[-1] != eos_id or targets[-1:] != eos_id or inputs[-2] not in sentinels:
        raise ValueError(
            f"expected inputs that end in a sentinel and eos, and targets that end in eos, got {inputs}, {targets}"
        )
    used = sentinels[: sentinels.index(inputs[-2]) + 1]
    kept = np.split(inputs[:-1], _find_sentinels(inputs, used, first=1))
    noise = np.split(targets[:-1], _find_sentinels(targets, used, first=0))[1:]
    # All kept parts but the first begin with a sentinel, which is dropped; the last one holds only its sentinel.
    parts = [kept[0], *(part[1:] for pair in zip(noise, kept[1:]) for part in pair)]
    return np.concatenate(parts)


def draw_ends(
    lengths: SpanLengths, rows: int, key: tuple[int, int], first_row: int = 0
) -> tuple[Int64[np.ndarray, "R spans"], Int64[np.ndarray, "R spans"]]:
    """Draw a span corruption mask per row: cumulative lengths of kept text and of noise at the end of each span."""
    # T5's distribution: the kept tokens and the noise tokens are each divided into `spans` positive parts, with all
    # divisions equally likely. That means choosing spans-1 of count-1 cut points without replacement, for which
    # Floyd's algorithm needs spans-1 draws; here it runs on all rows at once.
    counts = (lengths.raw - lengths.noise, lengths.noise)
    cuts = lengths.spans - 1

    # Philox yields four words per counter value. Each row uses a whole number of counter values, so that any row can be
    # drawn without the rows before it.
    blocks = -(-cuts // 4)
    philox = np.random.Philox(key=_words(key), counter=first_row * blocks)
    fraction = np.random.Generator(philox).random((rows, blocks * 4))[:, :cuts].T.copy()
    # One random word serves both draws: the fractional part left by the first is used for the second. With 53 bits, a
    # row's distribution is off by about cuts * counts[0] * counts[1] / 2**54: 2**-34 for 568 tokens, 2**-20 for 14,000.
    draws = np.empty((cuts, 2, rows), np.int64)
    for part, count in enumerate(counts):
        fraction *= np.arange(count - cuts, count)[:, None]
        draws[:, part] = fraction  # rounded down
        fraction -= draws[:, part]

    # Cut points of all rows in one flat array of flags: for each row, first the kept part, then the noise part.
    origin = np.add.outer((0, counts[0]), np.arange(rows) * lengths.raw)
    draws += origin
    taken = np.zeros(rows * lengths.raw, bool)
    last = origin + np.array(counts)[:, None] - 1 - cuts
    for cut in draws:  # Floyd: a cut that is already taken is replaced by `last`, which no earlier step could draw
        np.copyto(cut, last, where=taken[cut])
        taken[cut] = True
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
    """Build rows of `width` tokens, run by run.

    Each of the next `count` positions gets the raw token that is `shift` positions further on.
    """
    count[:, -1] += 1  # the position of eos
    result = np.empty((len(raw), width), np.int32)
    position = np.add.outer(np.arange(BLOCK) * raw.shape[1], np.arange(width))
    for first in range(0, len(raw), BLOCK):
        block = slice(first, first + BLOCK)
        index = np.repeat(shift[block].ravel(), count[block].ravel()).reshape(-1, width)
        index += position[: len(index)]
        result[block] = raw[block].take(
            index, mode="clip"
        )  # only the position of eos can be out of range; it is overwritten later
    return result


def _find_sentinels(ids: Integer[np.ndarray, "T"], sentinels: tuple[int, ...], first: int) -> list[int]:
    """Return the position of each sentinel, in order; there is at least one token between two of them."""
    positions: list[int] = []
    for sentinel in sentinels:
        hits = np.flatnonzero(ids[first:] == sentinel)
        if not hits.size:
            raise ValueError(f"expected the sentinels {sentinels} in this order, got {ids}")
        positions.append(first + int(hits[0]))
        first = positions[-1] + 2
    return positions


def _words(key: tuple[int, int]) -> np.ndarray:
    """Convert a key to the two 64-bit words that Philox takes."""
    return np.array([part % 2**64 for part in key], np.uint64)
