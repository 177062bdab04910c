"""Properties of Transformer-VQ: equivalent forms agree, attention is causal, and documents can be separated."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vq_goldens import golden

import flaxen
from flaxen.errors import InputError
from flaxen.generate.processors import nucleus
from flaxen.hf import vq as files
from flaxen.hf.vq_memory import Memory
from flaxen.models import vq_language, vq_lm
from flaxen.models.vq_config import Config
from flaxen.models.vq_decoding import VQDecoder
from flaxen.models.vq_lm import VQLM
from flaxen.nn.param import initialise
from flaxen.nn.vq import BlockwisePass
from flaxen.nn.vq_plan import NEVER
from flaxen.pretrained import Pretrained

SIZES = {"vocab_size": 23, "d_model": 16, "d_k": 8, "d_v": 12, "n_layers": 2, "n_codes": 5, "block": 4, "window": 6}
KINDS: dict[str, dict[str, Any]] = {
    "shga": {},
    "heads": {"n_heads": 2, "norm_out": True, "tied": True, "logit_scale": 0.5},
    "mqa": {"heads": "mqa", "n_heads": 3, "d_ff": 20},
    "mha": {"heads": "mha", "n_heads": 2, "d_ff": 20, "absolute": True},
    "documents": {"documents": True, "absolute": True},
    "near": {"aggregate": False},
}


def make(**changes: Any) -> VQLM:
    """A model with noise on all weights, so that those with a constant initial value differ from each other."""
    config = Config(**{**SIZES, **changes})
    model, draw = initialise(VQLM(config), 0), np.random.default_rng(1)
    model = jax.tree.map(lambda leaf: leaf + 0.3 * draw.standard_normal(leaf.shape).astype(np.float32), model)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.abs(leaf) if path[-2].name == "count" else leaf, model
    )


def with_changes(model: VQLM, **changes: Any) -> VQLM:
    """The same weights with changes of the configuration."""
    config = dataclasses.replace(model.config, **changes)
    return jax.tree.unflatten(jax.tree.structure(VQLM(config)), jax.tree.leaves(model))


def text(rows: int, length: int, seed: int = 0, ends: float = 0.1) -> np.ndarray:
    """Random tokens, a fraction `ends` of which are end tokens; every row starts with one."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(3, SIZES["vocab_size"], (rows, length))
    ids[draw.random(ids.shape) < ends] = 1
    ids[:, 0] = 1
    return ids.astype(np.int32)


@jax.jit
def logprobs(model: VQLM, ids: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(model.logits(ids))


@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), ["mqa", "documents"], ["mqa", "near"]], ids="-".join)
def test_block_length_and_form_do_not_change_results(kinds: list[str]) -> None:
    model, ids = make(**{name: value for kind in kinds for name, value in KINDS[kind].items()}), text(2, 24)
    expected = logprobs(model, ids)
    for changes in ({"block": 1}, {"block": 24}, {"form": "parallel", "block": 3}, {"scan": False, "block": 8}):
        np.testing.assert_allclose(
            logprobs(with_changes(model, **changes), ids), expected, atol=2e-5, rtol=1e-5, err_msg=str(changes)
        )
    assert np.ptp(np.asarray(expected)) > 1, "a comparison of constant outputs would prove nothing"


def dense(model: VQLM, ids: np.ndarray) -> jax.Array:
    """The dense formula of the model: the scores of all queries and all quantised keys in one matrix.

    score(t, s) = (q_t + u) · k̂_s, plus (q_t + v) · r_(t-s) if t - s ≤ W, and a softmax over all s ≤ t.
    """
    c, t = model.config, ids.shape[1]
    x = model.embed(jnp.asarray(ids), jnp.broadcast_to(jnp.arange(t), ids.shape))
    distance = jnp.arange(t)[:, None] - jnp.arange(t)
    for layer in vq_lm.unstack(model.layers):
        for unit in layer.units:
            q, k, v, gate = unit.project(x)
            queries, distant = unit.biased(q)
            keys = k if c.attention == "full" else unit.codebook.nearest(k)[1]
            bias = jnp.einsum("BNQTH,NQEH->BNQTE", distant, unit.table())
            column = jnp.clip(c.window - distance, 0, c.window)
            bias = jnp.take_along_axis(bias, jnp.broadcast_to(column, (*bias.shape[:3], t, t)), axis=-1)
            scores = jnp.einsum("BNQTH,BNSH->BNQTS", queries, keys) + jnp.where(distance <= c.window, bias, 0.0)
            visible = (distance >= 0) & ((distance <= c.window) | c.aggregate)
            weights = jax.nn.softmax(jnp.where(visible, scores, NEVER), axis=-1)
            x = x + unit.output(jnp.einsum("BNQTS,BNSU->BNQTU", weights, v), gate)
        if layer.mlp is not None:
            x = x + layer.mlp(layer.norm(x, jnp.float32), 0.0, None)
    return jax.nn.log_softmax(model.output(x if model.norm is None else model.norm(x, jnp.float32)))


@pytest.mark.parametrize(
    ("kind", "attention"),
    [("heads", "vq"), ("mqa", "vq"), ("mha", "vq"), ("near", "vq"), ("mqa", "full"), ("near", "full")],
)
def test_blockwise_attention_equals_dense_formula(kind: str, attention: str) -> None:
    model, ids = make(**KINDS[kind], attention=attention), text(2, 24)
    np.testing.assert_allclose(logprobs(model, ids), jax.jit(dense)(model, ids), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["heads", "mqa"])
@pytest.mark.parametrize("attention", ["vq", "full"])
def test_gradients_equal_those_of_dense_formula(kind: str, attention: str) -> None:
    """With one block all keys are seen individually, so both forms pass gradients to every key. Codebooks get none."""
    model, ids = make(**KINDS[kind], attention=attention, block=24), text(2, 24)
    labels = jnp.asarray(text(2, 24, seed=5))

    def loss(model: VQLM, form: Callable[[VQLM, np.ndarray], jax.Array]) -> jax.Array:
        return -jnp.take_along_axis(form(model, ids), labels[..., None], -1).mean()

    actual, expected = (jax.jit(jax.grad(loss), static_argnums=1)(model, form) for form in (logprobs, dense))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(float(np.abs(b).max()), 1e-3), err_msg=str(path))


@pytest.mark.parametrize("through", [True, False])
def test_gradients_of_scan_and_parallel_form_agree(through: bool) -> None:
    """The scan's hand-written backward pass equals JAX's of the parallel form, with documents and shared keys."""
    kinds = {"heads": "mqa", "n_heads": 2, "d_ff": 20, "documents": True, "through_cache": through}
    model, ids, labels = make(**kinds), jnp.asarray(text(2, 24)), jnp.asarray(text(2, 24, seed=5))

    def gradient(form: str) -> VQLM:
        loss = jax.grad(lambda model: model.loss(ids, labels, commit=0.1, learn=True)[0].loss)
        return jax.jit(loss)(with_changes(model, form=form))

    for a, b in zip(jax.tree.leaves(gradient("scan")), jax.tree.leaves(gradient("parallel"))):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(float(np.abs(b).max()), 1e-3))


def test_smaller_blocks_without_training_give_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without training, blocks of more than 128 tokens are computed in smaller ones, with the same loss and state."""
    model = make(block=192, window=20)
    assert model.config.reading.block == 96
    for not_split in ({"reference": True}, {"block": 128}):
        config = dataclasses.replace(model.config, **not_split)
        assert config.reading == config.spec
    ids, labels = jnp.asarray(text(1, 384)), jnp.asarray(text(1, 384, seed=5))
    small = jax.jit(lambda model: model.loss(ids, labels)[:2])(model)
    monkeypatch.setattr(Config, "reading", Config.spec)
    for a, b in zip(jax.tree.leaves(small), jax.tree.leaves(jax.jit(lambda model: model.loss(ids, labels)[:2])(model))):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(float(np.abs(b).max()), 1.0))


@pytest.mark.parametrize("form", ["scan", "parallel"])
@pytest.mark.parametrize(("block", "window"), [(4, 3), (3, 4), (1, 12)])
def test_attention_is_causal(form: str, block: int, window: int) -> None:
    """The Jacobian of outputs by inputs is lower triangular, and mostly not 0 below the diagonal."""
    model = make(block=block, window=window, form=form)
    c, state = model.config, vq_lm.initial_state(model.config, 1)
    documents = jnp.concatenate([state.documents, jnp.ones((1, 12), jnp.int32)], axis=1)
    plan = BlockwisePass(c.spec, documents, state.latest, parallel=form == "parallel")
    layers = vq_lm.unstack(model.layers)

    def outputs(x: jax.Array) -> jax.Array:
        for i, layer in enumerate(layers):
            x, _, _ = layer(x, plan, jax.tree.map(lambda a, i=i: a[:, i], state.caches))
        return x[0].sum(axis=-1)

    x = jnp.asarray(np.random.default_rng(2).standard_normal((1, 12, c.d_model)), jnp.float32)
    jacobian = np.abs(np.asarray(jax.jit(jax.jacrev(outputs))(x))[:, 0]).sum(-1)
    assert not np.triu(jacobian, 1).any()
    assert (jacobian[np.tril_indices(12)] > 0).mean() > 0.5


@pytest.mark.parametrize("kind", ["documents", "near"])
@pytest.mark.parametrize("attention", ["vq", "full"])
def test_separated_documents_equal_documents_alone(kind: str, attention: str) -> None:
    model = make(**{**KINDS[kind], "documents": True}, attention=attention)
    parts = [text(1, n, seed=n, ends=0.0) for n in (9, 1, 14, 4)]
    together = logprobs(model, np.concatenate(parts, axis=1))
    alone = np.concatenate([logprobs(model, part) for part in parts], axis=1)
    np.testing.assert_allclose(together, alone, atol=2e-5)
    assert (
        np.abs(np.asarray(logprobs(with_changes(model, documents=False), np.concatenate(parts, 1))) - alone).max()
        > 0.01
    )


@pytest.mark.parametrize("kind", ["heads", "documents", "near"])
def test_chunks_with_carried_state_equal_whole_sequence(kind: str) -> None:
    model, ids = make(**KINDS[kind]), jnp.asarray(text(2, 24))
    run = jax.jit(lambda model, ids, state: model(ids, state)[:2])
    whole, _ = run(model, ids, None)
    state, parts = vq_lm.initial_state(model.config, 2), []
    for first, last in ((0, 4), (4, 16), (16, 24)):
        hidden, state = run(model, ids[:, first:last], state)
        parts.append(hidden)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "attention"), [*((kind, "vq") for kind in KINDS), ("mqa", "full"), ("documents", "full"), ("near", "full")]
)
def test_prefill_and_decoding_equal_whole_sequence(kind: str, attention: str) -> None:
    """Prompts of different lengths in one batch, then one token at a time while the ring buffer wraps several times."""
    model, ids = make(**KINDS[kind], attention=attention), text(2, 30, ends=0.05)
    expected = np.asarray(jax.jit(VQLM.logits)(model, ids))
    cuts = (5, 11)  # length of the prompt in each row
    width = max(cuts)
    prompt, valid = np.zeros((2, width), np.int32), np.zeros((2, width), bool)
    for row, n in enumerate(cuts):
        prompt[row, width - n :], valid[row, width - n :] = ids[row, :n], True
    start = jax.jit(lambda model, inputs: VQDecoder(model).start(inputs, 20, 1, False))
    step = jax.jit(lambda model, tokens, state: VQDecoder(model).step(tokens, state))
    tokens, state = start(model, (prompt, valid, None))
    np.testing.assert_array_equal(tokens[:, 0], prompt)
    now = jnp.asarray(prompt[:, -1:])
    for n in range(19):
        logits, state = step(model, now, state)
        for row, cut in enumerate(cuts):
            np.testing.assert_allclose(logits[row, 0], expected[row, cut - 1 + n], atol=5e-5)
        now = jnp.asarray([[ids[row, cut + n]] for row, cut in enumerate(cuts)])


def test_sampling_equals_original() -> None:
    """Teacher-forced, one token at a time: log-probabilities, nucleus and, with the original's noise, its tokens."""
    original, base = golden("sampling"), golden("model_01_base")
    step = jax.jit(lambda model, tokens, state: VQDecoder(model).step(tokens, state))
    for i, run in enumerate(original.config["runs"]):
        settings = {**original.config["model"], "mem_len": run["mem_len"]}
        model = files.load_original(base.under("params/"), settings).model
        tokens, noise = original[f"run{i}/tokens"], original[f"run{i}/gumbel"]
        rows = len(tokens)
        start = jnp.ones((rows, 1), jnp.int32)
        _, state = jax.jit(lambda model, start=start: VQDecoder(model).start((start, start > 0, None), 48, 1, False))(
            model
        )
        now = start
        for t in range(tokens.shape[1]):
            logits, state = step(model, now, state)
            actual = jax.nn.log_softmax(logits[:, 0])
            np.testing.assert_allclose(actual, original[f"run{i}/logprobs"][:, t], atol=2e-5)
            keep = nucleus(actual, run["p_nucleus"])
            np.testing.assert_array_equal(keep, original[f"run{i}/nucleus_logits"][t] > -1e9)
            np.testing.assert_array_equal(jnp.argmax(jnp.where(keep, actual, -1e10) + noise[t], -1), tokens[:, t])
            now = jnp.asarray(tokens[:, t : t + 1])


def test_nucleus_equals_original() -> None:
    original = golden("nucleus")
    for i, p in enumerate(original["p"]):
        keep = jax.jit(nucleus)(jnp.asarray(original["logits"]), p)
        np.testing.assert_array_equal(keep, original[f"keep/{i}"] > 0)


def test_batching_and_memory_do_not_change_generated_tokens(tmp_path: Any) -> None:
    """A batch, or a memory in between, generates the same tokens; saved memories and models load completely."""
    model = Pretrained(make(**KINDS["heads"]))
    prompts = [text(1, n, seed=n)[0].tolist() for n in (1, 7, 12)]
    for options in ({}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "num_return_sequences": 2}):
        settings = {"max_new_tokens": 12, "eos_token_id": (), **options}
        together = model.generate(prompts, batch_size=3, **settings)
        alone = [out for prompt in prompts for out in model.generate([prompt], batch_size=1, **settings)]
        if "do_sample" not in options:  # the noise of sampling depends on the index of the prompt
            assert [out.tokens for out in together] == [out.tokens for out in alone]
        assert len(together) == len(prompts) * options.get("num_return_sequences", 1)
    memory = model.remember(prompts[2][:5])
    memory = model.remember(prompts[2][5:], memory)
    memory.save(tmp_path / "memory.npz")
    loaded_memory = Memory.load(tmp_path / "memory.npz", model.config)
    settings = {"max_new_tokens": 12, "eos_token_id": ()}
    expected = model.generate([prompts[2]], **settings)[0]
    actual = model.generate([[]], memory=loaded_memory, **settings)[0]
    assert actual.tokens == expected.tokens
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, atol=2e-5)
    with pytest.raises(InputError, match="another model"):
        Memory.load(tmp_path / "memory.npz", dataclasses.replace(model.config, n_codes=6))
    model.save(tmp_path / "saved")
    loaded = flaxen.load(tmp_path / "saved")
    assert dataclasses.replace(loaded.config, scan=True) == model.config
    np.testing.assert_array_equal(loaded.logits([prompts[1]]), model.logits([prompts[1]]))


def test_counts_are_exact_in_bf16() -> None:
    """With one code and 300 tokens, counts in bfloat16 stop at 256, as the original's do (`reference`)."""
    ids = jnp.full((1, 300), 5, jnp.int32)
    for reference, expected in ((False, 294.0), (True, 256.0)):
        model = make(compute="bfloat16", n_codes=1, block=1, reference=reference)
        _, state, _ = jax.jit(lambda model: model(ids))(model)
        assert float(state.caches[0].counts[:, 0].sum()) == expected


def test_kmeans_codebooks_reduce_quantisation_error() -> None:
    model, ids = make(n_codes=8), jnp.asarray(text(4, 24))
    error = jax.jit(lambda model: model(ids, weights=jnp.ones(ids.shape))[2].error)
    fitted = jax.jit(vq_language.fit_codebooks)(model, ids, jax.random.key(0))
    assert error(fitted) < 0.5 * error(model)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"window": 0}, "window must be at least 1"), ({"d_model": 15}, "must be even"),
     ({"heads": "mha"}, "d_ff must be at least 1"), ({"d_ff": 8}, "d_ff must be 0"),
     ({"attention": "sparse"}, "one of vq, full"), ({"eos_ids": (99,)}, "vocabulary")],
)  # fmt: skip
def test_invalid_config_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**{**SIZES, **wrong})
    with pytest.raises(ValueError, match="multiple of the block"):
        make()(jnp.ones((1, 5), jnp.int32))
