"""Shuffle the examples of each epoch: the order is a function of (seed, epoch), so nothing is stored."""

import numpy as np
from jaxtyping import Int64

# Philox counter of the round keys. Span corruption may use the same key; its counters, one per row, never get this far,
# so the two draw independent random numbers.
FAR = 2**192


def permute(index: Int64[np.ndarray, "R"], n: int, key: tuple[int, int]) -> Int64[np.ndarray, "R"]:
    """Map each index through a pseudo-random permutation of 0 … n-1, in constant memory."""
    if not 1 <= n <= 2**40:
        raise ValueError(f"n must be between 1 and 2**40, got {n}")
    if len(index) and (index.min() < 0 or index.max() >= n):
        raise ValueError(f"expected indices from 0 to {n - 1}, got {index.min()} to {index.max()}")
    words = np.array([part % 2**64 for part in key], np.uint64)
    bits = max(2, (n - 1).bit_length())
    # Halves with few bits mix slowly: with 7 examples, 8 rounds make some orders too frequent, 16 rounds do not.
    round_keys = np.random.Philox(key=words, counter=FAR).random_raw(8 if bits > 8 else 16)

    result = _feistel(index.astype(np.uint64), bits, round_keys)
    # Cycle walking: the Feistel network permutes 0 … 2**bits-1, which may exceed n. A result beyond n is permuted
    # again until it falls below n. Its cycle started below n, so it returns there, and no two indices collide.
    # Fewer than half of the values lie beyond n (for n > 2), so few iterations are needed.
    outside = np.flatnonzero(result >= n)
    while outside.size:
        result[outside] = _feistel(result[outside], bits, round_keys)
        outside = outside[result[outside] >= n]
    return result.astype(np.int64)


def examples(step: int, rows: tuple[int, int], batch: int, n: int, seed: int) -> Int64[np.ndarray, "R"]:
    """Return the example numbers of `rows` = (first, count) of a batch; each epoch contains each of n examples once."""
    first, count = rows
    if n < 1:
        raise ValueError(f"expected at least one example, got n={n}")
    if not 0 <= first <= first + count <= batch:
        raise ValueError(f"expected rows within a batch of {batch} rows, got {count} rows starting at row {first}")
    start = step * batch + first
    stop = start + count
    # Batches do not stop at the end of an epoch: one batch may hold the end of an epoch and the start of the next.
    parts = [np.empty(0, np.int64)]
    for epoch in range(start // n, -(-stop // n)):
        positions = np.arange(max(start - epoch * n, 0), min(stop - epoch * n, n))
        parts.append(permute(positions, n, (seed, epoch)))
    return np.concatenate(parts)


def _feistel(x: np.ndarray, bits: int, round_keys: np.ndarray) -> np.ndarray:
    """Permute 0 … 2**bits-1 with a Feistel network: each round xors one half of the bits with a hash of the other."""
    low_bits, shift = bits // 2, np.uint64(32)
    masks = [np.uint64(2**low_bits - 1), np.uint64(2 ** (bits - low_bits) - 1)]
    halves = [x & masks[0], x >> np.uint64(low_bits)]
    for number, round_key in enumerate(round_keys):
        side = number % 2
        # In a product, low bits never depend on higher ones, so shifts bring the well-mixed high bits down.
        mixed = (halves[1 - side] ^ round_key) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> shift
        mixed *= np.uint64(0xD6E8FEB86659FD93)
        mixed ^= mixed >> shift
        mixed &= masks[side]
        halves[side] ^= mixed
    return halves[1] << np.uint64(low_bits) | halves[0]
