"""Transformer-VQ as a `LanguageModel`: the functions that the language-modelling task needs (flaxen.tasks.language)."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from flaxen.models import vq_config, vq_lm
from flaxen.models.vq_config import Config
from flaxen.models.vq_lm import VQLM, VQState
from flaxen.models.vq_unit import DropoutKeys, Layer, Unit
from flaxen.nn import codebook
from flaxen.nn.loss import Sums
from flaxen.nn.stack import unstack
from flaxen.nn.vq import BlockwisePass

flops = vq_config.flops
initial_carry = vq_lm.initial_state


def adapt_config(config: Config, objective: Any, image: tuple[int, ...], training: bool) -> Config:
    """Adapt the configuration to the data; `image` is the shape of its images, () for text and bytes."""
    if config.image and image != config.image:
        found = f"images of shape {image}" if image else "no images"
        raise ValueError(f"the model generates images of shape {config.image}, but the data has {found}")
    # When not training, every block size that divides the chunk length gives the same results.
    block = config.block if training else math.gcd(config.block, objective.chunk)
    return dataclasses.replace(config, image=image, block=block)


def check(config: Config, objective: Any) -> None:
    """Raise a ValueError if the model cannot be trained with this objective."""
    chunk, full = objective.chunk, config.attention == "full"
    if full and objective.continued:
        raise ValueError(
            "objective.continued has no effect with full attention, which carries no state between sequences; remove it"
        )
    if chunk % config.block:
        raise ValueError(
            f"the update length of {chunk} tokens (objective.update, or objective.length) must be a multiple of the "
            f"model's block length {config.block}; set --model.fields block={math.gcd(chunk, config.block)}"
        )
    if full and chunk != objective.length:
        raise ValueError(
            "objective.update cannot be combined with full attention, which carries no state between updates; remove "
            "objective.update or set --model.fields attention=vq"
        )


def notes(config: Config) -> list[str]:
    """Facts about the model to print before a run."""
    if config.attention == "full":
        return ["full attention: cost grows with the square of the length, and there are no codebooks"]
    state = jax.eval_shape(lambda: vq_lm.initial_state(config, 1))
    return [f"state per sequence, independent of its length: {vq_lm.state_bytes(state) / 1e6:,.2f} MB"]


def has_codebooks(config: Config) -> bool:
    return config.attention == "vq"


def language_loss(
    model: VQLM,
    inputs: Int[Array, "B T"],
    labels: Int[Array, "B T"],
    fresh: Bool[Array, "B"],
    carry: VQState,
    key: Array | None,
    objective: Any,
) -> tuple[Sums, VQState]:
    """Return the loss sums of one chunk, and the state after it. Rows that are `fresh` start from an empty state, the
    others from `carry`. If `key` is given, dropout is applied and codebooks are updated."""
    start = vq_lm.initial_state(model.config, len(fresh))
    if key is not None:
        sequence_key = jax.random.key_data(jax.random.fold_in(key, 1))
        start = start._replace(key=jnp.broadcast_to(sequence_key, start.key.shape))
    now = jax.tree.map(lambda a, b: jnp.where(fresh.reshape(-1, *[1] * (a.ndim - 1)), a, b), start, carry)
    noise = None
    if key is not None:  # all sequences of a microbatch start at the same step, so they share one key
        noise = DropoutKeys(jax.random.fold_in(key, 0), jax.random.wrap_key_data(now.key[0]))
    sums, state, _ = model.loss(inputs, labels, now, commit=objective.commit, noise=noise, learn=key is not None)
    return sums, state


def prepare_model(model: VQLM, inputs: Int[Array, "B T"], key: Array, objective: Any) -> VQLM:
    """Return the model to start training from, with codebooks fitted to the data or left random."""
    if objective.codebooks == "random" or not has_codebooks(model.config):
        return model
    return jax.jit(fit_codebooks)(model, inputs, key)


def fit_codebooks(model: VQLM, ids: Int[Array, "B T"], key: Array) -> VQLM:
    """Initialise all codebooks by k-means over the keys of some text, so that no code is far from all keys.

    Layers are fitted in order, since the keys of a layer depend on the quantised attention of the layers before it.
    """
    c = model.config
    state = vq_lm.initial_state(c, len(ids))
    documents = vq_lm.number_documents(c, ids, state, None)
    plan = BlockwisePass(c.reading, jnp.concatenate([state.documents, documents], axis=1), state.latest)
    x, fitted = model.embed(ids, vq_lm.token_positions(c, state, documents)), []
    for i, layer in enumerate(unstack(model.layers)):
        keys = jax.random.split(jax.random.fold_in(key, i))
        units = []
        for j, unit in enumerate(layer.units):
            units.append(_fit_unit(unit, x, keys[j]))
            cache = jax.tree.map(lambda a, i=i: a[:, i], state.caches[j])
            x, _, _ = units[-1](x, plan, cache)
        x = layer.feed(x)
        layer.first = units[0]
        layer.second = units[1] if len(units) > 1 else None
        fitted.append(layer)
    return _with_layers(model, jax.tree.map(lambda *a: jnp.stack(a), *fitted))


def _fit_unit(unit: Unit, x: Array, key: Array) -> Unit:
    """The unit with its codebook fitted to the keys that it computes from x."""
    c = unit.config
    # [B, N, T, H] to [N, B · T, H]: every head has a codebook of its own.
    k = unit.project(x)[1].swapaxes(0, 1).reshape(c.key_heads, -1, c.d_k)
    sums, counts = codebook.fit(k, c.n_codes, key)
    fitted = {"sum": sums, "count": counts}
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: fitted.get(path[-2].name, leaf) if path[0].name == "codebook" else leaf, unit
    )


def _with_layers(model: VQLM, layers: Layer) -> VQLM:
    """A copy of the model with other layers."""
    # nnx modules are mutable; assigning to a rebuilt one leaves the argument unchanged.
    leaves, tree = jax.tree.flatten(model)
    copy = jax.tree.unflatten(tree, leaves)
    copy.layers = layers
    return copy
