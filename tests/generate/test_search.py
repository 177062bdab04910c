"""Search equals transformers' (PyTorch, run live), and keeps its own invariants."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Reference, torch_generate

import flaxen
from flaxen.generate import search
from flaxen.models.t5_decoding import T5Decoder
from flaxen.nn import hardware


def prompts(vocab: int, n: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(2, vocab, draw.integers(1, longest + 1)).tolist() for _ in range(n)]


@pytest.mark.parametrize("beams", [1, 4])
def test_greedy_and_beam_search_equal_transformers(reference: Reference, beams: int) -> None:
    ids = prompts(reference.vocab, 50)
    theirs, scores = torch_generate(reference, ids, max_new_tokens=20, num_beams=beams)
    ours = flaxen.load(reference.directory).generate(ids, max_new_tokens=20, num_beams=beams)
    assert [output.tokens for output in ours] == theirs
    if beams > 1:
        np.testing.assert_allclose([output.score for output in ours], scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vocab", [3, 128, 129, 300, 1000])
@pytest.mark.parametrize("beams", [1, 3])
def test_chunked_top_k_equals_top_k(vocab: int, beams: int) -> None:
    """Also with equal scores, and with rows that are mostly -inf."""
    draw = np.random.default_rng(vocab)
    scores = draw.integers(0, 40, (4, beams, vocab)).astype(np.float32)
    scores[1] = -np.inf
    scores[1, -1, -1] = scores[2, 0, 0] = 99.0
    scores[3] = draw.permutation(beams * vocab).reshape(beams, vocab)  # all different
    k = min(8, beams * vocab)
    row = scores[3].reshape(-1)
    row[:: -(-beams * vocab // k)] += 2 * beams * vocab  # spread the k best ones over the chunks
    values, index = jax.lax.top_k(jnp.asarray(scores.reshape(4, -1)), k)
    totals, parents, tokens = search._top_candidates(jnp.asarray(scores), k)
    np.testing.assert_array_equal(totals, values)
    possible = np.isfinite(values)
    np.testing.assert_array_equal((parents * vocab + tokens)[possible], index[possible])
    assert (np.asarray(tokens) < vocab).all()


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "length_penalty": 2.0},
        {"num_beams": 3, "length_penalty": -1.0},
        {"num_beams": 3, "early_stopping": True},
        {"num_beams": 3, "early_stopping": "never", "length_penalty": 0.7},
        {"num_beams": 4, "num_return_sequences": 3},
        {"num_beams": 3, "eos_token_id": [1, 5, 7]},
        {"eos_token_id": [1, 5, 7]},
        {"repetition_penalty": 1.7},
        {"num_beams": 3, "repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2},
        {"num_beams": 3, "no_repeat_ngram_size": 3},
        {"min_new_tokens": 9},
        {"num_beams": 3, "min_new_tokens": 9},
        {"forced_bos_token_id": 11},
        {"num_beams": 3, "forced_bos_token_id": 11, "forced_eos_token_id": 1},
        {"max_new_tokens": 1},
        {"num_beams": 4, "max_new_tokens": 1},
    ],
    ids=str,
)
def test_options_equal_transformers(t5_reference: Reference, options: dict) -> None:
    ids = prompts(t5_reference.vocab, 12, seed=1)
    options = {"max_new_tokens": 14, **options}
    theirs, scores = torch_generate(t5_reference, ids, **options)
    ours = flaxen.load(t5_reference.directory).generate(ids, **options)
    assert [output.tokens for output in ours] == theirs
    if scores:
        np.testing.assert_allclose([output.score for output in ours], scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beams", [1, 3])
def test_bad_words_equal_transformers(t5_reference: Reference, beams: int) -> None:
    """Ban single tokens, pairs and triples that greedy search generates."""
    ids = prompts(t5_reference.vocab, 8, seed=2)
    pretrained = flaxen.load(t5_reference.directory)
    greedy = [output.tokens for output in pretrained.generate(ids, max_new_tokens=10) if len(output.tokens) > 5]
    words = [greedy[0][:1], greedy[1][:2], greedy[2][1:4], greedy[3][2:4], [1]]
    theirs, _ = torch_generate(t5_reference, ids, max_new_tokens=10, num_beams=beams, bad_words_ids=words)
    ours = pretrained.generate(ids, max_new_tokens=10, num_beams=beams, bad_words_ids=words)
    assert [output.tokens for output in ours] == theirs
    assert theirs != torch_generate(t5_reference, ids, max_new_tokens=10, num_beams=beams)[0]


def test_output_does_not_depend_on_the_batch(t5_reference: Reference) -> None:
    """A prompt has the same output in any batch: with greedy search, beam search and sampling."""
    pretrained = flaxen.load(t5_reference.directory)
    ids = prompts(t5_reference.vocab, 7, seed=3)
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "seed": 5, "num_return_sequences": 2}):
        outputs = pretrained.generate(ids, batch_size=8, max_new_tokens=9, **options)
        smaller = pretrained.generate(ids, batch_size=4, max_new_tokens=9, **options)
        assert [o.tokens for o in outputs] == [o.tokens for o in smaller]
        assert [o.index for o in outputs] == sorted(o.index for o in outputs)


def test_logprobs_equal_teacher_forcing(t5_reference: Reference) -> None:
    """For every kind of search the reported log-probabilities are the model's own, before processors."""
    pretrained = flaxen.load(t5_reference.directory)
    ids = prompts(t5_reference.vocab, 3, seed=4)
    kinds = ({}, {"num_beams": 3, "repetition_penalty": 1.3}, {"do_sample": True, "temperature": 1.5, "top_k": 0})
    for options in kinds:
        for output in pretrained.generate(ids, max_new_tokens=8, **options):
            logits = pretrained.logits([ids[output.index]], [[0, *output.tokens[:-1]]])[0]
            expected = jax.nn.log_softmax(jnp.asarray(logits))[
                jnp.arange(len(output.tokens)), jnp.asarray(output.tokens)
            ]
            np.testing.assert_allclose(output.logprobs, expected, atol=2e-5)
            if "num_beams" not in options:
                assert output.score == pytest.approx(sum(output.logprobs), abs=1e-4)


def test_sampling_follows_the_distribution(t5_reference: Reference) -> None:
    """Chi-squared test of the first tokens of 3,000 samples against softmax(logits / T) over the top k."""
    pretrained = flaxen.load(t5_reference.directory)
    (ids,) = prompts(t5_reference.vocab, 1, seed=5)
    n = 3000
    out = pretrained.generate([ids], do_sample=True, top_k=6, temperature=1.4, num_return_sequences=n, max_new_tokens=1)
    logits = pretrained.logits([ids], [[0]])[0, 0] / 1.4
    best = np.argsort(logits)[::-1][:6]
    expected = np.exp(logits[best] - logits[best].max())
    expected = n * expected / expected.sum()
    counts = np.array([sum(output.tokens[0] == token for output in out) for token in best])
    assert counts.sum() == n
    assert ((counts - expected) ** 2 / expected).sum() < 20.5  # the 99.9 % point with 5 degrees of freedom
    again = pretrained.generate(
        [ids], do_sample=True, top_k=6, temperature=1.4, num_return_sequences=n, max_new_tokens=1
    )
    assert [output.tokens for output in out] == [output.tokens for output in again]
    other_seed = pretrained.generate(
        [ids], do_sample=True, top_k=6, temperature=1.4, num_return_sequences=n, max_new_tokens=1, seed=1
    )
    assert [output.tokens for output in out] != [output.tokens for output in other_seed]


def test_new_length_within_a_bucket_does_not_recompile(t5_reference: Reference) -> None:
    """Nor does a new max_new_tokens, temperature, penalty or seed."""
    pretrained = flaxen.load(t5_reference.directory)

    def count() -> Any:
        return search.begin._cache_size() + search.advance._cache_size()

    sample = {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.1}
    pretrained.generate([[5] * 17], max_new_tokens=12)
    pretrained.generate([[5] * 17], max_new_tokens=12, num_beams=2, length_penalty=0.5)
    pretrained.generate([[5] * 17], max_new_tokens=12, temperature=0.7, seed=1, **sample)
    before = count()
    for n in (18, 20, 24):
        pretrained.generate([[5] * n], max_new_tokens=n - 8)
        pretrained.generate([[5] * n], max_new_tokens=n - 8, num_beams=2, length_penalty=n / 10)
        pretrained.generate([[5] * n], max_new_tokens=n - 8, temperature=0.1 * n, seed=n, **{**sample, "top_p": 0.5})
    assert count() == before
    pretrained.generate([[5] * 25], max_new_tokens=12)  # the next bucket
    assert count() == before + 2


def test_cross_attention_keys_are_stored_once_per_input(t5_reference: Reference) -> None:
    """The state of four beams holds one copy of the encoder's keys and values."""
    pretrained = flaxen.load(t5_reference.directory)
    inputs = (jnp.full((2, 16), 5, jnp.int32), jnp.ones((2, 16), bool))
    options = flaxen.Options(num_beams=4)
    state = search.begin(search.prepare(T5Decoder, pretrained.model), inputs, jnp.arange(2), 16, options, 0).state
    heads, size = pretrained.config.n_heads, pretrained.config.d_head
    assert all((k.shape, v.shape) == ((2, heads, size, 16), (2, heads, 16, size)) for _, (k, v) in state.past.layers)


def test_preparing_shares_the_models_arrays(t5_reference: Reference) -> None:
    """A prepared decoder holds the model's own arrays; only on a CPU it adds a second layout of the decoder."""
    model = flaxen.load(t5_reference.directory).model
    for platform, has_layout in (("cpu", True), ("tpu", False)):
        with hardware.compile_for(platform):
            decoder = search.prepare(T5Decoder, model)
        assert all(ours is theirs for ours, theirs in zip(jax.tree.leaves(decoder.model), jax.tree.leaves(model)))
        assert (decoder.layers is not None) is has_layout
