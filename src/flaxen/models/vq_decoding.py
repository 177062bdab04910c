"""Decoding with a Transformer-VQ at a constant cost per token: implements the `Decoder` protocol of flaxen.generate."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from flaxen.models import vq_lm
from flaxen.models.vq_config import Config
from flaxen.models.vq_lm import VQLM, VQState
from flaxen.models.vq_unit import Layer
from flaxen.nn.layers import lay_out
from flaxen.nn.stack import unstack
from flaxen.nn.vq import VQCache
from flaxen.nn.vq_ring import Ring, TokenStep

# The time, which determines the next slot, and the state of B · G sequences. In this state, documents are ordered by
# slot, and the caches are one ring for each unit of each layer.
Decode = tuple[Int[Array, ""], VQState]


class VQDecoder(nnx.Module):
    """Decoder of a Transformer-VQ. Prompts are padded on the left."""

    def __init__(self, model: VQLM):
        self.model, self.config = model, model.config
        self.layers: tuple[Layer, ...] | None = nnx.data(lay_out(model.layers))
        self.tables: tuple[tuple[Array, ...], ...] = nnx.data(_tables(model.layers))

    def start(
        self,
        inputs: tuple[Int[Array, "B P"], Bool[Array, "B P"], VQState | None],
        length: int,
        beams: int,
        reorder: bool,
    ) -> tuple[Int[Array, "B G P"], Decode]:
        """Return the prompts, repeated for every beam, and the state after all tokens of a prompt but the last one.
        With a state to continue from, the prompt is a single token."""
        ids, valid, state = inputs
        if state is None:
            state = self._read(ids[:, :-1], valid[:, :-1], length)
        tokens = jnp.broadcast_to(ids[:, None], (len(ids), beams, ids.shape[1]))
        time, state = to_rings(self.config, state, length)
        return tokens, (time, state if beams == 1 else jax.tree.map(lambda a: jnp.repeat(a, beams, axis=0), state))

    def _read(self, ids: Int[Array, "B P"], valid: Bool[Array, "B P"], room: int) -> VQState:
        """The state after a prompt, which is padded on the left to a multiple of the block size."""
        c = self.config
        padding = -ids.shape[1] % c.block
        ids, valid = (jnp.pad(a, ((0, 0), (padding, 0))) for a in (ids, valid))
        if not ids.shape[1]:
            return vq_lm.initial_state(c, len(ids))
        return self.model(ids, None, valid, room=room if c.attention == "full" else None)[1]

    def step(self, tokens: Int[Array, "B G"], state: Decode) -> tuple[Float[Array, "B G V"], Decode]:
        """Return the logits of the tokens that follow `tokens`, and the new state."""
        c, model, (time, now) = self.config, self.model, state
        ids, slots = tokens.reshape(-1), now.documents.shape[1]
        last = lax.dynamic_index_in_dim(now.documents, (time - 1) % slots, 1, keepdims=False)
        # An end token starts the next document, as in vq_lm.number_documents.
        # Before the first token, `last` is 0, the number of an empty slot; documents are numbered from 1.
        number = jnp.maximum(last + jnp.isin(ids, jnp.asarray(c.eos_ids, jnp.int32)), 1)
        position = jnp.where(number != last, 0, now.position) if c.documents else now.position
        documents = lax.dynamic_update_index_in_dim(now.documents, number, time % slots, 1)
        plan = TokenStep(c.spec, time, documents, now.latest)
        x = model.embed(ids, position)[:, None]
        caches: list[Ring] = []
        # Unrolled, because a scan over layers would copy all rings.
        for i, layer in enumerate(self.layers or unstack(model.layers)):
            rings = now.caches[i * c.units : (i + 1) * c.units]
            x, rings, _ = layer(x, plan, rings, tables=self.tables[i])
            caches += rings
        logits = model.output(model.normed(x))[:, 0].reshape(*tokens.shape, -1)
        return logits, (time + 1, VQState(position + 1, documents, plan.evicted, tuple(caches), now.key))

    def select(self, state: Decode, beams: Int[Array, "B G"]) -> Decode:
        """Reorder the state by beam index."""
        n, (time, now) = beams.shape[1], state
        # The state has one row for each of the B · G sequences, with those of an input next to each other.
        rows = (jnp.arange(len(beams))[:, None] * n + beams).reshape(-1)
        return time, jax.tree.map(lambda a: a[rows], now)


@jax.jit
def _tables(layers: Layer) -> tuple[tuple[Array, ...], ...]:
    """The distance embeddings of every unit of every layer, computed once: they are the same for all tokens."""
    return tuple(tuple(unit.table() for unit in layer.units) for layer in unstack(layers))


def to_rings(config: Config, state: VQState, length: int) -> Decode:
    """Convert the state of a blockwise pass to a decoding state: one ring for each unit, ordered by layer.

    The W tokens of the window fill slots 0 to W - 1 in order, so the next token goes to slot W.
    """
    c = config
    if c.attention == "full" and not state.caches:  # there was no prompt: allocate empty slots
        size, rows = (c.n_layers, c.key_heads, length), len(state.position)
        keys, values = jnp.zeros((rows, *size, c.d_k)), jnp.zeros((rows, *size, c.d_v), jnp.dtype(c.compute))
        ring = Ring(keys, jnp.zeros((rows, *size[:2], 0)), values)
        state = state._replace(documents=jnp.zeros((rows, length), jnp.int32), caches=(ring,) * c.units)
    # Split [B, L, …] into one array for each layer and unit, so that a loop over tokens can update each in place.
    caches = [jax.tree.map(lambda a, i=i: a[:, i], cache) for i in range(c.n_layers) for cache in state.caches]
    if c.attention == "full":
        # The tokens of the prompt fill the first slots; `length` empty ones follow.
        return jnp.asarray(state.documents.shape[1] - length, jnp.int32), state._replace(caches=tuple(caches))
    documents = jnp.pad(state.documents, ((0, 0), (0, 1)))
    rings = tuple(_to_ring(cache, c.aggregate) for cache in caches)
    return jnp.asarray(c.window, jnp.int32), state._replace(documents=documents, caches=rings)


def _to_ring(cache: VQCache, aggregate: bool) -> Ring:
    """Append an empty slot for the next token to the window, and the means to the values."""
    codes = jnp.pad(cache.codes, ((0, 0), (0, 0), (0, 1)))
    means = [cache.means] if aggregate else []
    values = jnp.concatenate([cache.values, jnp.zeros_like(cache.values[:, :, :1]), *means], axis=2)
    return Ring(codes, cache.counts, values)
