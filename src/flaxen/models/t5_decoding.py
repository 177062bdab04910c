"""Decoding with T5: implements the `Decoder` protocol of flaxen.generate."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from flaxen.models.t5 import T5
from flaxen.nn.attention import Source
from flaxen.nn.cache import Cache, KeyValues, allocate_cache, plan_source
from flaxen.nn.layers import lay_out
from flaxen.nn.stack import unstack


class T5DecodingState(NamedTuple):
    """The state carried from token to token, for B inputs with G sequences each."""

    past: Cache
    valid: Bool[Array, "B S"]  # True for real tokens of the source


class T5Decoder(nnx.Module):
    """Generates text with a T5, one token at a time."""

    def __init__(self, model: T5):
        self.model = model
        self.layers = nnx.data(lay_out(model.decoder.layers))

    def start(
        self, inputs: tuple[Int[Array, "B S"], Bool[Array, "B S"]], length: int, beams: int, reorder: bool
    ) -> tuple[Int[Array, "B G 1"], T5DecodingState]:
        """Encode the inputs; return the first decoder token of every beam and a state with room for `length` tokens."""
        (ids, valid), c = inputs, self.model.config
        encoded = self.model.encode(ids, valid)
        # `self.layers` is laid out for single tokens; the source goes through the model's own layers.
        source = [KeyValues.of(*layer.cross.keys_values(encoded)) for layer in unstack(self.model.decoder.layers)]
        # The decoder starts from one token, which the first step feeds, so the cache needs no columns for a prompt.
        no_prompt = valid[:, :0]
        past = allocate_cache(source, (c.n_heads, c.d_head), encoded.dtype, no_prompt, length, beams, reorder)
        return jnp.full((len(ids), beams, 1), c.start_id, jnp.int32), T5DecodingState(past, valid)

    def step(self, tokens: Int[Array, "B G"], state: T5DecodingState) -> tuple[Float[Array, "B G V"], T5DecodingState]:
        """Add `tokens`, at time `state.past.time`, to the cache and compute the logits of the tokens that follow."""
        model, dtype, past, beams = self.model, jnp.dtype(self.model.config.compute), state.past, tokens.shape[1]
        # key - query, for keys at all times; those in the future are masked by the plan.
        distances = past.times(beams) - past.time
        shared = None if model.decoder.bias is None else past.plan(beams, model.decoder.bias(distances))
        source = Source(None, plan_source(state.valid))
        x, layers = model.embedding(tokens).astype(jnp.float32), []
        # Unrolled, because a scan over layers would copy the caches.
        for layer, cache in zip(self.layers or unstack(model.decoder.layers), past.layers):
            plan = past.plan(beams, layer.bias(distances)) if shared is None else shared
            x, cache = layer(x, plan, source, cache, 0.0, dtype, None)
            layers.append(cache)
        logits = model.output_head.logits(model.scale(model.decoder.norm(x, dtype)))
        return logits, state._replace(past=past.grown(layers))

    def select(self, state: T5DecodingState, beams: Int[Array, "B G"]) -> T5DecodingState:
        """Reorder the cache for beam search."""
        return state._replace(past=state.past.select(beams))
