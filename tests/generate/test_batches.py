"""Length buckets and batches of prompts."""

import numpy as np
import pytest

from flaxen.generate.batches import batches, padded_length


def test_buckets_pad_by_at_most_a_third() -> None:
    sizes = sorted({padded_length(n) for n in range(1, 5000)})
    assert sizes[:7] == [16, 24, 32, 48, 64, 96, 128]
    for n in range(16, 5000):
        assert n <= padded_length(n) <= 1.5 * n


@pytest.mark.parametrize("left", [False, True])
def test_each_prompt_is_in_one_batch_and_padding_is_invalid(left: bool) -> None:
    draw = np.random.default_rng(0)
    prompts = [draw.integers(2, 99, draw.integers(1, 70)).tolist() for _ in range(23)]
    seen = []
    for rows, (ids, valid) in batches(prompts, 4, 0, left):
        assert len(rows) <= 4
        for row, tokens, mask in zip(rows, ids, valid):
            assert row >= 0 or mask.sum() == left
            if row >= 0:
                assert tokens[mask].tolist() == prompts[row]
                assert (tokens[~mask] == 0).all()
                assert mask[-1 if left else 0]
                seen.append(int(row))
    assert sorted(seen) == list(range(23))
