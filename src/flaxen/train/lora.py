"""LoRA: freeze the model and train low-rank updates of some of its linear layers.

An adapter is a separate tree: {path of a Linear: {"down": [*inputs, r], "up": [r, *outputs]}}, with a leading layer
axis where the model has one. `attach` computes x·W + x·down·up for training; `merge` adds down·up to W for inference.
"""

import math
import zlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from flaxen.errors import InputError, did_you_mean
from flaxen.nn.layers import Linear, LoRALinear
from flaxen.train.settings import LoRA
from flaxen.tree import name

M = TypeVar("M")
Adapter = dict[str, dict[str, Array]]
Sizes = tuple[int, ...]
# PEFT's default targets for these families: queries and values, or the fused projection that contains them.
DEFAULT = ("*.q", "*.v", "*.qkv", "*.kv")


def linears(model: Any) -> Iterator[tuple[str, Linear]]:
    """Iterate over all Linear layers of a model with their paths."""
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda node: isinstance(node, Linear))
    return ((name(path), node) for path, node in nodes if isinstance(node, Linear))


def targets(model: Any, lora: LoRA) -> dict[str, Linear]:
    """Return the linear layers to adapt, by path; every glob pattern must match at least one."""
    layers = dict(linears(model))
    for glob in lora.targets:
        if not any(fnmatchcase(path, glob) for path in layers):
            raise InputError(
                f"lora.targets: no linear layer matches {glob!r}{did_you_mean(glob, layers)}; "
                f"available: {', '.join(layers)}"
            )
    globs = lora.targets or DEFAULT
    # Linear layers outside the layer stack (patches, a pooler, a captioner's projection `bridge`) have one matrix and
    # no layer axis.
    return {path: node for path, node in layers.items() if any(fnmatchcase(path, glob) for glob in globs)}


def abstract(model: Any, lora: LoRA) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """Shapes of an adapter for this model, without allocating it."""
    halves = {path: shapes(split(path, node), lora.rank) for path, node in targets(model, lora).items()}
    return {
        path: {name: jax.ShapeDtypeStruct(sizes, jnp.float32) for name, sizes in zip(("down", "up"), both)}
        for path, both in halves.items()
    }


def shapes(parts: tuple[Sizes, Sizes, Sizes], rank: int) -> tuple[Sizes, Sizes]:
    """Shapes of the `down` and `up` factors for a weight with this `split`."""
    stack, inputs, outputs = parts
    return (*stack, *inputs, rank), (*stack, rank, *outputs)


def split(path: str, node: Linear) -> tuple[Sizes, Sizes, Sizes]:
    """Split the shape of a weight into its layer axis (if any), its input axes and its output axes."""
    shape = node.weight.shape
    stacked = int("layers" in path.split("."))
    end = stacked + node.n_inputs
    return shape[:stacked], shape[stacked:end], shape[end:]


def initial_adapter(model: Any, lora: LoRA, seed: int) -> Adapter:
    """Initialise an adapter: `down` is uniform noise, as in PEFT, and `up` is 0, so the model starts out unchanged.

    The noise of each layer depends only on (seed, path).
    """

    def noise(path: str, leaf: jax.ShapeDtypeStruct) -> Array:
        # crc32, because Python's own hash of a text differs between processes.
        draw = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(f"{path}.down".encode())]))
        # PEFT draws from kaiming_uniform_(a=√5), which is uniform between ±1 / sqrt(number of inputs).
        width = math.prod(leaf.shape[int("layers" in path.split(".")) : -1]) ** -0.5
        return jnp.asarray(draw.uniform(-width, width, leaf.shape).astype(np.float32))

    return {
        path: {"down": noise(path, factors["down"]), "up": jnp.zeros(factors["up"].shape)}
        for path, factors in abstract(model, lora).items()
    }


def attach(model: M, adapter: Adapter, scale: float) -> M:
    """Return the model with its adapted layers replaced by LoRALinear, for training. Its own weights stay frozen."""
    check_fit(model, adapter)

    def add(path: Any, node: Any) -> Any:
        factors = adapter.get(name(path)) if isinstance(node, Linear) else None
        return node if factors is None else LoRALinear(node, factors["down"], factors["up"] * scale)

    return jax.tree_util.tree_map_with_path(add, model, is_leaf=lambda node: isinstance(node, Linear))


def merge(model: M, adapter: Adapter, scale: float) -> M:
    """Return the model with the adapter added to its weights, for inference and export."""
    updates = {}
    for path, (stack, inputs, outputs) in check_fit(model, adapter).items():
        factors = adapter[path]
        down = factors["down"].reshape(*stack, math.prod(inputs), -1)
        up = factors["up"].reshape(*stack, -1, math.prod(outputs))
        product = jnp.matmul(down, up, precision="highest")  # computed only once, so accuracy matters more than speed
        updates[f"{path}.weight"] = (scale * product).reshape(*stack, *inputs, *outputs)

    def add(path: Any, leaf: Array) -> Array:
        # Added in f32 and rounded once, if the weights are bf16.
        change = updates.get(name(path))
        return leaf if change is None else (leaf.astype(jnp.float32) + change).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(add, model)


def check_fit(model: Any, adapter: Adapter) -> dict[str, tuple[Sizes, Sizes, Sizes]]:
    """Return the `split` of each adapted weight; raise an InputError if the adapter does not fit the model."""
    layers = dict(linears(model))
    missing = [path for path in adapter if path not in layers]
    if missing:
        raise InputError(
            f"the adapter targets layers that the model does not have: {', '.join(missing)}"
            f"{did_you_mean(missing[0], layers)}"
        )
    splits = {path: split(path, layers[path]) for path in adapter}
    for path, factors in adapter.items():
        got = (factors["down"].shape, factors["up"].shape)
        expected = shapes(splits[path], factors["down"].shape[-1])
        if got != expected:
            raise InputError(f"the adapter of {path} has shapes {got}, expected {expected} for this model")
    return splits
