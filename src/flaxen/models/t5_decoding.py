"""A T5 one token at a time: caches, beams that share them, and the `Decodes` protocol of flaxen.generate."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from flaxen.models.t5 import T5
from flaxen.nn.attention import MASKED, attend_plain
from flaxen.nn.layers import for_few_rows
from flaxen.nn.stack import unstack


class State(NamedTuple):
    """All that decoding carries from token to token, for B inputs × G sequences of each.

    Keys lie transposed. With a writer, beams share their past: T G stands for S; without, each is a head: N G for N.
    """

    past: tuple[tuple[Array, Array], ...]  # keys [B, N, H, S] and values [B, N, S, H] of each layer, so far
    source: tuple[tuple[Array, Array], ...]  # the same of the encoder's output: once per input, not per beam
    valid: Bool[Array, "B S"]
    writer: Int[Array, "B G T"] | None  # which beam wrote the key that beam g reads at position t
    position: Int[Array, ""]


class Decoding:
    """A T5 one token at a time: the `Decodes` protocol of flaxen.generate."""

    def __init__(self, model: T5):
        self.model = model
        # Unrolled, because a scan over layers would copy the caches; here, because that is outside the token loop.
        self.layers = [for_few_rows(layer) for layer in unstack(model.decoder.layers)]

    def start(
        self, inputs: tuple[Int[Array, "B S"], Bool[Array, "B S"]], length: int, beams: int, reorder: bool
    ) -> tuple[Int[Array, "B G"], State]:
        """The first decoder token of every beam, and a state with room for `length` tokens."""
        (ids, valid), c = inputs, self.model.config
        encoded = self.model.encode(ids, valid)
        n, s = (c.n_heads, length * beams) if reorder else (c.n_heads * beams, length)
        room = (
            jnp.zeros((len(ids), n, c.d_head, s), encoded.dtype),
            jnp.zeros((len(ids), n, s, c.d_head), encoded.dtype),
        )
        source = []
        for layer in unstack(self.model.decoder.layers):
            k, v = layer.cross.keys_values(encoded)
            source.append((k.swapaxes(2, 3), v))
        writer = jnp.broadcast_to(jnp.arange(beams)[:, None], (len(ids), beams, length)) if reorder else None
        state = State((room,) * c.n_decoder_layers, tuple(source), valid, writer, jnp.zeros((), jnp.int32))
        return jnp.full((len(ids), beams), c.start_id, jnp.int32), state

    def step(self, tokens: Int[Array, "B G"], state: State) -> tuple[Float[Array, "B G V"], State]:
        """The logits after `tokens`, which stand at `state.position`."""
        model, dtype = self.model, jnp.dtype(self.model.config.compute)
        own, other = self._own_bias(state, tokens.shape[1]), jnp.where(state.valid, 0.0, MASKED)[:, None, None]
        x = model.embedding(tokens).astype(jnp.float32)
        past = []
        for layer, (keys, values), source in zip(self.layers, state.past, state.source):
            h = layer.attention_norm(x, dtype)
            heads = (*keys.shape[:2], -1, keys.shape[2])  # [B, N, G, H], or without a writer [B, N G, 1, H]
            q = layer.attention.query(h).reshape(heads)
            k, v = (a.reshape(heads) for a in layer.attention.keys_values(h))
            keys = lax.dynamic_update_slice_in_dim(keys, k.swapaxes(2, 3), state.position * k.shape[2], 3)
            values = lax.dynamic_update_slice_in_dim(values, v, state.position * k.shape[2], 2)
            y = attend_plain(q, keys, values, own).reshape(len(x), model.config.n_heads, *x.shape[1:2], -1)
            x = x + layer.attention.output(y)
            h = layer.cross_norm(x, dtype)
            x = x + layer.cross.output(attend_plain(layer.cross.query(h), *source, other))
            x = x + layer.mlp(layer.mlp_norm(x, dtype), 0.0, None)
            past.append((keys, values))
        logits = model.output_head.logits(model.scale(model.decoder.norm(x, dtype)))
        return logits, state._replace(past=tuple(past), position=state.position + 1)

    def _own_bias(self, state: State, beams: int) -> Float[Array, "#B N #G S"]:
        """Relative bias and mask of the past, in the shape that its keys have."""
        if state.writer is None:
            time = jnp.arange(state.past[0][1].shape[2])
            bias = self.model.decoder.bias(time - state.position) + jnp.where(time <= state.position, 0.0, MASKED)
            return jnp.repeat(bias, beams, axis=0)[None, :, None]
        time = jnp.arange(state.writer.shape[2])
        bias = self.model.decoder.bias(time - state.position)[None, :, None, :, None]  # [1, N, 1, T, 1]
        # A beam reads a key if the beam that wrote it is its ancestor: reordering beams moves no keys.
        mine = (state.writer[..., None] == jnp.arange(beams)) & (time <= state.position)[:, None]  # [B, G, T, G]
        bias = bias + jnp.where(mine, 0.0, MASKED)[:, None]
        return bias.reshape(*bias.shape[:3], -1)

    def select(self, state: State, beams: Int[Array, "B G"]) -> State:
        """Beam g goes on from what was beam beams[b, g]."""
        assert state.writer is not None, "start(reorder=True) makes a state whose beams can be selected"
        writer = jnp.take_along_axis(state.writer, beams[:, :, None], axis=1)
        ahead = jnp.arange(writer.shape[2]) >= state.position
        return state._replace(writer=jnp.where(ahead, jnp.arange(writer.shape[1])[:, None], writer))
