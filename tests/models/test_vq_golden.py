"""Transformer-VQ against the original's numbers: forward, losses, gradients, carried state, whole training."""

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
    there = golden(name)
    parameters = there.under("params/") or golden("model_01_base").under("params/")
    model = files.load_original(parameters, there.config["model"]).model
    config = dataclasses.replace(model.config, **changes)
    return there, jax.tree.unflatten(jax.tree.structure(VQLM(config)), jax.tree.leaves(model))


def theirs(model: VQLM) -> dict[str, np.ndarray]:
    """A tree of our model, or of its gradients, in the original's names."""
    return save(model, files.original_rows(model.config))


def close(ours: Any, wanted: np.ndarray, relative: float, what: str = "") -> None:
    """Within `relative` of the largest entry."""
    scale = max(float(np.abs(wanted).max()), 1e-6)
    np.testing.assert_allclose(np.asarray(ours), wanted, atol=relative * scale, rtol=0, err_msg=what)


@pytest.mark.parametrize("name", MODELS)
def test_forward(name: str) -> None:
    there, model = load(f"model_{name}")
    run = jax.jit(lambda model, ids, documents: model(ids, documents=documents)[0])
    hidden = run(model, there["batch/inputs"], there["batch/doc_ids"])
    logits = np.asarray(model.output(hidden))
    np.testing.assert_allclose(logits, there["eval/logits"], atol=2e-5, rtol=0)
    np.testing.assert_allclose(jax.nn.log_softmax(logits), there["eval/logprobs"], atol=2e-5, rtol=0)
    labels = np.where(there["batch/loss_mask"], there["batch/targets"], -1)
    sums, _, _ = jax.jit(VQLM.loss)(model, there["batch/inputs"], labels)
    assert float(sums.loss / sums.weight) == pytest.approx(float(there["eval/loss_lm_per_token"]), rel=1e-5)


@pytest.mark.parametrize("name", MODELS[:5])
def test_codes_and_layers(name: str) -> None:
    """Codes are identical; each layer's output is the original's; so are the metrics of codebooks, taken in every block
    of the first update and averaged over blocks, units and layers."""
    there, model = load(f"model_{name}", scan=False)
    c, ids = model.config, jnp.asarray(there["batch/inputs"])
    state = vq_lm.initial_state(c, len(ids))
    documents = jnp.asarray(there["batch/doc_ids"])
    x = model.embed(ids, vq_lm.token_positions(c, state, documents))
    close(x, there["eval/x_emb"], 1e-5)
    plan = BlockwisePass(c.spec, jnp.concatenate([state.documents, documents], 1), state.latest)
    measured: list[dict[str, jax.Array]] = []
    for i, layer in enumerate(vq_lm.unstack(model.layers)):
        for j, unit in enumerate((layer.first, layer.second)):
            k = unit.project(x)[1]
            z, chosen = unit.codebook.nearest(k)
            np.testing.assert_array_equal(z, there[f"eval/shortcodes/layer{i}/attn{j + 1}"])
            looks = codebook.statistics(unit.codebook.sum[...], unit.codebook.count[...])
            for first in range(0, there.config["model"]["update_len"], c.block):
                block = (slice(None), slice(None), slice(first, first + c.block))
                measured.append(looks | codebook.fitness(k[block], chosen[block]))
            x, _, _ = jax.jit(lambda unit, x, cache: unit(x, plan, cache))(
                unit, x, jax.tree.map(lambda a, i=i: a[:, i], state.caches[j])
            )
        close(x, there[f"eval/layer{i}/x_out"], 1e-5)
    for name, expected in there.under("train/chunk0/metrics/").items():
        if not name.startswith("loss"):
            assert np.mean([one[name] for one in measured]) == pytest.approx(float(expected), rel=1e-4, abs=1e-5), name


def objective(model: VQLM, there: Golden, state: VQState | None, chunk: slice, noise: DropoutKeys | None = None) -> Any:
    """The original's: a mean over all positions, with its commitment."""
    labels = jnp.where(there["batch/loss_mask"][:, chunk] > 0, there["batch/targets"][:, chunk], -1)
    ids, documents = (jnp.asarray(there[f"batch/{name}"][:, chunk]) for name in ("inputs", "doc_ids"))
    sums, state, learning = model.loss(
        ids, labels, state, commit=there.config["model"]["c_beta"], noise=noise, documents=documents, learn=True
    )
    return sums.loss / labels.size, (state, sums, learning)


def checked_gradient(model: VQLM, gradient: VQLM, wanted: dict[str, np.ndarray], positions: int, decay: float) -> None:
    before, found = theirs(model), theirs(gradient)
    for path, array in found.items():
        if "quantizer" in path:  # ours is minus a sum of keys; theirs, the step to a running mean
            close((1 - decay) * (before[path] + positions * array), wanted[path], 1e-4, path)
        else:
            close(array, wanted[path], 1e-4, path)


@pytest.mark.parametrize(
    ("name", "changes"),
    [(name, {"form": "scan"}) for name in MODELS[:5]]
    + [(MODELS[i], {"form": "parallel"}) for i in (0, 3, 4)]
    + [("03_noagg", {"form": form, "reference": False}) for form in ("scan", "parallel")],
)
def test_first_chunk(name: str, changes: dict[str, Any]) -> None:
    """Losses, gradients and the state carried on."""
    there, model = load(f"model_{name}", **changes)
    settings = there.config["model"]
    chunk = slice(0, settings["update_len"])
    run = jax.jit(jax.value_and_grad(lambda model: objective(model, there, None, chunk), has_aux=True))
    (value, (state, _, learning)), gradient = run(model)
    positions = there["batch/targets"][:, chunk].size
    assert float(value) == pytest.approx(float(there["train/chunk0/l_lm_unscaled"]), rel=1e-5)
    commit = float(learning.error) / positions
    assert commit == pytest.approx(float(there["train/chunk0/l_commit"]), rel=1e-5)
    total = float(value) + settings["c_beta"] * commit
    assert total == pytest.approx(float(there["train/chunk0/loss_total"]), rel=1e-5)
    assert float(learning.surrogate) == float(there["train/chunk0/l_codebook"]) == 0.0
    checked_gradient(model, gradient, there.under("train/chunk0/grads/"), positions, settings["c_gamma"])
    checked_state(state, there.under("train/chunk0/state_after/"), model.config)


def checked_state(state: VQState, wanted: dict[str, np.ndarray], config: Config, tolerance: float = 1e-5) -> None:
    for i in range(config.n_layers):
        for j in range(2):
            at = f"layer{i}/attn{j + 1}"
            cache = jax.tree.map(lambda a, i=i: np.asarray(a[:, i]), state.caches[j])
            np.testing.assert_array_equal(np.asarray(state.position), wanted[f"{at}/pos_offset"])
            np.testing.assert_array_equal(np.asarray(state.documents), wanted[f"{at}/xlcache/doc_ids"])
            np.testing.assert_array_equal(np.asarray(state.latest), wanted[f"{at}/aggcache/latest_doc_id"])
            np.testing.assert_array_equal(cache.codes, wanted[f"{at}/xlcache/z"])
            close(cache.keys, wanted[f"{at}/xlcache/k_hat"], tolerance)
            close(cache.values, wanted[f"{at}/xlcache/v"], tolerance)
            if config.spec.collect:
                close(cache.counts, wanted[f"{at}/aggcache/lower"], tolerance)
                close(cache.means, wanted[f"{at}/aggcache/upper_div_lower"], tolerance)
            else:  # the original keeps what it then does not read; here that work is saved, unless `reference`
                assert not cache.counts.any()
                assert not cache.means.any()


def test_settings_of_the_original_are_all_said() -> None:
    settings = golden("model_03_noagg").config["model"]
    assert files.original_config({**settings, "agg_cache": "0"}).aggregate is False
    misspelt = {name.replace("mem_len", "mem_length"): value for name, value in settings.items()}
    for wrong, message in ((misspelt, r"lack mem_len.*'mem_length'"), ({**settings, "agg_cache": "no"}, "0 or 1")):
        with pytest.raises(InputError, match=message):
            files.original_config(wrong)


def test_commitment_alone() -> None:
    there, model = load("model_01_base")
    chunk = slice(0, there.config["model"]["update_len"])

    def commit(model: VQLM) -> jax.Array:
        _, (_, _, learning) = objective(model, there, None, chunk)
        return learning.error / there["batch/targets"][:, chunk].size

    found = theirs(jax.jit(jax.grad(commit))(model))
    wanted = there.under("train/chunk0/grads_of_l_commit_only/")
    assert wanted
    for path, array in wanted.items():
        close(found[path], array, 1e-4, path)


def test_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the original's masks in place of ours, in the order that the model asks for them."""
    there, model = load("dropout", scan=False)
    settings, c = there.config["model"], model.config
    blocks, rows = c.block, len(there["batch/inputs"])
    masks = [("dropemb", there["masks/dropemb"])]
    for i in range(c.n_layers):
        for j in (1, 2):
            at = f"masks/layer{i}/attn{j}"
            # Only distances up to the window are ever used; the original's table has a block of them more.
            masks.append(("dropsin", there[f"{at}/dropsin"][blocks - 1 :]))
            residual = there[f"{at}/dropres"].swapaxes(0, 1).reshape(rows, -1, c.d_model)
            masks += [("dropres", residual), ("droplyr", there[f"{at}/droplyr"])]
    left = iter(masks)
    rates = {"dropemb": "p_dropemb", "dropsin": "p_dropsin", "dropres": "p_dropres", "droplyr": "p_droplyr"}

    def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
        name, mask = next(left)
        assert key is not None
        assert rate == settings[rates[name]] > 0
        assert mask.shape == x.shape, name
        return jnp.where(mask, x / (1 - rate), 0.0)

    def keep(key: jax.Array, index: jax.Array, rate: float) -> jax.Array:
        name, mask = next(left)
        assert (name, rate, mask.shape) == ("droplyr", settings["p_droplyr"], index.shape)
        return jnp.asarray(mask)

    monkeypatch.setattr(vq_lm, "dropout", drop)
    monkeypatch.setattr(vq_unit, "dropout", drop)
    monkeypatch.setattr(vq_unit, "keep_mask", keep)
    monkeypatch.setattr(jax, "checkpoint", lambda body, **_: body)  # which would trace one layer for all
    noise = DropoutKeys(jax.random.key(0), jax.random.key(1))
    run = jax.jit(jax.value_and_grad(lambda model: objective(model, there, None, slice(None), noise), has_aux=True))
    (value, (_, _, learning)), gradient = run(model)
    assert next(left, None) is None
    positions = there["batch/targets"].size
    assert float(value) == pytest.approx(float(there["train/l_lm_unscaled"]), rel=1e-5)
    assert float(learning.error) / positions == pytest.approx(float(there["train/l_commit"]), rel=1e-5)
    checked_gradient(model, gradient, there.under("train/grads/"), positions, settings["c_gamma"])


def test_bf16() -> None:
    """In bfloat16, with the original's roundings, as near to it as it is to float32."""
    there, model = load("bf16_forward")
    base = golden("model_01_base")
    hidden, state, _ = jax.jit(lambda model, ids, documents: model(ids, documents=documents))(
        model, base["batch/inputs"], base["batch/doc_ids"]
    )
    logprobs = np.asarray(jax.nn.log_softmax(model.output(hidden)))
    apart = np.abs(there["eval/logprobs"] - base["eval/logprobs"]).mean()
    assert np.abs(logprobs - there["eval/logprobs"]).mean() < apart
    for j in range(2):
        for i in range(2):
            counts = there[f"eval/state_after/layer{i}/attn{j + 1}/aggcache/lower"]
            assert np.abs(np.asarray(state.caches[j].counts[:, i]) - counts).sum() <= 0.1 * counts.sum()


@pytest.mark.parametrize("case", [0, 1, 2])
def test_quantiser(case: int) -> None:
    there = golden("quantizer")
    at, decay = there.under(f"case{case}/"), there.config["c_gamma"]
    shares = there.config["n_device"] * there.config["n_block_per_update"]
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
    close(gradient, at["grad_l_commit_vecs"], 1e-5)
    learnt = jax.grad(lambda book: book.surrogate(k, z, weights))(book)
    for path in ("sum", "count"):
        old, statistic = at[f"c_{path}"], np.asarray(getattr(learnt, path)[...])
        moved = decay * old - (1 - decay) * shares * statistic
        np.testing.assert_allclose(moved, at[f"c_{path}_target"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose((1 - decay) * (old + shares * statistic), at[f"grad_c_{path}"], rtol=1e-4, atol=1e-5)
    found = codebook.statistics(book.sum[...], book.count[...]) | codebook.fitness(k, chosen)
    wanted = {name.removeprefix("metrics/"): a for name, a in at.items() if name.startswith("metrics/")}
    assert case == 2 or set(found) == set(wanted)  # the last case has none
    for name, value in wanted.items():
        assert float(found[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), name


def test_one_unit_block_by_block() -> None:
    """Every number inside one unit, over six blocks that hand on their state; gradients through two."""
    there = golden("gau_detail")
    config = files.original_config(there.config["model"])
    unit = vq_unit.Unit(config)
    unit = map_leaves(lambda path, _: jnp.asarray(there[f"params/{files.UNIT[path]}"]), unit)
    c, x = config, jnp.asarray(there["x"])
    scale = c.d_k**-0.25
    close(unit.table()[:, 0], there["xl_r"][:, c.block - 1 :], 1e-5)
    close(scale * unit.content[...], there["xl_u"].reshape(-1), 1e-6)
    close(scale * unit.distance[...], there["xl_v"].reshape(-1), 1e-6)
    rows = x.shape[1]
    state = vq_lm.initial_state(c, rows)
    documents, latest = state.documents, state.latest
    start = cache = jax.tree.map(lambda a: a[:, 0], state.caches[0])

    def step(x: jax.Array, documents: jax.Array, latest: jax.Array, cache: VQCache, n: int) -> tuple:
        # The original numbers documents from 0, which is padding here.
        seen = jnp.concatenate([documents, 1 + there["doc_ids"][n]], 1)
        plan = BlockwisePass(c.spec, seen, latest, jnp.asarray(there["loss_mask"][n], jnp.float32))
        y, cache, learning = unit(x, plan, cache)
        return y - x, (seen[:, -c.window :], seen[:, -c.window - 1]), cache, learning

    for n in range(len(x)):
        at = there.under(f"block{n}/")
        close(unit.norm(x[n], jnp.float32), at["x_tilde"], 1e-5)
        q, k, v, gate = unit.project(x[n])
        z, chosen = unit.codebook.nearest(k)
        for name, ours in (("q", q[:, :, 0]), ("k", k), ("v", v), ("g", gate), ("k_hat", chosen)):
            close(ours, at[name], 1e-5, name)
        np.testing.assert_array_equal(z, at["z"])
        y, (documents, latest), cache, learning = step(x[n], documents, latest, cache, n)
        close(y, at["res"], 2e-5)
        close(learning.error / there["loss_mask"][n].size, at["l_commit"], 1e-5)
        assert float(learning.surrogate) == float(at["l_codebook"]) == 0.0
        close(cache.counts, at["state_after/aggcache/lower"], 1e-6)
        close(cache.means, at["state_after/aggcache/upper_div_lower"], 1e-5)
        np.testing.assert_array_equal(cache.codes, at["state_after/xlcache/z"])
        from_zero = [np.maximum(np.asarray(a) - 1, 0) for a in (documents, latest)]
        np.testing.assert_array_equal(from_zero[0], at["state_after/xlcache/doc_ids"])
        np.testing.assert_array_equal(from_zero[1], at["state_after/aggcache/latest_doc_id"])

    cotangents = there.under("grad/")
    g = cotangents["cotangent"].swapaxes(0, 1).reshape(rows, -1, c.d_model)
    both = jnp.asarray(there["x"][:2]).swapaxes(0, 1).reshape(rows, -1, c.d_model)
    for through in (0, 1):
        spec = c.spec._replace(through=bool(through))
        documents = 1 + there["doc_ids"][:2].swapaxes(0, 1).reshape(rows, -1)
        plan = BlockwisePass(spec, jnp.concatenate([state.documents, documents], 1), state.latest)

        def seen_through(unit: vq_unit.Unit, x: jax.Array, plan: BlockwisePass = plan) -> jax.Array:
            return jnp.vdot(unit(x, plan, start)[0] - x, g)

        by_unit, by_x = jax.jit(jax.grad(seen_through, argnums=(0, 1)))(unit, both)
        wanted = there.under(f"grad/gtc{through}/")
        close(by_x.reshape(rows, 2, -1, c.d_model).swapaxes(0, 1), wanted["x"], 1e-4)
        ours = {files.UNIT[path]: leaf for path, leaf in leaves(by_unit).items()}
        for path, array in wanted.items():
            if path.startswith("params/") and "quantizer" not in path:
                close(ours[path.removeprefix("params/")], array, 1e-4, path)


def test_positions_masks_norms() -> None:
    there = golden("positions_masks_norms")
    for i, case in enumerate(there.config["sinusoid"]):
        at = case["start"] + np.arange(case["length"])
        at = at[::-1] if case["flip"] else at
        found = sinusoids(jnp.asarray(at.copy()), case["width"], float(case["lam"]))
        np.testing.assert_allclose(found, there[f"sinusoid/{i}"], atol=2e-6)
    bias = there["agg_bias/lower"]
    ours = np.where(bias > 0, np.log(np.maximum(bias, 1)), NEVER)
    np.testing.assert_allclose(ours, there["agg_bias/out"], rtol=1e-6)
    x = jnp.asarray(there["norm/x"])
    for i, case in enumerate(there.config["norm"]):
        y = x - x.mean(-1, keepdims=True) if case["center"] else x
        y = unit_rms(y, 1e-6) if case["norm"] else y
        y = y * there.arrays.get(f"norm/{i}/g", 1.0) + there.arrays.get(f"norm/{i}/b", 0.0)
        np.testing.assert_allclose(y, there[f"norm/{i}/out"], atol=1e-5)
    for i, case in enumerate(there.config["mask"]):
        window, block = case["mem_len"], case["block_len"]
        spec = VQSpec(window, block, aggregate=not case["with_locality"])
        documents = (np.arange(window + block) >= case["invalid_len"]).astype(np.int32)
        bias = vq_block.skew(spec, jnp.zeros((1, block, window + 1))) + vq_block.hidden_keys(
            spec, jnp.asarray(documents)
        )
        np.testing.assert_array_equal(bias == 0, there[f"mask/{i}"] > 0)


def test_skew() -> None:
    """Where a query may look by distance, a skewed row is the original's shifted one."""
    there = golden("positions_masks_norms")
    n = 0
    while f"rel_shift/{n}/in" in there.arrays:
        x, y = there[f"rel_shift/{n}/in"], there[f"rel_shift/{n}/out"]
        w, size = x.shape[2:]
        window = size - w
        if window:
            ours = vq_block.skew(VQSpec(window, w), jnp.asarray(x[0, 0][None, :, w - 1 :]))
            i, j = np.arange(w)[:, None], np.arange(size)
            far, ahead = j < i, j > i + window
            expected = np.where(far, 0.0, np.where(ahead, np.float32(NEVER), y[0, 0]))
            np.testing.assert_array_equal(ours, expected)
            back = vq_block.unskew(VQSpec(window, w), ours)
            np.testing.assert_array_equal(back[0], x[0, 0][:, w - 1 :])
        n += 1
    assert n == 5


def test_initial_law() -> None:
    """Fresh weights are distributed as the original's: shape, mean and deviation of every one."""
    there = golden("init_stats")
    settings = there.config["model"]
    found: dict[str, np.ndarray] = {}
    for changes in ({}, {"e_tie": 1 - settings["e_tie"]}):
        config = files.original_config({**settings, **changes})
        found |= theirs(initialise(VQLM(config), 0))
    names = {key.rsplit("/", 1)[0] for key in there.arrays}
    for name in names:
        at, ours = there.under(f"{name}/"), found[name]
        assert ours.shape == tuple(at["shape"]), name  # of the scalar, ()
        error = 5 * max(float(at["std"]), 1e-9) / np.sqrt(ours.size)
        assert ours.mean() == pytest.approx(float(at["mean"]), abs=2 * error), name
        assert ours.std() == pytest.approx(float(at["std"]), abs=2 * error), name
