"""Transformer-VQ training against the original's: optimizers, schedules, and a sequence of updates."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vq_goldens import MODELS, Golden, golden

from flaxen.data.stream_store import ByteStream, Splits
from flaxen.data.tokenizers import ByteTokenizer
from flaxen.hf import vq as files
from flaxen.hf.weightmap import save
from flaxen.models import vq_language
from flaxen.models.vq_lm import VQLM
from flaxen.tasks.language import Language
from flaxen.tasks.objective import LanguageObjective
from flaxen.tasks.task import Batch
from flaxen.train import optim
from flaxen.train.settings import Optimizer, Schedule, Training
from flaxen.train.step import Stepper
from flaxen.tree import leaves, map_leaves

DECAY = 0.9
# The original's names of a small parameter tree, and paths for which our optimizer has the same rules.
TOY = {
    "w": "w", "big": "big", "b": "layer.bias", "scale": "scale", "t3": "t3",
    "quantizer/c_sum": "codebook.sum", "quantizer/c_count": "codebook.count",
}  # fmt: skip


def optimizer(settings: dict[str, Any], decay: float = DECAY) -> Optimizer:
    """Our optimizer settings for the original's."""
    moments = {"adamw": {"b2": 0.98, "eps": 1e-9}, "lion": {"b1": 0.95, "b2": 0.98}, "adafactor": {}}
    name = settings["optimizer"]
    return Optimizer(
        name, settings["lr_max"], settings["wd_lam"], clip=settings["grad_clip"] or 0.0, codebook=decay, reference=True,
        **moments[name],
    )  # fmt: skip


def schedule(settings: dict[str, Any]) -> Schedule:
    """Our schedule settings for the original's."""
    names = {"cosine": "cosine", "linear": "linear", "inv_sqrt": "inverse-sqrt"}
    name, warmup = names[settings["lr_schedule"]], settings["n_warmup_step"]
    return Schedule(name, warmup, 0.1, steps=settings["n_max_step"], reference=True)  # type: ignore[arg-type]


def tree(original: Golden, prefix: str) -> dict[str, Any]:
    """The arrays under `prefix` as a nested tree with our names."""
    nested: dict[str, Any] = {}
    for name, array in original.under(prefix).items():
        *path, last = TOY[name].split(".")
        branch = nested
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = jnp.asarray(array)
    return nested


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor"])
def test_optimizer_steps_equal_original(name: str) -> None:
    """Four updates of all kinds of leaves, each starting from the original's parameters."""
    original = golden(f"optim_{name}")
    settings = original.config["optim"]
    rate = optim.learning_rate(schedule(settings), settings["lr_max"], settings["n_max_step"])
    transform = optim.make_optimizer(optimizer(settings), rate)
    params = tree(original, "params0/")
    state = jax.jit(transform.init)(params)
    step = transform.update  # not compiled: XLA would skip rounding lion's momentum to bfloat16
    for t in range(4):
        assert float(rate(jnp.asarray(t))) / settings["lr_max"] == pytest.approx(
            float(original["lr_mult"][t]), rel=1e-6
        )
        old = leaves(params)
        # The original's codebook gradient is c - (decay · c + (1 - decay) · new); ours is -new.
        gradient = map_leaves(
            lambda path, g, old=old: g / (1 - DECAY) - old[path] if "codebook" in path else g,
            tree(original, f"grads{t}/"),
        )
        changes, state = step(gradient, state, params)
        params = jax.tree.map(jnp.add, params, changes)
        for path, expected in leaves(tree(original, f"params{t + 1}/")).items():
            differs = np.abs(np.asarray(leaves(params)[path]) - expected) > 2e-7 + 2e-6 * np.abs(expected)
            assert not differs.any(), f"{t}: {path}"
        params = tree(original, f"params{t + 1}/")


def test_schedules_equal_original() -> None:
    original = golden("lr_schedules")
    checked = 0
    for i, case in enumerate(original.config["cases"]):
        steps = range(100) if case["steps"] == "0..99" else case["steps"]
        rate = jax.jit(jax.vmap(optim.learning_rate(schedule(case), 1.0, case["n_max_step"])))
        actual, expected = np.asarray(rate(jnp.asarray(list(steps)))), original[str(i)]
        # The original's inverse-sqrt divides by nearly 0 towards the end; so does ours, but with another rounding.
        stable = expected < 5
        np.testing.assert_allclose(actual[stable], expected[stable], rtol=1e-5, atol=1e-6, err_msg=str(case))
        np.testing.assert_array_equal(np.isinf(actual), np.isinf(expected))
        checked += int(stable.sum())
    assert checked > 700


class FromGolden(Language):
    """A task with the original's batches."""

    def __init__(self, original: Golden, model: VQLM):
        settings = original.config["model"]
        objective = LanguageObjective(
            settings["sequence_len"], settings["update_len"], settings["c_beta"], normalise="positions"
        )
        stream = ByteStream(np.zeros(settings["sequence_len"], np.uint8), 0, settings["sequence_len"])
        data = Splits({"train": stream, "validation": stream}, ())
        super().__init__(vq_language, model.config, objective, ByteTokenizer.plain(), data, 0)
        self.original = original

    def batch(self, step: int, size: int, rows: slice = slice(None)) -> Batch:
        n = self.objective.chunk
        part = slice(step * n, (step + 1) * n)
        inputs, targets, mask = (self.original[f"batch/{name}"][:, part] for name in ("inputs", "targets", "loss_mask"))
        return {"inputs": inputs, "labels": np.where(mask, targets, -1), "fresh": np.full(len(inputs), step == 0)}


@pytest.mark.parametrize(("name", "accumulate"), [*((name, 1) for name in MODELS), ("02_heads4", 2)])
def test_sequence_of_updates_equals_original(name: str, accumulate: int) -> None:
    """One update per chunk, with carried state: compare parameters after the first update and after the last."""
    original = golden(f"model_{name}")
    settings, optimisation = original.config["model"], original.config["optim"]
    model = files.load_original(original.under("params/"), settings).model
    task = FromGolden(original, model)
    training = Training(steps=50, batch_size=2, accumulate=accumulate)
    stepper = Stepper(task, optimizer(optimisation, settings["c_gamma"]), schedule(optimisation), training)
    state = stepper.init_state(model)
    rows = files.original_rows(model.config)
    for step in range(settings["sequence_len"] // settings["update_len"]):
        batch = task.batch(step, 2)
        state, report = stepper.update(state, jax.device_put(batch))
        # Gradients are those of a mean over positions, as in the original; the report has sums over labels.
        assert float(report.sums.loss) / batch["labels"].size == pytest.approx(
            float(original[f"train/chunk{step}/l_lm_unscaled"]), rel=1e-4
        )
        assert float(report.sums.weight) == (batch["labels"] >= 0).sum()
        if step == 0:
            assert float(report.norm) == pytest.approx(float(original["train/chunk0/main_grad_global_norm"]), rel=1e-4)
            assert_close(
                save(state.model, rows), original.under("train/chunk0/params_after/"), optimisation["lr_max"], 1
            )
    assert_close(save(state.model, rows), original.under("train/params_final/"), optimisation["lr_max"], step + 1)


def assert_close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], rate: float, steps: int) -> None:
    """Compare parameters, up to a few entries: Adam moves an entry whose gradient is only rounding error by the whole
    learning rate, in either direction."""
    differing = total = 0
    for path, array in actual.items():
        gap = np.abs(array - expected[path])
        assert gap.max() <= 2.1 * rate * steps, path
        differing, total = differing + int((gap > 2e-5 + 1e-4 * np.abs(expected[path])).sum()), total + gap.size
    assert differing <= 0.001 * total


def test_dead_codes_are_revived() -> None:
    """With `restart`, each code with a small count becomes a copy of one of the most used codes."""
    draw = np.random.default_rng(0)
    counts = jnp.asarray(np.array([[5.0, 0.001, 40.0, 0.002, 9.0, 0.003]]), jnp.float32)
    sums = jnp.asarray(draw.standard_normal((1, 6, 4)), jnp.float32) * counts[..., None]
    params = {"codebook": {"sum": sums, "count": counts}}
    zero = jax.tree.map(jnp.zeros_like, params)
    for restart in (0.0, 0.1):
        transform = optim.exponential_moving_averages(0.99, restart)
        changes, _ = transform.update(zero, transform.init(params), params)
        after = jax.tree.map(jnp.add, params, changes)["codebook"]
        assert float(after["count"].sum()) == pytest.approx(0.99 * float(counts.sum()), rel=1e-3)
        assert bool((after["count"] < 0.1).any()) == (restart == 0.0)
        if restart:
            means = np.asarray(after["sum"] / after["count"][..., None])[0]
            old = np.asarray(sums / counts[..., None])[0]
            for dead, donor in ((1, 2), (3, 4), (5, 0)):
                np.testing.assert_allclose(means[dead], old[donor], rtol=0.06)
