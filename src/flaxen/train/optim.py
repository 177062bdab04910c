"""Optimizers and learning-rate schedules, built from optax. Tables of path patterns say how each weight is treated."""

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from flaxen.errors import InputError, did_you_mean
from flaxen.train.settings import Optimizer, Schedule
from flaxen.tree import first_match, leaves, map_leaves

# Which weights get weight decay; the first matching pattern applies, here and below.
DECAYED = (
    ("*norm.weight", False), ("*bias.weight", False), ("*.bias", False), ("bias", False), ("*.content", False),
    ("*.distance", False), ("*", True),
)  # fmt: skip
CODEBOOKS = (("*codebook.*", True), ("*", False))  # moving averages, not updated by gradients
STACKED = (("*layers.*", True), ("*", False))  # weights whose first axis is the layer
# Number of input axes of a weight, or of the `down` factor of an adapter: [heads, head size] for attention outputs,
# [channels, height, width] for patches, one axis elsewhere. `per_matrix` always leaves at least one output axis,
# because Transformer-VQ merges its heads into one axis.
INPUT_AXES = (("*.o.weight", 2), ("*.o.down", 2), ("*patches.weight", 3), ("*patches.down", 3), ("*", 1))
# Muon is meant for matrices that map features to features. Embeddings, norms, biases and scales are trained by Adam.
ADAM = (
    "*embedding.*", "*head.*", "*positions*", "*first", "*norm.weight", "*bias.weight", "*.bias", "bias", "scale",
    "*.content", "*.distance",
)  # fmt: skip
RULE = (*((glob, "adam") for glob in ADAM), ("*", "muon"))


def learning_rate(schedule: Schedule, peak: float, steps: int) -> Callable[[Array], Array]:
    """Return the learning-rate schedule: a function from the step, counted from 0, to the learning rate.

    The rate is above 0 at every step including the first and the last, so that no update is wasted.
    """
    steps = schedule.steps or steps
    # By default 2 % of the steps.
    warmup = steps // 50 if schedule.warmup is None else schedule.warmup
    floor = schedule.floor
    if warmup >= steps:
        raise InputError(f"schedule.warmup={warmup} must be less than the {steps} steps of the run")
    if schedule.reference:
        return _original_rate(schedule, peak, warmup, steps - warmup)

    def progress(t: Array, first: int | float) -> Array:
        """Fraction of the decay that is completed at step t, counted from 1; below 1 at the last step."""
        return jnp.clip((t - first) / (steps + 1 - first), 0.0, 1.0)

    laws: dict[str, Callable[[Array], Array]] = {
        "constant": jnp.ones_like,
        "linear": lambda t: 1 - (1 - floor) * progress(t, warmup),
        "cosine": lambda t: floor + (1 - floor) * 0.5 * (1 + jnp.cos(jnp.pi * progress(t, warmup))),
        "inverse-sqrt": lambda t: jnp.sqrt(max(warmup, 1) / jnp.maximum(t, max(warmup, 1))),
        "warmup-stable-decay": lambda t: 1 - (1 - floor) * progress(t, max(warmup, steps * (1 - schedule.decay))),
    }

    def rate(step: Array) -> Array:
        # Counted from 1, so that warmup does not start with a rate of 0.
        t = jnp.asarray(step, jnp.float32) + 1
        return peak * jnp.minimum(1.0, t / max(warmup, 1)) * laws[schedule.name](t)

    return rate


def _original_rate(schedule: Schedule, peak: float, warmup: int, n: int) -> Callable[[Array], Array]:
    """Schedule of the original Transformer-VQ: warmup starts at 0, and inverse-sqrt grows (a bug in the original)."""
    floor = schedule.floor
    laws: dict[str, Callable[[Array], Array]] = {
        "linear": lambda progress: 1 - (1 - floor) * progress,
        "cosine": lambda progress: floor + (1 - floor) * 0.5 * (1 + jnp.cos(jnp.pi * progress)),
        "inverse-sqrt": lambda progress: floor + (1 - floor) / jnp.sqrt(1 - progress),
    }
    if schedule.name not in laws:
        raise InputError(
            f"schedule.name must be one of {', '.join(laws)} with schedule.reference, got {schedule.name!r}"
        )

    def rate(step: Array) -> Array:
        t = jnp.asarray(step, jnp.float32)
        return peak * jnp.where(t < warmup, t / max(warmup, 1), laws[schedule.name](jnp.clip((t - warmup) / n, 0, 1)))

    return rate


def make_optimizer(optimizer: Optimizer, rate: Callable[[Array], Array]) -> optax.GradientTransformation:
    """Chain gradient clipping, the update rule, decoupled weight decay (rate · weight_decay · w) and the learning rate.

    Frozen weights and codebooks are excluded from the chain: the former do not change, the latter are exponential
    moving averages.
    """
    chain = [] if optimizer.clip == 0 else [optax.clip_by_global_norm(optimizer.clip)]
    chain += _direction(optimizer)
    decay, scaled = optimizer.option("weight_decay"), optax.scale_by_learning_rate(rate)
    if optimizer.reference:  # decay is weight_decay · w, not multiplied by the learning rate
        # `scaled` also turns the direction into a descent step, so a decay after it needs a minus sign.
        trained = optax.chain(*chain, scaled, optax.add_decayed_weights(-decay, mask=_decay_mask))
    elif decay:
        trained = optax.chain(*chain, optax.add_decayed_weights(decay, mask=_decay_mask), scaled)
    else:
        trained = optax.chain(*chain, scaled)
    groups = {
        "trained": trained,
        "frozen": optax.set_to_zero(),
        "codebook": exponential_moving_averages(optimizer.codebook, optimizer.restart),
    }

    def labels(params: Any) -> Any:
        is_frozen = frozen(optimizer, params)
        names = map_leaves(lambda path, _: "codebook" if first_match(CODEBOOKS, path) else "trained", params)
        # A codebook can be frozen as well.
        return jax.tree.map(lambda freeze, name: "frozen" if freeze else name, is_frozen, names)

    def select(params: Any) -> optax.GradientTransformation:
        """Skip the partition if all weights are trained, to keep the optimizer state simple."""
        return trained if set(jax.tree.leaves(labels(params))) == {"trained"} else optax.partition(groups, labels)

    return optax.GradientTransformation(
        lambda params: select(params).init(params),
        lambda gradient, state, params=None: select(params).update(gradient, state, params),
    )


def norm(gradient: Any) -> Array:
    """Global norm of the gradient, excluding codebooks, whose "gradients" are statistics."""
    return optax.tree.norm([leaf for path, leaf in leaves(gradient).items() if not first_match(CODEBOOKS, path)])


def exponential_moving_averages(decay: float, restart: float) -> optax.GradientTransformation:
    """Update codebooks as exponential moving averages: sums and counts become decay · old + (1 - decay) · new.

    The model's "gradient" of a codebook is minus its new statistics. A dead code, whose count has fallen below
    `restart`, is given half of the sum and count of one of the most frequent codes, with a little noise.
    """

    def update(gradient: Any, state: Array, params: Any = None) -> tuple[Any, Array]:
        moved = jax.tree.map(lambda g, old: decay * old - (1 - decay) * g, gradient, params)
        if restart:
            arrays = leaves(moved)
            for path, counts in arrays.items():
                if path.endswith("codebook.count"):
                    sum_path = path.removesuffix("count") + "sum"
                    # The state counts updates, so a resumed run draws the same noise.
                    key = jax.random.fold_in(jax.random.key(0), state)
                    arrays[sum_path], arrays[path] = _restart_dead_codes(arrays[sum_path], counts, restart, key)
            moved = map_leaves(lambda path, _: arrays[path], moved)
        # optax adds updates to the parameters, so return the difference.
        return jax.tree.map(jnp.subtract, moved, params), state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


def _restart_dead_codes(sums: Array, counts: Array, threshold: float, key: Array) -> tuple[Array, Array]:
    """Pair the n-th dead code with the n-th most frequent one and split the latter's statistics between the two.

    Codes are on the last axis of `counts` [..., M] and the last but one of `sums` [..., M, H].
    """
    dead = counts < threshold
    by_count = jnp.argsort(-counts, axis=-1)  # indices of the codes, most frequent first
    rank = jnp.argsort(by_count, axis=-1)  # 0 for the most frequent code
    dead_index = jnp.cumsum(dead, axis=-1) - 1  # index among dead codes
    donor = jnp.take_along_axis(by_count, jnp.maximum(dead_index, 0), axis=-1)
    donor_count = jnp.take_along_axis(counts, donor, axis=-1)
    restarted = dead & (donor_count > 2 * threshold)
    # A donor must stay above the threshold after halving. There are as many candidates as dead codes.
    donates = (rank < dead.sum(-1, keepdims=True)) & (counts > 2 * threshold)
    halved = jnp.where(donates, counts / 2, counts)
    sums = jnp.where(donates[..., None], sums / 2, sums)
    copied = jnp.take_along_axis(sums, donor[..., None], axis=-2)
    # Without noise, both codes would be equal and the first would win every key.
    noisy = copied * (1 + 0.01 * jax.random.normal(key, sums.shape))
    return jnp.where(restarted[..., None], noisy, sums), jnp.where(restarted, donor_count / 2, halved)


def frozen(optimizer: Optimizer, params: Any) -> Any:
    """Return a tree that is True for each frozen weight."""
    names = list(leaves(params))
    for glob in optimizer.freeze:
        if not any(fnmatchcase(name, glob) for name in names):
            raise InputError(
                f"optimizer.freeze: no weight matches {glob!r}{did_you_mean(glob, names)}; "
                f"available: {', '.join(names)}"
            )
    rules = (*((glob, True) for glob in optimizer.freeze), ("*", False))
    return map_leaves(lambda path, _: first_match(rules, path), params)


def _direction(optimizer: Optimizer) -> list[optax.GradientTransformation]:
    """Build the update rule, before weight decay and learning rate."""
    option, scale = optimizer.option, per_matrix(optax.scale_by_param_block_rms())
    match optimizer.name:
        case "adamw":
            return [optax.scale_by_adam(option("b1"), option("b2"), option("eps"))]
        case "adamw-rms":
            return [optax.scale_by_adam(option("b1"), option("b2"), option("eps")), scale]
        case "adafactor":
            # The parts of optax.adafactor, with its clipping threshold of 1.
            return [per_matrix(optax.scale_by_factored_rms()), per_matrix(optax.clip_by_block_rms(1.0)), scale]
        case "lion":
            return [optax.scale_by_lion(option("b1"), option("b2"), jnp.bfloat16 if optimizer.reference else None)]
        case "muon":
            adam = optax.scale_by_adam(option("b1"), option("b2"), option("eps"))
            # Scale to the RMS of a typical Adam update, so that one learning rate works for both.
            muon = optax.chain(optax.contrib.scale_by_muon(beta=option("momentum")), _scale_by_sqrt_longer_side(0.2))
            return [optax.partition({"adam": adam, "muon": per_matrix(muon)}, _muon_groups)]
    raise AssertionError(optimizer.name)


def per_matrix(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply `transform` to each weight reshaped to the matrices of a checkpoint: one per layer, inputs × outputs.

    Our arrays stack all layers and have separate axes for heads. Adafactor and Muon, which use rows, columns and norms
    of a weight, would give different results on these shapes.
    """

    def view(path: str, leaf: Array) -> Array:
        """Reshape to [layers or 1, inputs, outputs]; vectors to [layers or 1, n]."""
        lead = leaf.shape[:1] if first_match(STACKED, path) else (1,)
        rest = leaf.shape[1:] if first_match(STACKED, path) else leaf.shape
        if len(rest) < 2:
            return leaf.reshape(*lead, *rest)
        n = min(first_match(INPUT_AXES, path), len(rest) - 1)
        return leaf.reshape(*lead, math.prod(rest[:n]), -1)

    def views(tree: Any) -> dict[str, Array]:
        return {path: view(path, leaf) for path, leaf in leaves(tree).items()}

    def init(params: Any) -> dict[str, Any]:
        return {path: jax.vmap(transform.init)(leaf) for path, leaf in views(params).items()}

    def update(updates: Any, state: dict[str, Any], params: Any = None) -> tuple[Any, dict[str, Any]]:
        weights, new_updates, new_state = views(params), {}, {}
        for path, leaf in views(updates).items():
            new_updates[path], new_state[path] = jax.vmap(transform.update)(leaf, state[path], weights[path])
        return map_leaves(lambda path, leaf: new_updates[path].reshape(leaf.shape), updates), new_state

    return optax.GradientTransformation(init, update)


def _scale_by_sqrt_longer_side(factor: float) -> optax.GradientTransformation:
    """Multiply by factor · sqrt(longer side): an orthogonal matrix has an RMS of 1 / sqrt(longer side)."""
    return optax.stateless_with_tree_map(lambda g, _: factor * max(g.shape) ** 0.5 * g)


def _decay_mask(params: Any) -> Any:
    """Return a tree that is True for each weight with weight decay."""
    return map_leaves(lambda path, _: first_match(DECAYED, path), params)


def _muon_groups(params: Any) -> Any:
    """Label each weight "muon" or "adam"."""
    return map_leaves(lambda path, _: first_match(RULE, path), params)
