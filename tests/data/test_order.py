"""Each epoch is a permutation, and the permutations of different epochs are independent."""

import tracemalloc
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from flaxen.data.order import examples, permute

# Seeds are fixed, so these tests always pass or always fail; a correct implementation fails with this probability.
UNLIKELY = 1e-6


def assert_uniform(observed: np.ndarray) -> None:
    expected = observed.sum() / len(observed)
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert chi2.ppf(UNLIKELY, len(observed) - 1) < statistic < chi2.isf(UNLIKELY, len(observed) - 1)


def test_permutes_every_small_range() -> None:
    for n in [*range(1, 400), *range(400, 2001, 13)]:
        np.testing.assert_array_equal(np.sort(permute(np.arange(n), n, (n, 3))), np.arange(n))


@pytest.mark.parametrize("n", [2**16 - 1, 2**16, 2**16 + 1, 2**17 + 1, 1_000_003])
def test_permutes_larger_ranges(n: int) -> None:
    image = permute(np.arange(n), n, (2**63, 2**63))
    assert (np.bincount(image, minlength=n) == 1).all()


@settings(deadline=None)
@given(st.integers(1, 2**40), st.integers(0, 2**63), st.integers(0, 2**63), st.data())
def test_permutation_of_huge_ranges_is_injective_and_elementwise(
    n: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), unique=True)), np.int64)
    image = permute(index, n, (seed, epoch))
    assert len(np.unique(image)) == len(index)
    assert ((image >= 0) & (image < n)).all()
    # Elementwise: an index is mapped to the same place whatever the other indices are.
    np.testing.assert_array_equal(permute(index[::-1], n, (seed, epoch)), image[::-1])


def test_memory_does_not_grow_with_the_range() -> None:
    peaks = []
    for n in (1000, 2**40):
        tracemalloc.start()
        permute(np.arange(256), n, (0, 0))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 100_000


@pytest.mark.parametrize("n", [4, 5])
def test_all_permutations_are_equally_likely(n: int) -> None:
    number = {order: i for i, order in enumerate(permutations(range(n)))}
    drawn = [number[tuple(permute(np.arange(n), n, (1, epoch)).tolist())] for epoch in range(2000)]
    assert_uniform(np.bincount(drawn, minlength=len(number)))


def test_all_pairs_of_positions_are_equally_likely() -> None:
    n = 8
    images = np.stack([permute(np.array([0, 1, n - 1]), n, (7, epoch)) for epoch in range(4000)])
    for other in (1, 2):
        pairs = np.bincount(images[:, 0] * n + images[:, other], minlength=n * n).reshape(n, n)
        assert_uniform(pairs[~np.eye(n, dtype=bool)])


@pytest.mark.parametrize("n", [1000, 1024, 1025, 50_000])
def test_one_permutation_looks_random(n: int) -> None:
    image = permute(np.arange(n), n, (2, 0))
    displacement = (image - np.arange(n)) % n
    stride = np.diff(image) % n
    for values in (displacement, stride):
        assert_uniform(np.bincount(values * 20 // n, minlength=20))
    assert abs(np.corrcoef(image, np.arange(n))[0, 1]) < 5 / np.sqrt(n)


@pytest.mark.parametrize("n", [1000, 1025])
def test_epochs_and_seeds_are_independent(n: int) -> None:
    images = [permute(np.arange(n), n, (seed, epoch)) for seed in range(6) for epoch in range(6)]
    for i, one in enumerate(images):
        for two in images[:i]:
            assert abs(np.corrcoef(one, two)[0, 1]) < 6 / np.sqrt(n)
            assert (one == two).sum() < 12  # Poisson distributed with mean 1
            # Nor is one epoch a shifted copy of another.
            assert np.bincount((one - two) % n).max() < 14


def test_every_position_is_equally_likely() -> None:
    images = np.stack([permute(np.arange(37), 37, (4, epoch)) for epoch in range(800)])
    for index in (0, 1, 18, 36):
        assert_uniform(np.bincount(images[:, index], minlength=37))
    assert_uniform(np.bincount((images[:, 1] - images[:, 0]) % 37, minlength=37)[1:])
    assert_uniform(np.bincount((images[1:, 5] - images[:-1, 5]) % 37, minlength=37))


@pytest.mark.parametrize(("batch", "n"), [(7, 40), (8, 40), (40, 40), (41, 40), (100, 7), (3, 1), (1, 13)])
def test_each_epoch_contains_each_example_once(batch: int, n: int) -> None:
    steps = -(-5 * n // batch)
    stream = np.concatenate([examples(step, (0, batch), batch, n, 5) for step in range(steps)])
    epochs = stream[: 5 * n].reshape(5, n)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(n), (5, 1)))
    assert n < 7 or len(np.unique(epochs, axis=0)) == 5


@given(st.integers(0, 2**40), st.integers(1, 300), st.integers(1, 2**40), st.integers(0, 2**63), st.data())
@settings(deadline=None, max_examples=50)
def test_rows_of_a_batch_equal_a_slice_of_it(step: int, batch: int, n: int, seed: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, batch))
    count = data.draw(st.integers(0, batch - first))
    full_batch = examples(step, (0, batch), batch, n, seed)
    assert len(full_batch) == batch
    np.testing.assert_array_equal(examples(step, (first, count), batch, n, seed), full_batch[first : first + count])


@pytest.mark.parametrize("n", [0, -1, 2**40 + 1])
def test_invalid_ranges_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match=r"n must be between 1 and 2\*\*40"):
        permute(np.arange(1), n, (0, 0))


def test_indices_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="indices from 0 to 9, got 0 to 10"):
        permute(np.arange(11), 10, (0, 0))
    with pytest.raises(ValueError, match="indices from 0 to 9, got -1 to 3"):
        permute(np.arange(-1, 4), 10, (0, 0))
    with pytest.raises(ValueError, match="within a batch of 8 rows, got 5 rows starting at row 4"):
        examples(0, (4, 5), 8, 100, 0)
    with pytest.raises(ValueError, match="at least one example, got n=0"):
        examples(0, (0, 8), 8, 0, 0)
