"""LoRA: the model stays as it is, and low-rank additions to some of its linear maps are trained.

An adapter is a tree of its own: {path of a Linear: {"down": [*inputs, r], "up": [r, *outputs]}}, with a layer axis
first where the model has one. `attach` computes with it beside the weights, `merge` adds it into them.
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
# What PEFT takes by default for these families: queries and values, or the product that holds them.
DEFAULT = ("*.q", "*.v", "*.qkv", "*.kv")


def linears(model: Any) -> Iterator[tuple[str, Linear]]:
    """Every Linear of a model, with its path."""
    found = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda node: isinstance(node, Linear))
    return ((name(path), node) for path, node in found if isinstance(node, Linear))


def targets(model: Any, lora: LoRA) -> dict[str, Linear]:
    """The maps that the globs name; each glob must name one."""
    every = dict(linears(model))
    for glob in lora.targets:
        if not any(fnmatchcase(path, glob) for path in every):
            raise InputError(
                f"lora.targets: no linear map matches {glob!r}{did_you_mean(glob, every)}; "
                f"available: {', '.join(every)}"
            )
    globs = lora.targets or DEFAULT
    # A map that is no layer's (patches, a pooler, the bridge of a captioner) has one matrix, as a layer has.
    return {path: node for path, node in every.items() if any(fnmatchcase(path, glob) for glob in globs)}


def abstract(model: Any, lora: LoRA) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """The shapes of an adapter for this model."""
    halves = {path: shapes(split(path, node), lora.rank) for path, node in targets(model, lora).items()}
    return {
        path: {name: jax.ShapeDtypeStruct(sizes, jnp.float32) for name, sizes in zip(("down", "up"), both)}
        for path, both in halves.items()
    }


def shapes(parts: tuple[Sizes, Sizes, Sizes], rank: int) -> tuple[Sizes, Sizes]:
    """Of both halves of an addition to a weight with these parts."""
    stack, inputs, outputs = parts
    return (*stack, *inputs, rank), (*stack, rank, *outputs)


def split(path: str, node: Linear) -> tuple[Sizes, Sizes, Sizes]:
    """The shape of a weight: its layer axis if there is one, its inputs, its outputs."""
    shape = node.weight.shape
    stacked = int("layers" in path.split("."))
    end = stacked + node.n_inputs
    return shape[:stacked], shape[stacked:end], shape[end:]


def initial_adapter(model: Any, lora: LoRA, seed: int) -> Adapter:
    """An adapter that adds nothing yet: `down` is uniform noise as PEFT's, `up` is 0. Each depends on (seed, path)."""

    def noise(path: str, leaf: jax.ShapeDtypeStruct) -> Array:
        draw = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(f"{path}.down".encode())]))
        width = math.prod(leaf.shape[int("layers" in path.split(".")) : -1]) ** -0.5
        return jnp.asarray(draw.uniform(-width, width, leaf.shape).astype(np.float32))

    return {
        path: {"down": noise(path, one["down"]), "up": jnp.zeros(one["up"].shape)}
        for path, one in abstract(model, lora).items()
    }


def attach(model: M, adapter: Adapter, scale: float) -> M:
    """The model with the adapter beside its weights, for training: they get no gradient of their own."""

    check_fit(model, adapter)

    def add(path: Any, node: Any) -> Any:
        one = adapter.get(name(path)) if isinstance(node, Linear) else None
        return node if one is None else LoRALinear(node, one["down"], one["up"] * scale)

    return jax.tree_util.tree_map_with_path(add, model, is_leaf=lambda node: isinstance(node, Linear))


def merge(model: M, adapter: Adapter, scale: float) -> M:
    """The model with the adapter added into its weights, for use."""
    products = {}
    for path, (stack, inputs, outputs) in check_fit(model, adapter).items():
        one = adapter[path]
        down = one["down"].reshape(*stack, math.prod(inputs), -1)
        up = one["up"].reshape(*stack, -1, math.prod(outputs))
        product = jnp.matmul(down, up, precision="highest")  # once, and for good
        products[f"{path}.weight"] = (scale * product).reshape(*stack, *inputs, *outputs)

    def add(path: Any, leaf: Array) -> Array:
        more = products.get(name(path))
        return leaf if more is None else (leaf.astype(jnp.float32) + more).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(add, model)


def check_fit(model: Any, adapter: Adapter) -> dict[str, tuple[Sizes, Sizes, Sizes]]:
    """The `split` of each weight that the adapter adds to; the model must have it."""
    every = dict(linears(model))
    missing = [path for path in adapter if path not in every]
    if missing:
        raise InputError(
            f"the adapter adds to what the model does not have: {', '.join(missing)}{did_you_mean(missing[0], every)}"
        )
    found = {path: split(path, every[path]) for path in adapter}
    for path, one in adapter.items():
        got = (one["down"].shape, one["up"].shape)
        want = shapes(found[path], one["down"].shape[-1])
        if got != want:
            raise InputError(f"the adapter of {path} has shapes {got}; the model asks for {want}")
    return found
