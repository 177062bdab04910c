"""Decoding with GPT-2, after a prompt or for an image: implements the `Decoder` protocol of flaxen.generate."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from flaxen.models.captioner import Captioner
from flaxen.models.gpt2 import GPT2, Layer
from flaxen.nn.attention import LayerCache, Source
from flaxen.nn.blockwise import Plan
from flaxen.nn.cache import Cache, KeyValues, allocate_cache, plan_source
from flaxen.nn.layers import lay_out
from flaxen.nn.stack import unstack

# Logits processors see prompts. GPT-2 pads with its end token, which they must not count as an earlier token.
ABSENT = 2**30  # stands for padding before a prompt; not a valid token id


class GPT2Decoder(nnx.Module):
    """Generates text with a GPT-2, one token at a time. Prompts are padded on the left."""

    def __init__(self, model: GPT2):
        self.model = model
        self.layers = nnx.data(lay_out(model.layers))

    def start(
        self, inputs: tuple[Int[Array, "B P"], Bool[Array, "B P"]], length: int, beams: int, reorder: bool
    ) -> tuple[Int[Array, "B G P"], Cache]:
        """Read the prompts into a cache, except their last tokens, which the first step reads."""
        return self.begin(*inputs, None, length, beams, reorder)

    def begin(
        self, ids: Array, valid: Array, encoded: Float[Array, "B S D"] | None, length: int, beams: int, reorder: bool
    ) -> tuple[Int[Array, "B G P"], Cache]:
        """Read the prompts into a cache, with cross-attention to encoded images if given.

        Returns the prompts, repeated for every beam, and a cache that holds all prompt tokens but the last.
        """
        model, c, prompt, layers = self.model, self.model.config, valid[:, :-1], unstack(self.model.layers)
        # `self.layers` is laid out for single tokens; a prompt or an encoded image goes through the model's own layers.
        source = [None if encoded is None else KeyValues.of(*layer.cross.keys_values(encoded)) for layer in layers]
        heads = (c.n_heads, c.d_model // c.n_heads)
        past = allocate_cache(source, heads, jnp.dtype(c.compute), prompt, length, beams, reorder)
        if prompt.shape[1]:  # else the prompt is one token, which the first step reads
            x = model.embed(ids[:, :-1], model.count(ids, valid)[:, :-1])
            _, caches = self._run_layers(layers, x, Plan(prompt, causal=True), past)
            past = past._replace(layers=caches)
        tokens = jnp.where(valid, ids, ABSENT)
        return jnp.broadcast_to(tokens[:, None], (len(ids), beams, ids.shape[1])), past

    def step(self, tokens: Int[Array, "B G"], state: Cache) -> tuple[Float[Array, "B G V"], Cache]:
        """Add `tokens` to the cache and compute the logits of the tokens that follow them."""
        model, dtype = self.model, jnp.dtype(self.model.config.compute)
        # `state.prompt` does not include the last token of the prompt, which is read at time 0.
        position = jnp.sum(state.prompt, axis=1, dtype=jnp.int32)[:, None] + state.time
        x = model.embed(tokens, jnp.broadcast_to(position, tokens.shape))
        x, caches = self._run_layers(self.layers or unstack(model.layers), x, state.plan(tokens.shape[1]), state)
        return model.output_head.logits(model.norm(x, dtype)), state.grown(caches)

    def _run_layers(
        self, layers: Sequence[Layer], x: Float[Array, "B T D"], plan: Any, past: Cache
    ) -> tuple[Float[Array, "B T D"], tuple[LayerCache, ...]]:
        """Run all layers, with a `Plan` for a prompt or a `TokenPlan` for a step; also return the extended caches."""
        c, scales, source = self.model.config, self.model.config.score_scales(), plan_source()
        caches: list[Any] = []
        # Unrolled, because a scan over layers would copy the caches.
        for i, (layer, cache) in enumerate(zip(layers, past.layers)):
            scale = None if scales is None else scales[i]
            cross_source = None if cache.source is None else Source(None, source._replace(scale=scale))
            x, extended = layer(x, plan._replace(scale=scale), cross_source, cache, c, None)
            caches.append(extended)
        return x, tuple(caches)

    def select(self, state: Cache, beams: Int[Array, "B G"]) -> Cache:
        """Reorder the cache for beam search."""
        return state.select(beams)


class CaptionDecoder(nnx.Module):
    """Generates captions, one token at a time."""

    def __init__(self, model: Captioner):
        self.captioner, self.decoder = model, GPT2Decoder(model.decoder)

    def start(
        self, inputs: Float[Array, "B C height width"], length: int, beams: int, reorder: bool
    ) -> tuple[Int[Array, "B G 1"], Cache]:
        """The first token of every caption, and a cache with the keys and values of the encoded images."""
        first = jnp.full((len(inputs), 1), self.captioner.config.start_id, jnp.int32)
        encoded = self.captioner.encode(inputs)
        return self.decoder.begin(first, jnp.ones(first.shape, bool), encoded, length, beams, reorder)

    def step(self, tokens: Int[Array, "B G"], state: Cache) -> tuple[Float[Array, "B G V"], Cache]:
        return self.decoder.step(tokens, state)

    def select(self, state: Cache, beams: Int[Array, "B G"]) -> Cache:
        """Reorder the cache for beam search."""
        return self.decoder.select(state, beams)
