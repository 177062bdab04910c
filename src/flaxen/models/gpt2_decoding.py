"""GPT-2 one token at a time, alone behind a prompt or behind a picture: the `Decoder` protocol of flaxen.generate."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from flaxen.models.captioner import Captioner
from flaxen.models.gpt2 import GPT2
from flaxen.nn.attention import Plan, attend, attend_plain
from flaxen.nn.cache import Cache, room
from flaxen.nn.layers import lay_out
from flaxen.nn.stack import unstack

ABSENT = 2**30  # the id of padding before a prompt: no token's


class State(NamedTuple):
    """All that decoding carries from token to token, for B inputs × G sequences of each."""

    past: Cache
    source: tuple[tuple[Array, Array], ...]  # keys, transposed, and values of a picture: once per input, not per beam


class GPT2Decoder(nnx.Module):
    """A GPT-2 one token at a time. Prompts are padded at the left."""

    def __init__(self, model: GPT2):
        self.model = model
        self.layers = nnx.data(lay_out(model.layers))

    def start(
        self, inputs: tuple[Int[Array, "B P"], Bool[Array, "B P"]], length: int, beams: int, reorder: bool
    ) -> tuple[Int[Array, "B G P"], State]:
        """The prompts, for every beam, and a state that has read all of them but their last tokens."""
        return self.begin(*inputs, None, length, beams, reorder)

    def begin(
        self, ids: Array, valid: Array, encoded: Float[Array, "B S D"] | None, length: int, beams: int, reorder: bool
    ) -> tuple[Int[Array, "B G P"], State]:
        model, dtype, before = self.model, jnp.dtype(self.model.config.compute), valid[:, :-1]
        x = model.embed(ids[:, :-1], model.count(ids, valid)[:, :-1])
        scales = model.config.score_scales()
        prompt, source = [], []
        for i, layer in enumerate(unstack(model.layers)):
            plan = Plan(before, causal=True, scale=None if scales is None else scales[i])
            q, k, v = layer.attention.project(layer.attention_norm(x, dtype))
            prompt.append((k, v))
            if encoded is not None:
                ck, cv = layer.cross.keys_values(encoded)
                source.append((ck.swapaxes(2, 3), cv))
            if not x.shape[1]:  # nothing but one token, which the first step reads
                continue
            x = x + layer.attention.output(attend(plan.scaled(q), k, v, plan))
            if encoded is not None:
                x = x + layer.cross(layer.cross_norm(x, dtype), encoded, Plan(scale=plan.scale), None)
            x = x + layer.mlp(layer.mlp_norm(x, dtype), 0.0, None)
        tokens = jnp.where(valid, ids, ABSENT)
        tokens = jnp.broadcast_to(tokens[:, None], (len(ids), beams, ids.shape[1]))
        return tokens, State(room(prompt, before, length, beams, reorder), tuple(source))

    def step(self, tokens: Int[Array, "B G"], state: State) -> tuple[Float[Array, "B G V"], State]:
        """The logits after `tokens`."""
        model, dtype, past = self.model, jnp.dtype(self.model.config.compute), state.past
        own = past.bias(tokens.shape[1])
        at = jnp.sum(past.prompt, axis=1, dtype=jnp.int32)[:, None] + past.time
        x = model.embed(tokens, jnp.broadcast_to(at, tokens.shape))
        scales, grown = model.config.score_scales(), []
        # Unrolled, because a scan over layers would copy the caches.
        for i, layer in enumerate(self.layers or unstack(model.layers)):
            plan = Plan(scale=None if scales is None else scales[i])
            q, k, v = layer.attention.project(layer.attention_norm(x, dtype))
            y, keys_values = past.attend(i, plan.scaled(q), k, v, own)
            x = x + layer.attention.output(y)
            if state.source:
                q = plan.scaled(layer.cross.query(layer.cross_norm(x, dtype)))
                x = x + layer.cross.output(attend_plain(q, *state.source[i], jnp.zeros((1, 1, 1, 1))))
            x = x + layer.mlp(layer.mlp_norm(x, dtype), 0.0, None)
            grown.append(keys_values)
        return model.output_head.logits(model.norm(x, dtype)), state._replace(past=past.grown(grown))

    def select(self, state: State, beams: Int[Array, "B G"]) -> State:
        return state._replace(past=state.past.select(beams))


class CaptionDecoder(nnx.Module):
    """A captioner one token at a time."""

    def __init__(self, model: Captioner):
        self.captioner, self.decoder = model, GPT2Decoder(model.decoder)

    def start(
        self, inputs: Float[Array, "B C Y X"], length: int, beams: int, reorder: bool
    ) -> tuple[Int[Array, "B G 1"], State]:
        """The first token of every caption, and a state that has seen the pictures."""
        first = jnp.full((len(inputs), 1), self.captioner.config.start_id, jnp.int32)
        encoded = self.captioner.encode(inputs)
        return self.decoder.begin(first, jnp.ones(first.shape, bool), encoded, length, beams, reorder)

    def step(self, tokens: Int[Array, "B G"], state: State) -> tuple[Float[Array, "B G V"], State]:
        return self.decoder.step(tokens, state)

    def select(self, state: State, beams: Int[Array, "B G"]) -> State:
        return self.decoder.select(state, beams)
