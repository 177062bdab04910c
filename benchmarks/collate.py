"""Measure span corruption in examples per CPU second: Flaxen against FlaxDataCollatorForT5MLM of transformers."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from flaxen.data.span_corruption import SpanLengths, corrupt, lengths

ROWS, INPUT_LENGTH, DENSITY, MEAN_SPAN = 256, 512, 0.15, 3.0
VOCABULARY, EOS = 32_100, 1
SENTINELS = tuple(range(VOCABULARY - 1, VOCABULARY - 101, -1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="number of interleaved rounds; the median counts")
    flags = parser.parse_args()

    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    size = lengths(INPUT_LENGTH, DENSITY, MEAN_SPAN)
    store = np.random.default_rng(0).integers(2, 32_000, (8 * ROWS, size.raw)).astype(np.int32)
    order = np.random.default_rng(1).permutation(len(store)).reshape(-1, ROWS)

    def flaxen(step: int) -> tuple[np.ndarray, np.ndarray]:
        return corrupt(store[order[step % len(order)]], size, SENTINELS, EOS, (0, step))

    def per_example(step: int) -> tuple[np.ndarray, np.ndarray]:
        # Passing rows as arrays favours the collator of transformers, which used to get lists of Python integers.
        return collate([store[number] for number in order[step % len(order)]], size)

    for system in (flaxen, per_example):
        assert [part.shape for part in system(0)] == [(ROWS, size.inputs), (ROWS, size.targets)]
    np.random.seed(0)
    speeds: dict[str, list[float]] = {"flaxen": [], "per example": []}
    for _ in range(flags.rounds):
        speeds["flaxen"].append(speed(flaxen, steps=40))
        speeds["per example"].append(speed(per_example, steps=2))

    print(f"{ROWS} x {size.raw} tokens, core {core}, median (min - max) of {flags.rounds} interleaved rounds")
    for name, values in speeds.items():
        print(f"{name:12} {median(values):9,.0f} examples/CPU s ({min(values):,.0f} - {max(values):,.0f})")
    ratios = [ours / theirs for ours, theirs in zip(*speeds.values())]
    print(f"{'ratio':12} {median(ratios):9.1f} ({min(ratios):.1f} - {max(ratios):.1f})")


def speed(system: Callable[[int], object], steps: int) -> float:
    """Examples per CPU second."""
    start = time.process_time()
    for step in range(steps):
        system(step)
    return steps * ROWS / (time.process_time() - start)


def collate(rows: list[np.ndarray], size: SpanLengths) -> tuple[np.ndarray, np.ndarray]:
    """Reimplement the collator of transformers: one mask per row in a loop, then sentinels for the whole batch."""
    ids = np.array(rows)
    noise = np.asarray([noise_mask(size.raw) for _ in rows])
    inputs = without_runs(ids, run_marks(noise.astype(np.int8)))
    targets = without_runs(ids, run_marks((~noise).astype(np.int8)))
    return inputs, targets


def noise_mask(length: int) -> np.ndarray:
    """Return a mask [length] that is True for the noise tokens of one row."""
    n_noise = min(max(int(np.round(length * DENSITY)), 1), length - 1)
    n_spans = max(int(np.round(n_noise / MEAN_SPAN)), 1)
    noise, kept = random_parts(n_noise, n_spans), random_parts(length - n_noise, n_spans)
    alternating = np.reshape(np.stack([kept, noise], axis=1), [2 * n_spans])
    begins = np.zeros((length,), dtype=np.int8)
    begins[np.cumsum(alternating)[:-1]] = True
    return np.equal(np.cumsum(begins) % 2, 1)


def random_parts(total: int, parts: int) -> np.ndarray:
    """Split `total` into `parts` random sizes by shuffling the positions where a part starts."""
    begins = np.arange(total - 1) < parts - 1
    np.random.shuffle(begins)
    part = np.cumsum(np.pad(begins, [[1, 0]]))
    return np.unique(part, return_counts=True)[1]


def run_marks(mask: np.ndarray) -> np.ndarray:
    """Return the sentinel id at the start of each masked span, -1 in the rest of it, and 0 elsewhere."""
    begins = mask - np.roll(mask, 1, axis=-1) * mask
    begins[:, 0] = mask[:, 0]
    numbers = np.where(begins != 0, np.cumsum(begins, axis=-1), begins)
    sentinels = np.where(numbers != 0, VOCABULARY - numbers, 0)
    sentinels -= mask - begins
    return sentinels


def without_runs(ids: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """Replace the start of each masked span by its sentinel, drop positions marked -1, and append eos."""
    marked = np.where(marks != 0, marks, ids)
    rows = marked[marked >= 0].reshape((len(ids), -1))
    return np.concatenate([rows, np.full((len(ids), 1), EOS, dtype=np.int32)], axis=-1)


if __name__ == "__main__":
    main()
