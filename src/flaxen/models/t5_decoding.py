"""A T5 one token at a time: the `Decoder` protocol of flaxen.generate."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from flaxen.models.t5 import T5
from flaxen.nn.attention import MASKED, attend_plain
from flaxen.nn.cache import Cache, room
from flaxen.nn.layers import lay_out
from flaxen.nn.stack import unstack


class State(NamedTuple):
    """All that decoding carries from token to token, for B inputs × G sequences of each."""

    past: Cache
    source: tuple[tuple[Array, Array], ...]  # keys, transposed, and values of the encoder's output: once per input
    valid: Bool[Array, "B S"]


class T5Decoder(nnx.Module):
    """A T5 one token at a time."""

    def __init__(self, model: T5):
        self.model = model
        self.layers = nnx.data(lay_out(model.decoder.layers))

    def start(
        self, inputs: tuple[Int[Array, "B S"], Bool[Array, "B S"]], length: int, beams: int, reorder: bool
    ) -> tuple[Int[Array, "B G 1"], State]:
        """The first decoder token of every beam, and a state with room for `length` tokens."""
        (ids, valid), c = inputs, self.model.config
        encoded = self.model.encode(ids, valid)
        none = jnp.zeros((len(ids), c.n_heads, 0, c.d_head), encoded.dtype)
        past = room([(none, none)] * c.n_decoder_layers, valid[:, :0], length, beams, reorder)
        source = []
        for layer in unstack(self.model.decoder.layers):
            k, v = layer.cross.keys_values(encoded)
            source.append((k.swapaxes(2, 3), v))
        return jnp.full((len(ids), beams, 1), c.start_id, jnp.int32), State(past, tuple(source), valid)

    def step(self, tokens: Int[Array, "B G"], state: State) -> tuple[Float[Array, "B G V"], State]:
        """The logits after `tokens`, which stand at `state.past.time`."""
        model, dtype, past = self.model, jnp.dtype(self.model.config.compute), state.past
        times = jnp.arange(past.writer.shape[2] if past.writer is not None else past.layers[0][1].shape[2])
        own = past.bias(tokens.shape[1], model.decoder.bias(times - past.time))
        other = jnp.where(state.valid, 0.0, MASKED)[:, None, None]
        x = model.embedding(tokens).astype(jnp.float32)
        grown = []
        # Unrolled, because a scan over layers would copy the caches.
        for i, (layer, source) in enumerate(zip(self.layers or unstack(model.decoder.layers), state.source)):
            q, k, v = layer.attention.project(layer.attention_norm(x, dtype))
            y, keys_values = past.attend(i, q, k, v, own)
            x = x + layer.attention.output(y)
            h = layer.cross_norm(x, dtype)
            x = x + layer.cross.output(attend_plain(layer.cross.query(h), *source, other))
            x = x + layer.mlp(layer.mlp_norm(x, dtype), 0.0, None)
            grown.append(keys_values)
        logits = model.output_head.logits(model.scale(model.decoder.norm(x, dtype)))
        return logits, state._replace(past=past.grown(grown))

    def select(self, state: State, beams: Int[Array, "B G"]) -> State:
        return state._replace(past=state.past.select(beams))
