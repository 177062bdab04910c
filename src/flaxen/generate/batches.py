"""Prompts of many lengths in a few shapes, so that a new length does not compile anew."""

from collections.abc import Iterator, Sequence

import numpy as np


def padded_length(n: int, smallest: int = 16) -> int:
    """The least of smallest · {1, 1.5, 2, 3, 4, 6, …} that holds n: at most a third of it is padding."""
    size = smallest
    while size < n:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def batches(
    prompts: Sequence[Sequence[int]], batch_size: int, pad: int, left: bool = False
) -> Iterator[tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]]:
    """(rows, (ids, valid)) per batch: neighbours in length together, padded behind them or at their left. A row of -1
    is padding of the batch."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for rows in groups(order, batch_size):
        length = padded_length(max(len(prompts[i]) for i in rows if i >= 0))
        ids = np.full((len(rows), length), pad, np.int32)
        valid = np.zeros(ids.shape, bool)
        for row, prompt in enumerate(rows):
            if prompt >= 0:
                n = len(prompts[prompt])
                place = slice(length - n, None) if left else slice(n)
                ids[row, place], valid[row, place] = prompts[prompt], True
        if left:
            valid[rows < 0, -1] = True  # a row of nothing but padding would have no last token
        yield rows, (ids, valid)


def groups(order: Sequence[int], batch_size: int) -> Iterator[np.ndarray]:
    """The numbers in `order`, some at a time; the last group is filled up to a power of two with -1."""
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        rows = np.full(min(batch_size, 1 << (len(chosen) - 1).bit_length()), -1, np.int32)
        rows[: len(chosen)] = chosen
        yield rows
