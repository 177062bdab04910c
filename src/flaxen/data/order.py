"""Which example comes when: a shuffle of each epoch that is computed, not stored."""

import numpy as np
from jaxtyping import Int64

# Round keys come from a part of Philox's counter that no row of span corruption, whose key may be the same, reaches.
FAR = 2**192


def permute(index: Int64[np.ndarray, "R"], n: int, key: tuple[int, int]) -> Int64[np.ndarray, "R"]:
    """Where a pseudo-random permutation of 0 … n-1 sends each index."""
    if not 1 <= n <= 2**40:
        raise ValueError(f"expected n from 1 to 2**40, got {n}")
    if len(index) and (index.min() < 0 or index.max() >= n):
        raise ValueError(f"expected indices from 0 to {n - 1}, got {index.min()} to {index.max()}")
    words = np.array([part % 2**64 for part in key], np.uint64)
    bits = max(2, (n - 1).bit_length())
    # Halves of a few bits mix slowly: of 7 examples, some orders would come too often after 8 rounds, none after 16.
    round_keys = np.random.Philox(key=words, counter=FAR).random_raw(8 if bits > 8 else 16)

    result = _feistel(index.astype(np.uint64), bits, round_keys)
    # The network permutes 0 … 2**bits-1. Whoever lands beyond n goes on along its cycle, which began below n
    # and so comes back there; no two meet. Less than half of the places are beyond (n > 2).
    beyond = np.flatnonzero(result >= n)
    while beyond.size:
        result[beyond] = _feistel(result[beyond], bits, round_keys)
        beyond = beyond[result[beyond] >= n]
    return result.astype(np.int64)


def examples(step: int, rows: tuple[int, int], batch: int, n: int, seed: int) -> Int64[np.ndarray, "R"]:
    """The example numbers of (first, count) rows of a batch; each epoch has each of the n examples once."""
    first, count = rows
    if n < 1:
        raise ValueError(f"expected one example or more, got n={n}")
    if not 0 <= first <= first + count <= batch:
        raise ValueError(f"expected rows within a batch of {batch}, got {count} from row {first}")
    start = step * batch + first
    stop = start + count
    # Batches run on from epoch to epoch, so one may hold the end of one and the beginning of the next.
    parts = [np.empty(0, np.int64)]
    for epoch in range(start // n, -(-stop // n)):
        positions = np.arange(max(start - epoch * n, 0), min(stop - epoch * n, n))
        parts.append(permute(positions, n, (seed, epoch)))
    return np.concatenate(parts)


def _feistel(x: np.ndarray, bits: int, round_keys: np.ndarray) -> np.ndarray:
    """A permutation of 0 … 2**bits-1: each round xors one half with a hash of the other."""
    low_bits, shift = bits // 2, np.uint64(32)
    masks = [np.uint64(2**low_bits - 1), np.uint64(2 ** (bits - low_bits) - 1)]
    halves = [x & masks[0], x >> np.uint64(low_bits)]
    for number, round_key in enumerate(round_keys):
        side = number % 2
        # A product carries upwards only, so shifts bring its high bits down.
        mixed = (halves[1 - side] ^ round_key) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> shift
        mixed *= np.uint64(0xD6E8FEB86659FD93)
        mixed ^= mixed >> shift
        mixed &= masks[side]
        halves[side] ^= mixed
    return halves[1] << np.uint64(low_bits) | halves[0]
