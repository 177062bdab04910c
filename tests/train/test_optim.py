"""Every optimizer equals torch's or optax's on the same gradients; learning-rate schedules at their key points."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from flaxen.errors import InputError
from flaxen.hf import t5, weightmap
from flaxen.models import vq_config
from flaxen.models.t5 import T5, Config
from flaxen.models.vq_lm import VQLM
from flaxen.nn.param import initialise
from flaxen.train.optim import learning_rate, make_optimizer
from flaxen.train.settings import OPTIONS, Optimizer, Schedule
from flaxen.tree import leaves, map_leaves

# Wide enough for Adafactor to factor (128), with stacked layers and head axes, encoder and decoder of unequal depth.
CONFIG = Config(vocab_size=160, d_model=144, d_head=40, d_ff=200, n_layers=3, n_decoder_layers=2, n_heads=4)
RATE = 0.03


@pytest.fixture(scope="module")
def model() -> T5:
    return initialise(T5(CONFIG), 0)


def gradients(model: T5, n: int = 3) -> list[T5]:
    """Random gradients of very different magnitudes, so that clipping and scaling matter."""
    draw = np.random.default_rng(1)

    def draw_leaf(path: str, leaf: jax.Array) -> jax.Array:
        return jnp.asarray(draw.normal(size=leaf.shape) * 10 ** draw.uniform(-4, 0), jnp.float32)

    return [map_leaves(draw_leaf, model) for _ in range(n)]


def updated(optimizer: Optimizer, model: T5, steps: list[T5]) -> dict[str, np.ndarray]:
    """The weights after the updates, in the form of a checkpoint: one matrix per tensor."""
    transform = make_optimizer(optimizer, lambda step: jnp.asarray(RATE))
    state = jax.jit(transform.init)(model)
    update, apply = jax.jit(transform.update), jax.jit(optax.apply_updates)
    for gradient in steps:
        updates, state = update(gradient, state, model)
        model = apply(model, updates)
    return tensors(model)


def tensors(model: T5) -> dict[str, np.ndarray]:
    return weightmap.save(model, t5.rows(CONFIG))


def reference(transform: optax.GradientTransformation, model: T5, steps: list[T5]) -> dict[str, np.ndarray]:
    """The weights after the same updates by optax, on the separate tensors of a checkpoint."""
    weights = {name: jnp.asarray(tensor) for name, tensor in tensors(model).items()}
    state, update, apply = jax.jit(transform.init)(weights), jax.jit(transform.update), jax.jit(optax.apply_updates)
    for gradient in steps:
        updates, state = update({k: jnp.asarray(v) for k, v in tensors(gradient).items()}, state, weights)
        weights = apply(weights, updates)
    return {name: np.asarray(leaf) for name, leaf in weights.items()}


def assert_equal(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], start: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        change = np.abs(tensor - start[name]).max()
        assert change > 0, name
        np.testing.assert_allclose(ours[name], tensor, rtol=0, atol=2e-5 * change + 1e-7, err_msg=name)


def test_adamw_equals_torch(model: T5) -> None:
    steps, decay = gradients(model), 0.1
    ours = updated(Optimizer("adamw", weight_decay=decay, clip=0.0), model, steps)
    weights = {name: torch.nn.Parameter(torch.tensor(tensor)) for name, tensor in tensors(model).items()}
    plain = [p for name, p in weights.items() if "norm" in name or "bias" in name]
    decayed = [p for name, p in weights.items() if not ("norm" in name or "bias" in name)]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": decay}]
    theirs = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    for gradient in steps:
        for name, tensor in tensors(gradient).items():
            weights[name].grad = torch.tensor(tensor)
        theirs.step()
    assert_equal(ours, {name: p.detach().numpy() for name, p in weights.items()}, tensors(model))


def test_adafactor_equals_optax_on_separate_tensors(model: T5) -> None:
    """As the old script called it. Stacking layers and splitting heads must not change the result."""
    steps = gradients(model)
    ours = updated(Optimizer("adafactor", clip=0.0), model, steps)
    assert_equal(ours, reference(optax.adafactor(RATE), model, steps), tensors(model))


def test_adafactor_state_is_factored(model: T5) -> None:
    """The state holds rows and columns, not matrices."""
    state = make_optimizer(Optimizer("adafactor"), lambda step: jnp.asarray(RATE)).init(model)
    weights = sum(leaf.size for leaf in jax.tree.leaves(model))
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) < 0.12 * weights


def test_adamw_rms_is_adamw_scaled_by_the_rms_of_each_tensor(model: T5) -> None:
    steps = gradients(model)
    chain = optax.chain(optax.scale_by_adam(), optax.scale_by_param_block_rms(), optax.scale_by_learning_rate(RATE))
    assert_equal(
        updated(Optimizer("adamw-rms", clip=0.0), model, steps), reference(chain, model, steps), tensors(model)
    )


def test_adafactor_factors_every_matrix_of_a_transformer_vq() -> None:
    """Including the output projection of a unit, whose heads are merged into one axis."""
    config = vq_config.Config(d_model=128, d_k=8, d_v=128, n_layers=2, n_codes=4, block=8, window=8)
    model = initialise(VQLM(config), 0)
    ours = make_optimizer(Optimizer("adafactor", clip=0.0), lambda step: jnp.asarray(1.0))

    def drawn(model: Any) -> Any:
        return jax.tree.map(lambda a: jax.random.normal(jax.random.key(1), a.shape), model)

    gradient = jax.jit(drawn)(model)
    updates, _ = jax.jit(ours.update)(gradient, jax.jit(ours.init)(model), model)
    chain = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms())
    for layer in range(2):
        weight, slope, change = (tree.layers.first.o.weight[...][layer] for tree in (model, gradient, updates))
        expected, state = chain.update(slope, chain.init(weight), weight)
        assert state[0].v_row.shape == (128,)
        np.testing.assert_allclose(change, -expected, rtol=1e-4, atol=1e-8)


def test_lion_equals_optax(model: T5) -> None:
    steps = gradients(model)
    theirs = reference(optax.lion(RATE, weight_decay=0.0), model, steps)
    assert_equal(updated(Optimizer("lion", clip=0.0), model, steps), theirs, tensors(model))


def test_muon_equals_optax_on_separate_matrices(model: T5) -> None:
    """optax's muon with updates as large as Adam's; weights that do not map features to features use plain Adam."""
    steps = gradients(model)
    adam = ("shared", "norm", "bias")

    def numbers(weights: Any) -> Any:
        return {
            name: None if any(part in name for part in adam) else optax.contrib.MuonDimensionNumbers()
            for name in weights
        }

    theirs = optax.contrib.muon(RATE, muon_weight_dimension_numbers=numbers, consistent_rms=0.2)
    ours = updated(Optimizer("muon", clip=0.0), model, steps)
    expected, start = reference(theirs, model, steps), tensors(model)
    others = reference(optax.adamw(RATE, weight_decay=0.0), model, steps)
    expected |= {name: tensor for name, tensor in others.items() if any(part in name for part in adam)}
    for name, tensor in expected.items():
        change = np.abs(tensor - start[name]).max()
        # Newton-Schulz amplifies rounding errors, and the transposed matrix rounds differently.
        np.testing.assert_allclose(ours[name], tensor, rtol=0, atol=2e-3 * change + 1e-7, err_msg=name)


def test_gradient_clipping(model: T5) -> None:
    """Clipping uses the global norm; a gradient below the limit is unchanged."""
    (gradient,) = gradients(model, 1)
    norm = float(optax.tree.norm(gradient))
    for limit, expected in ((norm / 4, norm / 4), (norm * 4, norm)):
        clip = make_optimizer(Optimizer("adamw", clip=limit), lambda step: jnp.asarray(1.0))
        _, state = jax.jit(clip.update)(gradient, jax.jit(clip.init)(model), model)
        first_moment = {path: leaf for path, leaf in leaves(state).items() if ".mu." in path}
        np.testing.assert_allclose(10 * optax.tree.norm(first_moment), expected, rtol=1e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_option_of_another_optimizer_is_refused(name: str) -> None:
    for option in {"b1", "b2", "eps", "momentum", "weight_decay"} - set(OPTIONS[name]):
        with pytest.raises(InputError, match=f"{option} has no effect with optimizer.name {name}"):
            Optimizer(name, **{option: 0.5})
    assert Optimizer(name).resolved().learning_rate == Optimizer(name).peak


def rates(schedule: Schedule, steps: int = 100) -> np.ndarray:
    return np.asarray(jax.vmap(learning_rate(schedule, 2.0, steps))(jnp.arange(steps)))


def test_schedules_at_key_points() -> None:
    np.testing.assert_allclose(
        rates(Schedule("constant", warmup=10))[[0, 4, 9, 50, 99]], [0.2, 1.0, 2, 2, 2], rtol=1e-6
    )
    linear = rates(Schedule("linear", warmup=10))
    assert linear[9] == 2
    assert linear[-1] > 0
    np.testing.assert_allclose(np.diff(linear[9:]), -2 / 91, rtol=1e-4)
    cosine = rates(Schedule("cosine", warmup=10, floor=0.1))
    np.testing.assert_allclose([cosine[9], cosine[-1]], [2, 0.2], rtol=1e-2)
    assert (np.diff(cosine[9:]) < 0).all()
    root = rates(Schedule("inverse-sqrt", warmup=16))
    np.testing.assert_allclose(root[[15, 63]], [2, 1], rtol=1e-6)
    stable = rates(Schedule("warmup-stable-decay", warmup=10, decay=0.2))
    assert (stable[9:80] == 2).all()
    assert (np.diff(stable[80:]) < 0).all()
    assert 0 < stable[-1] < 0.1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "inverse-sqrt", "warmup": 0}, "must be at least 1"),
        ({"warmup": -1}, "must be at least 0"),
        ({"floor": 2.0}, "must be between 0 and 1"),
    ],
)
def test_invalid_schedules_are_refused(values: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Schedule(**values)
    with pytest.raises(InputError, match="less than the 5 steps"):
        learning_rate(Schedule(warmup=5), 1.0, 5)
