"""Optimizers and learning-rate schedules, out of optax; which weights are decayed is a table over paths."""

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

DECAYED = (
    ("*norm.weight", False), ("*bias.weight", False), ("*.bias", False), ("bias", False), ("*.content", False),
    ("*.distance", False), ("*", True),
)  # fmt: skip
CODEBOOKS = (("*codebook.*", True), ("*", False))  # running means: no gradient moves them
STACKED = (("*layers.*", True), ("*", False))  # whose first axis is the layer
# Of a weight or of an adapter's first half: [heads, head size], [channels, height, width], one axis elsewhere. The last
# axis is never one of them: Transformer-VQ has its heads in one.
INPUT_AXES = (("*.o.weight", 2), ("*.o.down", 2), ("*patches.weight", 3), ("*patches.down", 3), ("*", 1))
# Muon is for matrices that map features to features. The rest, whose rows are looked up or which scale, is Adam's.
ADAM = (
    "*embedding.*", "*head.*", "*positions*", "*first", "*norm.weight", "*bias.weight", "*.bias", "bias", "scale",
    "*.content", "*.distance",
)  # fmt: skip
RULE = (*((glob, "adam") for glob in ADAM), ("*", "muon"))


def learning_rate(schedule: Schedule, peak: float, steps: int) -> Callable[[Array], Array]:
    """The rate of update number `step`, counted from 0. It is never 0: the first and the last update count too."""
    steps = schedule.steps or steps
    warmup = steps // 50 if schedule.warmup is None else schedule.warmup
    floor = schedule.floor
    if warmup >= steps:
        raise InputError(f"schedule.warmup={warmup} must be less than the {steps} steps of the run")
    if schedule.reference:
        return _original_rate(schedule, peak, warmup, steps - warmup)

    def progress(t: Array, first: int | float) -> Array:
        return jnp.clip((t - first) / (steps + 1 - first), 0.0, 1.0)

    laws: dict[str, Callable[[Array], Array]] = {
        "constant": jnp.ones_like,
        "linear": lambda t: 1 - (1 - floor) * progress(t, warmup),
        "cosine": lambda t: floor + (1 - floor) * 0.5 * (1 + jnp.cos(jnp.pi * progress(t, warmup))),
        "inverse-sqrt": lambda t: jnp.sqrt(max(warmup, 1) / jnp.maximum(t, max(warmup, 1))),
        "warmup-stable-decay": lambda t: 1 - (1 - floor) * progress(t, max(warmup, steps * (1 - schedule.decay))),
    }

    def rate(step: Array) -> Array:
        t = jnp.asarray(step, jnp.float32) + 1
        return peak * jnp.minimum(1.0, t / max(warmup, 1)) * laws[schedule.name](t)

    return rate


def _original_rate(schedule: Schedule, peak: float, warmup: int, n: int) -> Callable[[Array], Array]:
    """As the original Transformer-VQ has it: the first of a warmup is 0, and inverse-sqrt grows (a mistake of it)."""
    floor = schedule.floor
    laws: dict[str, Callable[[Array], Array]] = {
        "linear": lambda share: 1 - (1 - floor) * share,
        "cosine": lambda share: floor + (1 - floor) * 0.5 * (1 + jnp.cos(jnp.pi * share)),
        "inverse-sqrt": lambda share: floor + (1 - floor) / jnp.sqrt(1 - share),
    }
    if schedule.name not in laws:
        raise InputError(f"schedule.reference knows {', '.join(laws)}, not {schedule.name}")

    def rate(step: Array) -> Array:
        t = jnp.asarray(step, jnp.float32)
        return peak * jnp.where(t < warmup, t / max(warmup, 1), laws[schedule.name](jnp.clip((t - warmup) / n, 0, 1)))

    return rate


def make_optimizer(optimizer: Optimizer, rate: Callable[[Array], Array]) -> optax.GradientTransformation:
    """Clip, take the optimizer's direction, decay, scale by the rate. Decay is decoupled: rate · weight_decay · w."""
    chain = [] if optimizer.clip == 0 else [optax.clip_by_global_norm(optimizer.clip)]
    chain += _direction(optimizer)
    decay, scaled = optimizer.option("weight_decay"), optax.scale_by_learning_rate(rate)
    if optimizer.reference:  # decay is weight_decay · w whatever the rate
        every = optax.chain(*chain, scaled, optax.add_decayed_weights(-decay, mask=_decayed))
    elif decay:
        every = optax.chain(*chain, optax.add_decayed_weights(decay, mask=_decayed), scaled)
    else:
        every = optax.chain(*chain, scaled)
    groups = {
        "trained": every,
        "frozen": optax.set_to_zero(),
        "codebook": running_means(optimizer.codebook, optimizer.restart),
    }

    def labels(params: Any) -> Any:
        still = frozen(optimizer, params)
        names = map_leaves(lambda path, _: "codebook" if first_match(CODEBOOKS, path) else "trained", params)
        return jax.tree.map(lambda one, name: "frozen" if one else name, still, names)

    def chosen(params: Any) -> optax.GradientTransformation:
        """One group needs no partition."""
        return every if set(jax.tree.leaves(labels(params))) == {"trained"} else optax.partition(groups, labels)

    return optax.GradientTransformation(
        lambda params: chosen(params).init(params),
        lambda gradient, state, params=None: chosen(params).update(gradient, state, params),
    )


def norm(gradient: Any) -> Array:
    """Of all that is learnt by gradients."""
    return optax.tree.norm([leaf for path, leaf in leaves(gradient).items() if not first_match(CODEBOOKS, path)])


def running_means(decay: float, restart: float) -> optax.GradientTransformation:
    """Codebooks: sums and counts become decay · old + (1 - decay) · new, where the gradient is minus the new.

    A code whose count has fallen below `restart` takes half of what one of the fullest has, and a little noise.
    """

    def update(gradient: Any, state: Array, params: Any = None) -> tuple[Any, Array]:
        moved = jax.tree.map(lambda g, old: decay * old - (1 - decay) * g, gradient, params)
        if restart:
            found = leaves(moved)
            for path, counts in found.items():
                if path.endswith("codebook.count"):
                    place = path.removesuffix("count") + "sum"
                    key = jax.random.fold_in(jax.random.key(0), state)
                    found[place], found[path] = _revived(found[place], counts, restart, key)
            moved = map_leaves(lambda path, _: found[path], moved)
        return jax.tree.map(jnp.subtract, moved, params), state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


def _revived(sums: Array, counts: Array, least: float, key: Array) -> tuple[Array, Array]:
    """Over the last axis of counts [..., M], with sums [..., M, H]."""
    dead = counts < least
    fullest = jnp.argsort(-counts, axis=-1)
    rank = jnp.argsort(fullest, axis=-1)  # 0 for the fullest code
    turn = jnp.cumsum(dead, axis=-1) - 1  # the how-manieth dead one
    donor = jnp.take_along_axis(fullest, jnp.maximum(turn, 0), axis=-1)
    given = jnp.take_along_axis(counts, donor, axis=-1)
    revived = dead & (given > 2 * least)
    # A code gives if it is among the fullest, as many as there are to revive, and has enough for two.
    gives = (rank < dead.sum(-1, keepdims=True)) & (counts > 2 * least)
    half = jnp.where(gives, counts / 2, counts)
    sums = jnp.where(gives[..., None], sums / 2, sums)
    copied = jnp.take_along_axis(sums, donor[..., None], axis=-2)
    shaken = copied * (1 + 0.01 * jax.random.normal(key, sums.shape))
    return jnp.where(revived[..., None], shaken, sums), jnp.where(revived, given / 2, half)


def frozen(optimizer: Optimizer, params: Any) -> Any:
    """True for each weight that stays as it is."""
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
    option, scale = optimizer.option, per_matrix(optax.scale_by_param_block_rms())
    match optimizer.name:
        case "adamw":
            return [optax.scale_by_adam(option("b1"), option("b2"), option("eps"))]
        case "adamw-rms":
            return [optax.scale_by_adam(option("b1"), option("b2"), option("eps")), scale]
        case "adafactor":
            return [per_matrix(optax.scale_by_factored_rms()), per_matrix(optax.clip_by_block_rms(1.0)), scale]
        case "lion":
            return [optax.scale_by_lion(option("b1"), option("b2"), jnp.bfloat16 if optimizer.reference else None)]
        case "muon":
            adam = optax.scale_by_adam(option("b1"), option("b2"), option("eps"))
            # Scaled to the size of Adam's usual update, so that one learning rate serves both.
            muon = optax.chain(optax.contrib.scale_by_muon(beta=option("momentum")), _times_root_of_longer_side(0.2))
            return [optax.partition({"adam": adam, "muon": per_matrix(muon)}, _rules)]
    raise AssertionError(optimizer.name)


def per_matrix(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """`transform`, shown each weight as the matrices that a checkpoint has: one per layer, inputs × outputs.

    A stack of layers is one array here, and a projection has an axis for its heads. To Adafactor or Muon, which look
    at rows, columns and norms of a whole weight, that would be another weight.
    """

    def view(path: str, leaf: Array) -> Array:
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
        weights, done, fresh = views(params), {}, {}
        for path, leaf in views(updates).items():
            done[path], fresh[path] = jax.vmap(transform.update)(leaf, state[path], weights[path])
        return map_leaves(lambda path, leaf: done[path].reshape(leaf.shape), updates), fresh

    return optax.GradientTransformation(init, update)


def _times_root_of_longer_side(factor: float) -> optax.GradientTransformation:
    return optax.stateless_with_tree_map(lambda g, _: factor * max(g.shape) ** 0.5 * g)


def _decayed(params: Any) -> Any:
    return map_leaves(lambda path, _: first_match(DECAYED, path), params)


def _rules(params: Any) -> Any:
    return map_leaves(lambda path, _: first_match(RULE, path), params)
