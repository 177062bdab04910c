"""Batches by length contain every pair once per epoch; packed rows fit and lose nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxen.data.pair_store import OPEN_ROWS, WINDOW, Groups, PairLengths, fitting, open_pairs, pack, shapes
from flaxen.data.pairs import Pairs
from flaxen.data.tokenizers import ByteTokenizer
from flaxen.errors import InputError

LENGTHS = np.random.default_rng(0).integers(2, 200, (1000, 2))


def test_pairs_are_tokenized_split_and_truncated(tmp_path: Path) -> None:
    rows = [{"source": "s" * n, "target": "t" * (20 - n)} for n in range(1, 20)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = Pairs(train=(str(tmp_path / "a.jsonl"),), validation_percent=10.0, cache=tmp_path / "cache")
    train, validation = open_pairs(pairs, ByteTokenizer())
    assert (len(train), len(validation)) == (17, 2)
    assert validation.lengths.tolist() == [[2, 20], [3, 19]]
    source, target = train.pair(0, PairLengths(100, 100))
    assert (ByteTokenizer().decode(source.tolist()), ByteTokenizer().decode(target.tolist())) == ("sss", "t" * 17)
    source, target = train.pair(5, PairLengths(4, 3))
    assert source.tolist() == [ByteTokenizer().encode("s")[0]] * 3 + [1]
    assert target.tolist()[-1] == 1
    assert len(target) == 3


def test_an_epoch_of_batches_contains_every_pair() -> None:
    groups = Groups(LENGTHS, 5)
    epochs = [np.concatenate([groups.batch(step, 10) for step in range(first, first + 100)]) for first in (0, 100)]
    # Windows extend across the ends of epochs, so a pair of the second epoch may already occur in the first.
    together = np.bincount(np.concatenate(epochs), minlength=1000)
    assert together.min() >= 1
    assert together.max() <= 3
    assert np.bincount(np.concatenate([groups.batch(step, 10) for step in range(96)])).max() == 1
    assert not np.array_equal(*epochs)


def test_batches_depend_only_on_seed_and_step() -> None:
    first, second = Groups(LENGTHS, 5), Groups(LENGTHS, 5)
    for step in (40, 3, 199, 3):
        np.testing.assert_array_equal(first.batch(step, 16), second.batch(step, 16))
    assert not np.array_equal(first.batch(3, 16), Groups(LENGTHS, 6).batch(3, 16))


def test_batches_have_similar_lengths_in_random_order() -> None:
    groups = Groups(LENGTHS, 0)
    source = [LENGTHS[groups.batch(step, 8), 0] for step in range(WINDOW)]
    spread = np.mean([batch.max() - batch.min() for batch in source])
    assert spread < 20  # up to 198 in a random batch
    assert abs(np.corrcoef(np.arange(WINDOW), [batch.mean() for batch in source])[0, 1]) < 0.5


@given(st.lists(st.integers(1, 500), min_size=1, max_size=50), st.integers(1, 6))
def test_shapes_are_few_and_fit_all_lengths(lengths: list[int], count: int) -> None:
    buckets = shapes(np.array(lengths), count)
    assert 1 <= len(buckets) <= count
    assert all(shape % 16 == 0 for shape in buckets)
    assert buckets[-1] - 16 < max(lengths) <= buckets[-1]
    assert all(fitting(length, buckets) >= length for length in lengths)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=80))
def test_packing_loses_nothing_and_fits(lengths: list[tuple[int, int]]) -> None:
    limits = PairLengths(64, 24)
    rows = pack(np.array(lengths), limits)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    for row in rows:
        total = np.array(lengths)[row].sum(axis=0)
        assert (total <= limits).all()


def test_packing_fits_with_more_rows_than_it_keeps_open() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, (4 * OPEN_ROWS, 2))
    rows = pack(lengths, PairLengths(100, 100))
    assert len(rows) > 2 * OPEN_ROWS
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert max(lengths[row].sum(axis=0).max() for row in rows) <= 100


def test_packing_fills_rows() -> None:
    rows = pack(LENGTHS, PairLengths(512, 512))
    # A row is full when either source or target has no room left. With sources alone, packing fills 97 %.
    assert LENGTHS.sum(axis=0).max() / (512 * len(rows)) > 0.8
    sources_only = LENGTHS * [1, 0] + [0, 1]
    assert sources_only[:, 0].sum() / (512 * len(pack(sources_only, PairLengths(512, 512)))) > 0.97
    assert pack(np.zeros((0, 2), np.int64), PairLengths(4, 4)) == []
    with pytest.raises(InputError, match="longer than a row"):
        pack(LENGTHS, PairLengths(100, 512))
