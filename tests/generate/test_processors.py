"""Each logits processor equals its counterpart in transformers."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from flaxen.generate.options import Options
from flaxen.generate.processors import TokenHistory, forbid_ngrams, forbid_words, narrow, penalise_repetition

B, G, V, ROOM = 2, 3, 13, 12


def random_case(length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random logits, and `length` random tokens with padding up to ROOM."""
    draw = np.random.default_rng(seed)
    tokens = np.zeros((B, G, ROOM), np.int32)
    tokens[:, :, :length] = draw.integers(0, V, (B, G, length))
    return draw.standard_normal((B, G, V)).astype(np.float32) * 3, tokens


def run_theirs(processor: object, logits: np.ndarray, tokens: np.ndarray, length: int) -> np.ndarray:
    flat = torch.tensor(tokens[:, :, :length].reshape(B * G, length)).long()
    return processor(flat, torch.tensor(logits.reshape(B * G, V))).numpy().reshape(B, G, V)


def context(tokens: np.ndarray, length: int, **numbers: float) -> TokenHistory:
    return TokenHistory(
        jnp.asarray(tokens),
        jnp.asarray(length),
        jnp.ones((), int),
        {n: jnp.asarray(value) for n, value in numbers.items()},
    )


@pytest.mark.parametrize("length", [1, 2, 3, 7, 11])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_forbidden_ngrams_equal_transformers(length: int, n: int) -> None:
    for seed in range(5):
        logits, tokens = random_case(length, seed)
        tokens %= 3  # few tokens, many repeats
        ours = forbid_ngrams(jnp.asarray(logits), context(tokens, length), n)
        np.testing.assert_array_equal(ours, run_theirs(theirs.NoRepeatNGramLogitsProcessor(n), logits, tokens, length))


@pytest.mark.parametrize("length", [1, 2, 7])
def test_bad_words_equal_transformers(length: int) -> None:
    words = [(4,), (1, 2), (0, 1), (2, 2, 1), (1, 0, 2, 1)]
    for seed in range(5):
        logits, tokens = random_case(length, seed)
        tokens %= 3
        processor = theirs.NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=torch.tensor([1]))
        ours = forbid_words(jnp.asarray(logits), context(tokens, length), words)
        np.testing.assert_array_equal(ours, run_theirs(processor, logits, tokens, length))


@pytest.mark.parametrize("length", [1, 7])
def test_repetition_penalty_equals_transformers(length: int) -> None:
    logits, tokens = random_case(length, 0)
    ours = penalise_repetition(jnp.asarray(logits), context(tokens, length, repetition_penalty=1.4))
    processor = theirs.RepetitionPenaltyLogitsProcessor(1.4)
    np.testing.assert_allclose(ours, run_theirs(processor, logits, tokens, length), rtol=1e-6)


@pytest.mark.parametrize("top_k", [0, 1, 5])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.5, 0.9])
@pytest.mark.parametrize("min_p", [None, 0.2])
def test_temperature_top_k_top_p_and_min_p_equal_transformers(
    top_k: int, top_p: float | None, min_p: float | None
) -> None:
    for seed in range(5):
        logits, tokens = random_case(3, seed)
        options = Options(do_sample=True, temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
        ours = narrow(jnp.asarray(logits), context(tokens, 3, **options.numbers()), options)
        expected = run_theirs(theirs.TemperatureLogitsWarper(0.7), logits, tokens, 3)
        chain = [theirs.TopKLogitsWarper(top_k)] if top_k else []
        chain += [theirs.TopPLogitsWarper(top_p)] if top_p else []
        chain += [theirs.MinPLogitsWarper(min_p)] if min_p else []
        for processor in chain:
            expected = run_theirs(processor, expected, tokens, 3)
        np.testing.assert_allclose(ours, expected, rtol=1e-6)
