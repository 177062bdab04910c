"""Prompts of many lengths in a few shapes, so that a new length does not compile anew."""

from collections.abc import Iterator, Sequence

import numpy as np


def bucket(n: int, smallest: int = 16) -> int:
    """The least of smallest · {1, 1.5, 2, 3, 4, 6, …} that holds n: at most a third of it is padding."""
    size = smallest
    while size < n:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def batches(
    prompts: Sequence[Sequence[int]], batch_size: int, pad: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(rows, ids, valid) per batch: neighbours in length together. A row of -1 is padding of the batch."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        size = min(batch_size, 1 << (len(chosen) - 1).bit_length())
        rows = np.full(size, -1, np.int32)
        rows[: len(chosen)] = chosen
        ids = np.full((size, bucket(len(prompts[chosen[-1]]))), pad, np.int32)
        valid = np.zeros(ids.shape, bool)
        for row, prompt in enumerate(chosen):
            ids[row, : len(prompts[prompt])] = prompts[prompt]
            valid[row, : len(prompts[prompt])] = True
        yield rows, ids, valid
