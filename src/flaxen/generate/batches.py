"""Batching of prompts: lengths are padded to a few bucket sizes, so that a new length rarely causes recompilation."""

from collections.abc import Iterator, Sequence

import numpy as np


def padded_length(n: int, smallest: int = 16) -> int:
    """Round n up to a bucket size, smallest · {1, 1.5, 2, 3, 4, 6, …}, of which at most a third is padding."""
    size = smallest
    while size < n:
        # Alternate between 2^k and 1.5 · 2^k: ×1.5 from a power of two, ×4/3 to the next one.
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def batches(
    prompts: Sequence[Sequence[int]], batch_size: int, pad: int, left: bool = False
) -> Iterator[tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]]:
    """Yield (rows, (ids, valid)) for each batch of prompts of similar length, padded on the right or the left.

    `rows` holds the index of each row's prompt, or -1 for a filler row, which only completes the batch.
    """
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
            valid[rows < 0, -1] = True  # decoding starts at the last token, so even a filler row needs one
        yield rows, (ids, valid)


def groups(order: Sequence[int], batch_size: int) -> Iterator[np.ndarray]:
    """Split `order` into batches; filler rows (-1) extend the last batch to a power of two, to limit recompilation."""
    for first in range(0, len(order), batch_size):
        group = order[first : first + batch_size]
        rows = np.full(min(batch_size, 1 << (len(group) - 1).bit_length()), -1, np.int32)
        rows[: len(group)] = group
        yield rows
