"""Span corruption loses no text, and its noise spans follow T5's distribution."""

import io
from itertools import combinations
from math import comb
from pydoc_data.topics import topics

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from flaxen.data.span_corruption import SpanLengths, corrupt, draw_ends, lengths, restore
from flaxen.data.tokenizers import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from flaxen.errors import InputError

SENTINELS = tuple(range(32_099, 31_999, -1))
EOS = 1
T5 = lengths(512, 0.15, 3.0)
# 15 x 10 ways to divide 7 kept and 6 noise tokens: few enough to count each one.
SMALL = SpanLengths(raw=13, noise=6, spans=3, inputs=11, targets=10)
# Seeds are fixed, so these tests always pass or always fail; a correct implementation fails with this probability.
UNLIKELY = 1e-6


def rows_of(count: int, length: int) -> np.ndarray:
    """Return rows in which all tokens differ."""
    return np.arange(count * length, dtype=np.int32).reshape(count, length) + 40_000


def assert_chi_square(statistic: float, freedom: int) -> None:
    # Both tails: counts that fit too well are not random either.
    assert chi2.ppf(UNLIKELY, freedom) < statistic < chi2.isf(UNLIKELY, freedom)


def assert_counts(observed: np.ndarray, probability: np.ndarray) -> None:
    """Chi-square test, with rare outcomes pooled."""
    assert observed[probability == 0].sum() == 0
    expected = observed.sum() * probability
    rare = expected < 20
    observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (observed, expected))
    observed, expected = observed[expected > 5], expected[expected > 5]
    assert_chi_square(((observed - expected) ** 2 / expected).sum(), len(expected) - 1)


def part_distribution(count: int, parts: int) -> np.ndarray:
    """Return P(a part has k tokens), k = 0 … count, if all divisions are equally likely."""
    ways = [comb(count - 1 - k, parts - 2) if 0 < k < count else 0 for k in range(count + 1)]
    return np.array(ways) / comb(count - 1, parts - 1)


# --- Lengths


@pytest.mark.parametrize(
    ("arguments", "raw", "targets"),
    [((512, 0.15, 3.0), 568, 114), ((1024, 0.15, 3.0), 1137, 229), ((512, 0.5, 3.0), 766, 512)],
)
def test_lengths_are_those_of_t5(arguments: tuple[int, float, float], raw: int, targets: int) -> None:
    result = lengths(*arguments)
    assert (result.raw, result.inputs, result.targets) == (raw, arguments[0], targets)


def slow_lengths(input_length: int, noise_density: float, mean_span: float) -> SpanLengths:
    """Try all raw lengths, from the shortest to the first that does not fit."""
    best = None
    for raw in range(2, 40 * input_length):
        noise = int(np.clip(np.round(raw * noise_density), 1, raw - 1))
        spans = int(np.clip(np.round(noise / mean_span), 1, min(noise, raw - noise)))
        row = SpanLengths(raw, noise, spans, raw - noise + spans + 1, noise + spans + 1)
        if row.inputs > input_length:
            break
        if noise_density != 0.5 or row.targets <= row.inputs:
            best = row
    assert best is not None
    return best


densities = st.one_of(st.sampled_from([0.15, 0.5, 0.25]), st.floats(0.01, 0.9))
mean_spans = st.one_of(st.sampled_from([1.0, 3.0, 20.0]), st.floats(1, 64))


@settings(deadline=None)
@given(st.integers(4, 600), densities, mean_spans)
def test_lengths_are_the_largest_that_fit(input_length: int, noise_density: float, mean_span: float) -> None:
    result = lengths(input_length, noise_density, mean_span)
    assert result == slow_lengths(input_length, noise_density, mean_span)
    assert result.inputs <= input_length
    assert 1 <= result.spans <= min(result.noise, result.raw - result.noise)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 0.15, 3.0), "input_length must be at least 4, got 3"),
        ((-1, 0.15, 3.0), "input_length must be at least 4, got -1"),
        ((512, 0.0, 3.0), "noise_density must be above 0 and below 1, got 0.0"),
        ((512, 1.0, 3.0), "noise_density must be above 0 and below 1, got 1.0"),
        ((512, float("nan"), 3.0), "noise_density must be above 0 and below 1, got nan"),
        ((512, 0.15, 0.5), "mean_span must be at least 1 token, got 0.5"),
        ((512, 0.15, float("inf")), "mean_span must be at least 1 token, got inf"),
        ((512, 0.15, float("nan")), "mean_span must be at least 1 token, got nan"),
    ],
)
def test_settings_out_of_range_are_refused(arguments: tuple[int, float, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        lengths(*arguments)


# --- Nothing is lost


@settings(deadline=None)
@given(st.integers(4, 400), densities, mean_spans, st.integers(0, 40), st.integers(0, 2**63), st.data())
def test_restore_inverts_corrupt(
    input_length: int, noise_density: float, mean_span: float, rows: int, seed: int, data: st.DataObject
) -> None:
    size = lengths(input_length, noise_density, mean_span)
    sentinels = tuple(range(100_000, 100_000 - size.spans, -1))
    dtype = data.draw(st.sampled_from([np.uint16, np.int32, np.int64]))
    # Few distinct ids, including eos and pad: the inverse may not rely on the contents of the text.
    raw = np.random.default_rng(seed).integers(0, 5, (rows, size.raw)).astype(dtype)
    inputs, targets = corrupt(raw, size, sentinels, EOS, (seed, 7))
    assert inputs.dtype == targets.dtype == np.int32
    assert inputs.shape == (rows, size.inputs)
    assert targets.shape == (rows, size.targets)
    for row in range(rows):
        np.testing.assert_array_equal(restore(inputs[row], targets[row], sentinels, EOS), raw[row])


@pytest.fixture(scope="module")
def spiece() -> SentencePieceTokenizer:
    """A small model that preserves every character, so that texts can be compared."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in list(topics.values())[:30] for line in text.splitlines()),
        model_writer=model, vocab_size=500, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    return SentencePieceTokenizer({"spiece.model": model.getvalue()})


LITERALS = ("<pad>", "</s>", "<extra_id_0>", "<extra_id_1>", "<unk>")


def assert_text_survives(tokenizer: Tokenizer, texts: list[str], mean_span: float, seed: int) -> None:
    """Concatenate documents, cut them into rows, corrupt, restore and decode them."""
    stream = [id for ids in tokenizer.encode_batch(texts, specials=False) for id in ids]
    size = lengths(64, 0.15, mean_span)
    padded = stream + [tokenizer.pad_id] * (-len(stream) % size.raw)
    raw = np.array(padded, np.int32).reshape(-1, size.raw)
    inputs, targets = corrupt(raw, size, tokenizer.sentinels, tokenizer.eos_id, (seed, 0))
    rows = [restore(*pair, tokenizer.sentinels, tokenizer.eos_id) for pair in zip(inputs, targets)]
    restored = np.concatenate(rows)[: len(stream)]
    assert restored.tolist() == stream
    ends = np.flatnonzero(restored == tokenizer.eos_id) + 1
    assert [tokenizer.decode(ids.tolist()) for ids in np.split(restored, ends)[:-1]] == texts


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.one_of(st.text(), st.sampled_from(LITERALS))).map("".join), min_size=1), st.integers(0, 99))
def test_byte_tokenized_text_survives(texts: list[str], seed: int) -> None:
    assert_text_survives(ByteTokenizer(), texts, 20.0, seed)


@settings(deadline=None, max_examples=50)
@given(st.data(), st.integers(0, 99))
def test_sentencepiece_tokenized_text_survives(spiece: SentencePieceTokenizer, data: st.DataObject, seed: int) -> None:
    words = st.sampled_from([*LITERALS, *topics["assert"].split(), "été", "你好", "😀", "x<pad>y"])
    texts = data.draw(st.lists(st.lists(words, min_size=1).map(" ".join), min_size=1))
    assert_text_survives(spiece, texts, 3.0, seed)


def test_restore_refuses_rows_that_corrupt_did_not_make() -> None:
    inputs, targets = (rows[0] for rows in corrupt(rows_of(1, 568), T5, SENTINELS, EOS, (0, 0)))
    with pytest.raises(ValueError, match="end in a sentinel and eos"):
        restore(inputs[:-1], targets, SENTINELS, EOS)
    with pytest.raises(ValueError, match="in this order"):
        restore(inputs, targets[::-1][np.r_[1 : len(targets), 0]], SENTINELS, EOS)


# --- The same as T5, row by row


def slow_corrupt(row: np.ndarray, kept: np.ndarray, noise: np.ndarray) -> tuple[list[int], list[int]]:
    """Corrupt one row with T5's steps: interleave the lengths, mask the noise, replace each run by a sentinel."""
    pairs = zip(np.diff(kept, prepend=0), np.diff(noise, prepend=0))
    is_noise = [flag for pair in pairs for flag, length in zip((False, True), pair) for _ in range(length)]

    def with_sentinels(masked: list[bool]) -> list[int]:
        result, unused = [], iter(SENTINELS)
        for position, token in enumerate(row):
            if not masked[position]:
                result.append(int(token))
            elif position == 0 or not masked[position - 1]:
                result.append(next(unused))
        return [*result, EOS]

    return with_sentinels(is_noise), with_sentinels([not flag for flag in is_noise])


@pytest.mark.parametrize(
    "size",
    [
        T5,
        SMALL,
        lengths(300, 0.5, 3.0),
        lengths(200, 0.8, 3.0),
        lengths(100, 0.15, 1.0),  # as many spans as noise tokens
        lengths(40, 0.9, 3.0),  # as many spans as kept tokens
        lengths(60, 0.15, 50.0),  # one span
        lengths(4, 0.15, 3.0),
        SpanLengths(raw=6, noise=3, spans=3, inputs=7, targets=7),  # only one possibility
    ],
)
@pytest.mark.parametrize("rows", [0, 1, 33, 64])
def test_corruption_equals_t5_row_by_row(size: SpanLengths, rows: int) -> None:
    raw = rows_of(rows, size.raw)
    inputs, targets = corrupt(raw, size, SENTINELS, EOS, (1, 2))
    for row, kept, noise, input_row, target_row in zip(raw, *draw_ends(size, rows, (1, 2)), inputs, targets):
        assert (kept[-1], noise[-1]) == (size.raw - size.noise, size.noise)
        assert min(np.diff(kept, prepend=0).min(), np.diff(noise, prepend=0).min()) >= 1
        assert (input_row.tolist(), target_row.tolist()) == slow_corrupt(row, kept, noise)
        assert input_row[0] == row[0]
        assert target_row[-2] == row[-1]


def test_rows_need_not_be_contiguous() -> None:
    raw = rows_of(568, 50).T
    for strided, plain in zip(*(corrupt(x, T5, SENTINELS, EOS, (1, 2)) for x in (raw, raw.copy()))):
        np.testing.assert_array_equal(strided, plain)


def test_raw_rows_are_not_modified() -> None:
    raw = rows_of(40, 568)
    corrupt(raw, T5, SENTINELS, EOS, (1, 2))
    np.testing.assert_array_equal(raw, rows_of(40, 568))


# --- A function of seed, step and row


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**63), st.integers(0, 2**63), st.integers(0, 2**40), st.integers(0, 70))
def test_parts_of_a_batch_equal_the_whole(seed: int, step: int, first: int, cut: int) -> None:
    raw = rows_of(70, 568)
    whole = corrupt(raw, T5, SENTINELS, EOS, (seed, step), first)
    head = corrupt(raw[:cut], T5, SENTINELS, EOS, (seed, step), first)
    tail = corrupt(raw[cut:], T5, SENTINELS, EOS, (seed, step), first + cut)
    for together, *apart in zip(whole, head, tail):
        np.testing.assert_array_equal(together, np.concatenate(apart))


def test_different_seeds_steps_and_rows_have_different_noise() -> None:
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (2**63, 0), (0, 2**63), (2**63, 2**63), (0, 2**32), (2**32, 0)]
    draws = [np.concatenate(draw_ends(T5, 256, key), axis=1) for key in keys]
    draws += [np.concatenate(draw_ends(T5, 256, (0, 0), first), axis=1) for first in (256, 2**32, 2**50)]
    rows = np.concatenate(draws)
    assert len(np.unique(rows, axis=0)) == len(rows)


# --- T5's distribution


@pytest.mark.parametrize("part", [0, 1, 13, 27])
def test_lengths_of_kept_and_noise_spans_follow_t5(part: int) -> None:
    counts = (T5.raw - T5.noise, T5.noise)
    for ends, count in zip(draw_ends(T5, 20_000, (11, 5)), counts):
        observed = np.bincount(np.diff(ends, prepend=0)[:, part], minlength=count + 1)
        assert_counts(observed, part_distribution(count, T5.spans))


def test_all_cut_points_are_equally_likely() -> None:
    for ends in draw_ends(T5, 20_000, (12, 0)):
        points, chosen = ends[0, -1] - 1, T5.spans - 1
        observed = np.bincount(ends[:, :-1].ravel() - 1, minlength=points)
        expected = len(ends) * chosen / points
        # Cut points of a row are drawn without replacement, which reduces the variance of each count.
        shrunk = (1 - chosen / points) * points / (points - 1)
        assert_chi_square(((observed - expected) ** 2 / expected).sum() / shrunk, points - 1)


KEPT, NOISE = 0, 1
WAYS = (15, 10)


def ways(part: int, key: tuple[int, int], rows: int = 60_000) -> np.ndarray:
    """For each SMALL row, number the division of its kept tokens, 0 … 14, or of its noise, 0 … 9."""
    ends = draw_ends(SMALL, rows, key)[part]
    number = np.full((8, 8), -1)
    for way, cuts in enumerate(combinations(range(1, ends[0, -1]), 2)):
        number[cuts] = way
    result = number[ends[:, 0], ends[:, 1]]
    assert result.min() >= 0
    return result


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ((KEPT, (3, 4)), (NOISE, (3, 4))),
        ((KEPT, (3, 7)), (KEPT, (3, 8))),
        ((NOISE, (3, 7)), (NOISE, (3, 8))),
        ((NOISE, (3, 7)), (NOISE, (4, 7))),
        ((NOISE, (3, 7)), (NOISE, (7, 3))),
        ((KEPT, (0, 0)), (NOISE, (0, 2**63))),
    ],
)
@pytest.mark.parametrize("distance", [0, 1, 256])
def test_all_pairs_of_divisions_are_equally_likely(
    one: tuple[int, tuple[int, int]], two: tuple[int, tuple[int, int]], distance: int
) -> None:
    """Kept and noise spans, distant rows, steps and seeds are independent."""
    pairs = (ways(*one) * WAYS[two[0]] + np.roll(ways(*two), distance))[::2]
    cells = WAYS[one[0]] * WAYS[two[0]]
    assert_counts(np.bincount(pairs, minlength=cells), np.full(cells, 1 / cells))


@pytest.mark.parametrize("part", [KEPT, NOISE])
@pytest.mark.parametrize("distance", [1, 2, 255])
def test_rows_of_a_step_are_independent(part: int, distance: int) -> None:
    drawn = ways(part, (5, 6))
    # Every other pair, so that no row is in two of them.
    first = np.arange(len(drawn) - distance)
    first = first[first // distance % 2 == 0]
    pairs = drawn[first] * WAYS[part] + drawn[first + distance]
    cells = WAYS[part] ** 2
    assert_counts(np.bincount(pairs, minlength=cells), np.full(cells, 1 / cells))


def test_first_rows_of_successive_steps_are_independent() -> None:
    drawn = np.concatenate([ways(NOISE, (9, step), rows=1) for step in range(5000)])
    pairs = drawn[::2] * WAYS[NOISE] + drawn[1::2]
    assert_counts(np.bincount(pairs, minlength=100), np.full(100, 0.01))


def test_rows_and_steps_are_uncorrelated() -> None:
    masks = []
    for step in range(2):
        kept, _ = draw_ends(T5, 4000, (21, step))
        mask = np.zeros((4000, T5.raw), np.float32)
        np.put_along_axis(mask, kept[:, :-1], 1, axis=1)
        masks.append(mask[:, 1:483] - 27 / 482)
    variance = 27 / 482 * (1 - 27 / 482)
    for one, two in ((masks[0][:-1], masks[0][1:]), (masks[0][:-256], masks[0][256:]), masks):
        # The correlation of two independent rows has variance 1 / (points - 1).
        correlation = (one * two).mean(axis=1) / variance
        assert abs(correlation.mean()) < 5 / np.sqrt(481 * len(correlation))
        assert 0.9 < correlation.var() * 481 < 1.1


# --- Errors


def test_more_noise_spans_than_sentinels_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"28 masked spans, .* only 27 sentinels; reduce input_length or increase mean_span"
    ):
        corrupt(rows_of(2, 568), T5, SENTINELS[:27], EOS, (0, 0))
    corrupt(rows_of(2, 568), T5, SENTINELS[:28], EOS, (0, 0))


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of 568 tokens, got an array of shape \(2, 512\)"):
        corrupt(rows_of(2, 512), T5, SENTINELS, EOS, (0, 0))
