"""Transformer-VQ against the original's results: outputs, losses, gradients, carried state, quantiser, dropout."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vq_goldens import MODELS, Golden, golden

from flaxen.errors import InputError
from flaxen.hf import vq as files
from flaxen.hf.weightmap import save
from flaxen.models import vq_lm, vq_unit
from flaxen.models.vq_config import Config
from flaxen.models.vq_lm import VQLM, DropoutKeys, VQState
from flaxen.nn import codebook, vq_block
from flaxen.nn.layers import unit_rms
from flaxen.nn.param import initialise
from flaxen.nn.position import sinusoids
from flaxen.nn.vq import BlockwisePass, VQCache
from flaxen.nn.vq_plan import NEVER, VQSpec
from flaxen.tree import leaves, map_leaves


def load(name: str, **changes: Any) -> tuple[Golden, VQLM]:
    """A golden file, and the original's model from it with changes of the configuration."""
    original = golden(name)
    parameters = original.under("params/") or golden("model_01_base").under("params/")
    model = files.load_original(parameters, original.config["model"]).model
    config = dataclasses.replace(model.config, **changes)
    return original, jax.tree.unflatten(jax.tree.structure(VQLM(config)), jax.tree.leaves(model))


def original_names(model: VQLM) -> dict[str, np.ndarray]:
    """The weights of a model, or its gradients, by the original's names."""
    return save(model, files.original_rows(model.config))


def assert_close(actual: Any, expected: np.ndarray, relative: float, what: str = "") -> None:
    """Compare with a tolerance of `relative` times the largest expected entry."""
    scale = max(float(np.abs(expected).max()), 1e-6)
    np.testing.assert_allclose(np.asarray(actual), expected, atol=relative * scale, rtol=0, err_msg=what)


@pytest.mark.parametrize("name", MODELS)
def test_forward_equals_original(name: str) -> None:
    original, model = load(f"model_{name}")
    run = jax.jit(lambda model, ids, documents: model(ids, documents=documents)[0])
    hidden = run(model, original["batch/inputs"], original["batch/doc_ids"])
    logits = np.asarray(model.output(hidden))
    np.testing.assert_allclose(logits, original["eval/logits"], atol=2e-5, rtol=0)
    np.testing.assert_allclose(jax.nn.log_softmax(logits), original["eval/logprobs"], atol=2e-5, rtol=0)
    labels = np.where(original["batch/loss_mask"], original["batch/targets"], -1)
    sums, _, _ = jax.jit(VQLM.loss)(model, original["batch/inputs"], labels)
    assert float(sums.loss / sums.weight) == pytest.approx(float(original["eval/loss_lm_per_token"]), rel=1e-5)


@pytest.mark.parametrize("name", MODELS[:5])
def test_codes_layers_and_metrics_equal_original(name: str) -> None:
    """Codes are identical, and the output of each layer agrees. So do the codebook metrics, computed in each block of
    the first update and averaged over blocks, units and layers."""
    original, model = load(f"model_{name}", scan=False)
    c, ids = model.config, jnp.asarray(original["batch/inputs"])
    state = vq_lm.initial_state(c, len(ids))
    documents = jnp.asarray(original["batch/doc_ids"])
    x = model.embed(ids, vq_lm.token_positions(c, state, documents))
    assert_close(x, original["eval/x_emb"], 1e-5)
    plan = BlockwisePass(c.spec, jnp.concatenate([state.documents, documents], 1), state.latest)
    measured: list[dict[str, jax.Array]] = []
    for i, layer in enumerate(vq_lm.unstack(model.layers)):
        for j, unit in enumerate((layer.first, layer.second)):
            k = unit.project(x)[1]
            z, chosen = unit.codebook.nearest(k)
            np.testing.assert_array_equal(z, original[f"eval/shortcodes/layer{i}/attn{j + 1}"])
            metrics = codebook.statistics(unit.codebook.sum[...], unit.codebook.count[...])
            for first in range(0, original.config["model"]["update_len"], c.block):
                block = (slice(None), slice(None), slice(first, first + c.block))
                measured.append(metrics | codebook.fitness(k[block], chosen[block]))
            x, _, _ = jax.jit(lambda unit, x, cache: unit(x, plan, cache))(
                unit, x, jax.tree.map(lambda a, i=i: a[:, i], state.caches[j])
            )
        assert_close(x, original[f"eval/layer{i}/x_out"], 1e-5)
    for name, expected in original.under("train/chunk0/metrics/").items():
        if not name.startswith("loss"):
            assert np.mean([metrics[name] for metrics in measured]) == pytest.approx(
                float(expected), rel=1e-4, abs=1e-5
            ), name


def objective(
    model: VQLM, original: Golden, state: VQState | None, chunk: slice, noise: DropoutKeys | None = None
) -> Any:
    """The original's loss, a mean over all positions, with the gradient of its commitment loss."""
    labels = jnp.where(original["batch/loss_mask"][:, chunk] > 0, original["batch/targets"][:, chunk], -1)
    ids, documents = (jnp.asarray(original[f"batch/{name}"][:, chunk]) for name in ("inputs", "doc_ids"))
    sums, state, learning = model.loss(
        ids, labels, state, commit=original.config["model"]["c_beta"], noise=noise, documents=documents, learn=True
    )
    return sums.loss / labels.size, (state, sums, learning)


def check_gradient(model: VQLM, gradient: VQLM, expected: dict[str, np.ndarray], positions: int, decay: float) -> None:
    before, actual = original_names(model), original_names(gradient)
    for path, array in actual.items():
        if "quantizer" in path:  # our gradient is minus a sum of keys; the original's, the step to a moving average
            assert_close((1 - decay) * (before[path] + positions * array), expected[path], 1e-4, path)
        else:
            assert_close(array, expected[path], 1e-4, path)


@pytest.mark.parametrize(
    ("name", "changes"),
    [(name, {"form": "scan"}) for name in MODELS[:5]]
    + [(MODELS[i], {"form": "parallel"}) for i in (0, 3, 4)]
    + [("03_noagg", {"form": form, "reference": False}) for form in ("scan", "parallel")],
)
def test_first_update_equals_original(name: str, changes: dict[str, Any]) -> None:
    """Losses, gradients and the carried state."""
    original, model = load(f"model_{name}", **changes)
    settings = original.config["model"]
    chunk = slice(0, settings["update_len"])
    run = jax.jit(jax.value_and_grad(lambda model: objective(model, original, None, chunk), has_aux=True))
    (value, (state, _, learning)), gradient = run(model)
    positions = original["batch/targets"][:, chunk].size
    assert float(value) == pytest.approx(float(original["train/chunk0/l_lm_unscaled"]), rel=1e-5)
    commit = float(learning.error) / positions
    assert commit == pytest.approx(float(original["train/chunk0/l_commit"]), rel=1e-5)
    total = float(value) + settings["c_beta"] * commit
    assert total == pytest.approx(float(original["train/chunk0/loss_total"]), rel=1e-5)
    assert float(learning.surrogate) == float(original["train/chunk0/l_codebook"]) == 0.0
    check_gradient(model, gradient, original.under("train/chunk0/grads/"), positions, settings["c_gamma"])
    check_state(state, original.under("train/chunk0/state_after/"), model.config)


def check_state(state: VQState, expected: dict[str, np.ndarray], config: Config, tolerance: float = 1e-5) -> None:
    for i in range(config.n_layers):
        for j in range(2):
            at = f"layer{i}/attn{j + 1}"
            cache = jax.tree.map(lambda a, i=i: np.asarray(a[:, i]), state.caches[j])
            np.testing.assert_array_equal(np.asarray(state.position), expected[f"{at}/pos_offset"])
            np.testing.assert_array_equal(np.asarray(state.documents), expected[f"{at}/xlcache/doc_ids"])
            np.testing.assert_array_equal(np.asarray(state.latest), expected[f"{at}/aggcache/latest_doc_id"])
            np.testing.assert_array_equal(cache.codes, expected[f"{at}/xlcache/z"])
            assert_close(cache.keys, expected[f"{at}/xlcache/k_hat"], tolerance)
            assert_close(cache.values, expected[f"{at}/xlcache/v"], tolerance)
            if config.spec.collect:
                assert_close(cache.counts, expected[f"{at}/aggcache/lower"], tolerance)
                assert_close(cache.means, expected[f"{at}/aggcache/upper_div_lower"], tolerance)
            else:  # the original updates counts and means that are never read; here only with `reference`
                assert not cache.counts.any()
                assert not cache.means.any()


def test_all_settings_of_the_original_are_required() -> None:
    settings = golden("model_03_noagg").config["model"]
    assert files.original_config({**settings, "agg_cache": "0"}).aggregate is False
    misspelt = {name.replace("mem_len", "mem_length"): value for name, value in settings.items()}
    for wrong, message in (
        (misspelt, r"missing settings.*: mem_len \(did you mean 'mem_length'"),
        ({**settings, "agg_cache": "no"}, "0 or 1"),
    ):
        with pytest.raises(InputError, match=message):
            files.original_config(wrong)


def test_commitment_gradient_equals_original() -> None:
    original, model = load("model_01_base")
    chunk = slice(0, original.config["model"]["update_len"])

    def commit(model: VQLM) -> jax.Array:
        _, (_, _, learning) = objective(model, original, None, chunk)
        return learning.error / original["batch/targets"][:, chunk].size

    actual = original_names(jax.jit(jax.grad(commit))(model))
    expected = original.under("train/chunk0/grads_of_l_commit_only/")
    assert expected
    for path, array in expected.items():
        assert_close(actual[path], array, 1e-4, path)


def test_dropout_equals_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients with the original's dropout masks, in the order in which the model draws them."""
    original, model = load("dropout", scan=False)
    settings, c = original.config["model"], model.config
    blocks, rows = c.block, len(original["batch/inputs"])
    masks = [("dropemb", original["masks/dropemb"])]
    for i in range(c.n_layers):
        for j in (1, 2):
            at = f"masks/layer{i}/attn{j}"
            # The original's table has a block of distances more, but only distances up to the window are used.
            masks.append(("dropsin", original[f"{at}/dropsin"][blocks - 1 :]))
            residual = original[f"{at}/dropres"].swapaxes(0, 1).reshape(rows, -1, c.d_model)
            masks += [("dropres", residual), ("droplyr", original[f"{at}/droplyr"])]
    remaining = iter(masks)
    rates = {"dropemb": "p_dropemb", "dropsin": "p_dropsin", "dropres": "p_dropres", "droplyr": "p_droplyr"}

    def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
        name, mask = next(remaining)
        assert key is not None
        assert rate == settings[rates[name]] > 0
        assert mask.shape == x.shape, name
        return jnp.where(mask, x / (1 - rate), 0.0)

    def keep(key: jax.Array, index: jax.Array, rate: float) -> jax.Array:
        name, mask = next(remaining)
        assert (name, rate, mask.shape) == ("droplyr", settings["p_droplyr"], index.shape)
        return jnp.asarray(mask)

    monkeypatch.setattr(vq_lm, "dropout", drop)
    monkeypatch.setattr(vq_unit, "dropout", drop)
    monkeypatch.setattr(vq_unit, "keep_mask", keep)
    monkeypatch.setattr(jax, "checkpoint", lambda body, **_: body)  # it would trace only one layer
    noise = DropoutKeys(jax.random.key(0), jax.random.key(1))
    run = jax.jit(jax.value_and_grad(lambda model: objective(model, original, None, slice(None), noise), has_aux=True))
    (value, (_, _, learning)), gradient = run(model)
    assert next(remaining, None) is None
    positions = original["batch/targets"].size
    assert float(value) == pytest.approx(float(original["train/l_lm_unscaled"]), rel=1e-5)
    assert float(learning.error) / positions == pytest.approx(float(original["train/l_commit"]), rel=1e-5)
    check_gradient(model, gradient, original.under("train/grads/"), positions, settings["c_gamma"])


def test_bf16_is_as_close_to_original_as_original_to_f32() -> None:
    """In bfloat16, with `reference`, we differ from the original by less than its bfloat16 from its float32."""
    original, model = load("bf16_forward")
    base = golden("model_01_base")
    hidden, state, _ = jax.jit(lambda model, ids, documents: model(ids, documents=documents))(
        model, base["batch/inputs"], base["batch/doc_ids"]
    )
    logprobs = np.asarray(jax.nn.log_softmax(model.output(hidden)))
    rounding = np.abs(original["eval/logprobs"] - base["eval/logprobs"]).mean()
    assert np.abs(logprobs - original["eval/logprobs"]).mean() < rounding
    for j in range(2):
        for i in range(2):
            counts = original[f"eval/state_after/layer{i}/attn{j + 1}/aggcache/lower"]
            assert np.abs(np.asarray(state.caches[j].counts[:, i]) - counts).sum() <= 0.1 * counts.sum()


@pytest.mark.parametrize("case", [0, 1, 2])
def test_quantiser_equals_original(case: int) -> None:
    original = golden("quantizer")
    at, decay = original.under(f"case{case}/"), original.config["c_gamma"]
    parts = original.config["n_device"] * original.config["n_block_per_update"]
    book = codebook.Codebook(*at["c_sum"].shape)
    book = map_leaves(lambda path, _: jnp.asarray(at[f"c_{path}"]), book)
    k, weights = jnp.asarray(at["vecs"]), jnp.asarray(at["loss_mask"], jnp.float32)
    np.testing.assert_allclose(book.vectors(), at["codebook"], rtol=1e-6)
    z, chosen = book.nearest(k)
    np.testing.assert_array_equal(z, at["z"])
    np.testing.assert_allclose(chosen, at["codewords"], rtol=1e-6)
    np.testing.assert_allclose(jnp.square(k - chosen).sum(-1), at["errs2"], rtol=1e-4, atol=1e-4)

    def error(k: jax.Array) -> jax.Array:
        return codebook.error(k, book.nearest(k)[1], weights) / weights.size

    commit, gradient = jax.value_and_grad(error)(k)
    assert float(commit) == pytest.approx(float(at["l_commit"]), rel=1e-5)
    assert_close(gradient, at["grad_l_commit_vecs"], 1e-5)
    gradients = jax.grad(lambda book: book.surrogate(k, z, weights))(book)
    for path in ("sum", "count"):
        old, statistic = at[f"c_{path}"], np.asarray(getattr(gradients, path)[...])
        updated = decay * old - (1 - decay) * parts * statistic
        np.testing.assert_allclose(updated, at[f"c_{path}_target"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose((1 - decay) * (old + parts * statistic), at[f"grad_c_{path}"], rtol=1e-4, atol=1e-5)
    metrics = codebook.statistics(book.sum[...], book.count[...]) | codebook.fitness(k, chosen)
    expected = {name.removeprefix("metrics/"): a for name, a in at.items() if name.startswith("metrics/")}
    assert case == 2 or set(metrics) == set(expected)  # the last case has no metrics
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), name


def test_unit_block_by_block_equals_original() -> None:
    """All intermediate results of one unit, over six blocks with carried state, and gradients through two blocks."""
    original = golden("gau_detail")
    config = files.original_config(original.config["model"])
    unit = vq_unit.Unit(config)
    unit = map_leaves(lambda path, _: jnp.asarray(original[f"params/{files.UNIT[path]}"]), unit)
    c, x = config, jnp.asarray(original["x"])
    scale = c.d_k**-0.25
    assert_close(unit.table()[:, 0], original["xl_r"][:, c.block - 1 :], 1e-5)
    assert_close(scale * unit.content[...], original["xl_u"].reshape(-1), 1e-6)
    assert_close(scale * unit.distance[...], original["xl_v"].reshape(-1), 1e-6)
    rows = x.shape[1]
    state = vq_lm.initial_state(c, rows)
    documents, latest = state.documents, state.latest
    start = cache = jax.tree.map(lambda a: a[:, 0], state.caches[0])

    def step(x: jax.Array, documents: jax.Array, latest: jax.Array, cache: VQCache, n: int) -> tuple:
        # The original numbers documents from 0, which means padding here.
        documents = jnp.concatenate([documents, 1 + original["doc_ids"][n]], 1)
        plan = BlockwisePass(c.spec, documents, latest, jnp.asarray(original["loss_mask"][n], jnp.float32))
        y, cache, learning = unit(x, plan, cache)
        return y - x, (documents[:, -c.window :], documents[:, -c.window - 1]), cache, learning

    for n in range(len(x)):
        at = original.under(f"block{n}/")
        assert_close(unit.norm(x[n], jnp.float32), at["x_tilde"], 1e-5)
        q, k, v, gate = unit.project(x[n])
        z, chosen = unit.codebook.nearest(k)
        for name, actual in (("q", q[:, :, 0]), ("k", k), ("v", v), ("g", gate), ("k_hat", chosen)):
            assert_close(actual, at[name], 1e-5, name)
        np.testing.assert_array_equal(z, at["z"])
        y, (documents, latest), cache, learning = step(x[n], documents, latest, cache, n)
        assert_close(y, at["res"], 2e-5)
        assert_close(learning.error / original["loss_mask"][n].size, at["l_commit"], 1e-5)
        assert float(learning.surrogate) == float(at["l_codebook"]) == 0.0
        assert_close(cache.counts, at["state_after/aggcache/lower"], 1e-6)
        assert_close(cache.means, at["state_after/aggcache/upper_div_lower"], 1e-5)
        np.testing.assert_array_equal(cache.codes, at["state_after/xlcache/z"])
        from_zero = [np.maximum(np.asarray(a) - 1, 0) for a in (documents, latest)]
        np.testing.assert_array_equal(from_zero[0], at["state_after/xlcache/doc_ids"])
        np.testing.assert_array_equal(from_zero[1], at["state_after/aggcache/latest_doc_id"])

    cotangents = original.under("grad/")
    cotangent = cotangents["cotangent"].swapaxes(0, 1).reshape(rows, -1, c.d_model)
    both = jnp.asarray(original["x"][:2]).swapaxes(0, 1).reshape(rows, -1, c.d_model)
    for through in (0, 1):
        spec = c.spec._replace(through=bool(through))
        documents = 1 + original["doc_ids"][:2].swapaxes(0, 1).reshape(rows, -1)
        plan = BlockwisePass(spec, jnp.concatenate([state.documents, documents], 1), state.latest)

        def output_dot_cotangent(unit: vq_unit.Unit, x: jax.Array, plan: BlockwisePass = plan) -> jax.Array:
            return jnp.vdot(unit(x, plan, start)[0] - x, cotangent)

        by_unit, by_x = jax.jit(jax.grad(output_dot_cotangent, argnums=(0, 1)))(unit, both)
        expected = original.under(f"grad/gtc{through}/")
        assert_close(by_x.reshape(rows, 2, -1, c.d_model).swapaxes(0, 1), expected["x"], 1e-4)
        actual = {files.UNIT[path]: leaf for path, leaf in leaves(by_unit).items()}
        for path, array in expected.items():
            if path.startswith("params/") and "quantizer" not in path:
                assert_close(actual[path.removeprefix("params/")], array, 1e-4, path)


def test_sinusoids_log_count_bias_norms_and_masks_equal_original() -> None:
    original = golden("positions_masks_norms")
    for i, case in enumerate(original.config["sinusoid"]):
        positions = case["start"] + np.arange(case["length"])
        positions = positions[::-1] if case["flip"] else positions
        actual = sinusoids(jnp.asarray(positions.copy()), case["width"], float(case["lam"]))
        np.testing.assert_allclose(actual, original[f"sinusoid/{i}"], atol=2e-6)
    counts = original["agg_bias/lower"]
    log_counts = np.where(counts > 0, np.log(np.maximum(counts, 1)), NEVER)
    np.testing.assert_allclose(log_counts, original["agg_bias/out"], rtol=1e-6)
    x = jnp.asarray(original["norm/x"])
    for i, case in enumerate(original.config["norm"]):
        y = x - x.mean(-1, keepdims=True) if case["center"] else x
        y = unit_rms(y, 1e-6) if case["norm"] else y
        y = y * original.arrays.get(f"norm/{i}/g", 1.0) + original.arrays.get(f"norm/{i}/b", 0.0)
        np.testing.assert_allclose(y, original[f"norm/{i}/out"], atol=1e-5)
    for i, case in enumerate(original.config["mask"]):
        window, block = case["mem_len"], case["block_len"]
        spec = VQSpec(window, block, aggregate=not case["with_locality"])
        documents = (np.arange(window + block) >= case["invalid_len"]).astype(np.int32)
        bias = vq_block.skew(spec, jnp.zeros((1, block, window + 1))) + vq_block.hidden_keys(
            spec, jnp.asarray(documents)
        )
        np.testing.assert_array_equal(bias == 0, original[f"mask/{i}"] > 0)


def test_skew_equals_relative_shift_of_original() -> None:
    """Within the window a skewed row equals the original's shifted row, and `unskew` reverses `skew`."""
    original = golden("positions_masks_norms")
    n = 0
    while f"rel_shift/{n}/in" in original.arrays:
        x, y = original[f"rel_shift/{n}/in"], original[f"rel_shift/{n}/out"]
        block, size = x.shape[2:]
        window = size - block
        if window:
            skewed = vq_block.skew(VQSpec(window, block), jnp.asarray(x[0, 0][None, :, block - 1 :]))
            i, j = np.arange(block)[:, None], np.arange(size)
            far, future = j < i, j > i + window
            expected = np.where(far, 0.0, np.where(future, np.float32(NEVER), y[0, 0]))
            np.testing.assert_array_equal(skewed, expected)
            unskewed = vq_block.unskew(VQSpec(window, block), skewed)
            np.testing.assert_array_equal(unskewed[0], x[0, 0][:, block - 1 :])
        n += 1
    assert n == 5


def test_initial_weights_are_distributed_as_original() -> None:
    """Shape, mean and standard deviation of every initial weight."""
    original = golden("init_stats")
    settings = original.config["model"]
    weights: dict[str, np.ndarray] = {}
    for changes in ({}, {"e_tie": 1 - settings["e_tie"]}):
        config = files.original_config({**settings, **changes})
        weights |= original_names(initialise(VQLM(config), 0))
    names = {key.rsplit("/", 1)[0] for key in original.arrays}
    for name in names:
        at, weight = original.under(f"{name}/"), weights[name]
        assert weight.shape == tuple(at["shape"]), name  # () for a scalar
        error = 5 * max(float(at["std"]), 1e-9) / np.sqrt(weight.size)
        assert weight.mean() == pytest.approx(float(at["mean"]), abs=2 * error), name
        assert weight.std() == pytest.approx(float(at["std"]), abs=2 * error), name
