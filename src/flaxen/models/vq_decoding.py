"""Transformer-VQ one token at a time, at a cost that does not grow with how many came before: `Decoder`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from flaxen.models import vq_lm
from flaxen.models.vq_lm import VQLM, Layer, State, Unit
from flaxen.nn import full
from flaxen.nn.layers import lay_out
from flaxen.nn.stack import unstack
from flaxen.nn.vq import Cache
from flaxen.nn.vq_block import NEVER


class Ring(NamedTuple):
    """What one attention remembers: the last C + 1 tokens in turn, each in the place of the one before them all, and
    the means of those that have left. Of a key only its code is kept: its score is that of the code.
    """

    codes: Int[Array, "R N E"]
    counts: Float[Array, "R N M"]
    values: Float[Array, "R N _ V"]  # of the tokens, then the means of codes: one array, read by one product


class Grown(NamedTuple):
    """What full attention remembers: everything."""

    keys: Float[Array, "R N S H"]
    values: Float[Array, "R N S V"]


class Decode(NamedTuple):
    """All that decoding carries from token to token; R rows are B inputs × G sequences of each."""

    time: Int[Array, ""]
    position: Int[Array, "R"]
    documents: Int[Array, "R _"]
    latest: Int[Array, "R"]
    units: tuple[Ring, ...] | tuple[Grown, ...]
    tables: tuple[Float[Array, "N G E H"], ...]  # of distances: made once


class VQDecoder(nnx.Module):
    """A Transformer-VQ one token at a time. Prompts are padded at the left."""

    def __init__(self, model: VQLM):
        self.model, self.config = model, model.config
        self.layers: tuple[Layer, ...] | None = nnx.data(lay_out(model.layers))

    def start(
        self, inputs: tuple[Int[Array, "B P"], Bool[Array, "B P"], State | None], length: int, beams: int, reorder: bool
    ) -> tuple[Int[Array, "B G P"], Decode]:
        """The prompts, for every beam, and a state that has read all of them but their last tokens. A prompt that goes
        on from a state is one token."""
        ids, valid, state = inputs
        c, rows = self.config, len(ids)
        if state is None:
            before, real = ids[:, :-1], valid[:, :-1]
            padding = -before.shape[1] % c.block
            before, real = (jnp.pad(a, ((0, 0), (padding, 0))) for a in (before, real))
            if c.attention == "full":
                return self._tokens(ids, beams), self._grown(before, real, length, beams)
            state = vq_lm.empty(c, rows)
            if before.shape[1]:
                _, state, _ = self.model(before, state, real)
        rings = []
        for i in range(c.n_layers):
            rings += [_ring(jax.tree.map(lambda a, i=i: a[i], cache), c.aggregate) for cache in state.caches]
        made = Decode(
            jnp.asarray(c.window, jnp.int32),
            state.position,
            jnp.pad(state.seen.documents, ((0, 0), (0, 1))),
            state.seen.latest,
            tuple(rings),
            self._tables(),
        )
        return self._tokens(ids, beams), _repeated(made, beams)

    def _tokens(self, ids: Array, beams: int) -> Array:
        return jnp.broadcast_to(ids[:, None], (len(ids), beams, ids.shape[1]))

    def _tables(self) -> tuple[Array, ...]:
        units = [unit for layer in unstack(self.model.layers) for unit in _units(layer)]
        return tuple(unit.table(self.config) for unit in units)

    def _grown(self, ids: Array, valid: Array, length: int, beams: int) -> Decode:
        """Full attention: keys and values of the prompt, with room for `length` more."""
        model, c = self.model, self.config
        state = vq_lm.empty(c, len(ids))
        documents = vq_lm.number_documents(c, ids, state, valid)
        positions = vq_lm.place(c, state, documents)
        x, found = model.embed(ids, positions), []
        room = ((0, 0), (0, 0), (0, length), (0, 0))
        for layer in unstack(model.layers):
            for unit in _units(layer):
                q, k, v, gate = unit.project(x, c)
                found.append(Grown(jnp.pad(k, room), jnp.pad(v, room)))
                if ids.shape[1]:
                    y = full.attend(*unit.biased(q, c), k, v, unit.table(c), documents, c.law)
                    x = x + unit.output(y, gate)
            if layer.mlp is not None and ids.shape[1]:
                x = x + layer.feed(x, c)
        after = positions[:, -1] + 1 if ids.shape[1] else state.position
        made = Decode(
            jnp.asarray(ids.shape[1], jnp.int32), after, jnp.pad(documents, ((0, 0), (0, length))), state.seen.latest,
            tuple(found), self._tables(),
        )  # fmt: skip
        return _repeated(made, beams)

    def step(self, tokens: Int[Array, "B G"], state: Decode) -> tuple[Float[Array, "B G V"], Decode]:
        """The logits after `tokens`."""
        c, model = self.config, self.model
        ids = tokens.reshape(-1)
        slots = state.documents.shape[1]
        at = state.time % slots
        last = lax.dynamic_index_in_dim(state.documents, (state.time - 1) % slots, 1, keepdims=False)
        number = jnp.maximum(last + jnp.isin(ids, jnp.asarray(c.eos_ids, jnp.int32)), 1)
        position = jnp.where(number != last, 0, state.position) if c.documents else state.position
        documents = lax.dynamic_update_index_in_dim(state.documents, number, at, 1)
        leaving = lax.dynamic_index_in_dim(documents, (state.time + 1) % slots, 1, keepdims=False)
        now = state._replace(documents=documents, position=position)
        x = model.embed(ids, position)[:, None]
        units, tables, grown = iter(state.units), iter(state.tables), []
        # Unrolled, because a scan over layers would copy what is remembered.
        for layer in self.layers or unstack(model.layers):
            for unit in _units(layer):
                y, one = self._unit(unit, x, now, next(units), next(tables), number, leaving)
                x = x + y
                grown.append(one)
            if layer.mlp is not None:
                x = x + layer.feed(x, c)
        hidden = x if model.norm is None else model.norm(x, jnp.dtype(c.compute))
        logits = model.output(hidden)[:, 0].reshape(*tokens.shape, -1)
        return logits, Decode(state.time + 1, position + 1, documents, leaving, tuple(grown), state.tables)

    def _unit(
        self, unit: Unit, x: Array, now: Decode, memory: Any, table: Array, number: Array, leaving: Array
    ) -> tuple[Array, Any]:
        c = self.config
        normed = unit.norm(x, jnp.dtype(c.compute))
        q, k, v, gate = unit.parts(unit.q(normed), unit.kvg(normed), c)
        queries, distant = (a[:, :, :, 0] for a in unit.biased(q, c))  # [R, N, G, H]
        by_distance = jnp.einsum("RNGH,NGEH->RNGE", distant, table)
        visible = now.documents > 0
        if c.documents:
            visible &= now.documents == number[:, None]
        if c.attention == "full":
            return self._seen_all(unit, queries, by_distance, k, v, gate, visible, now, memory)
        codes = unit.codebook.vectors()
        z, _ = unit.codebook.nearest(k)
        slots = c.window + 1
        at, out = now.time % slots, (now.time + 1) % slots
        ring = memory._replace(codes=lax.dynamic_update_slice_in_dim(memory.codes, z, at, 2))
        by_code = jnp.einsum("RNGH,NMH->RNGM", queries, codes)
        near = jnp.take_along_axis(by_code, jnp.minimum(ring.codes, c.n_codes - 1)[:, :, None], axis=-1)
        near = near + jnp.roll(by_distance, at + 1, axis=-1)
        near = jnp.where(visible[:, None, None], near, NEVER)
        scores = near
        if c.aggregate:
            far = by_code + jnp.where(ring.counts > 0, jnp.log(jnp.maximum(ring.counts, 1.0)), NEVER)[:, :, None]
            if c.documents:
                far = jnp.where((now.latest == number)[:, None, None, None], far, NEVER)
            scores = jnp.concatenate([near, far], axis=-1)
        p = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        # The token's own value is not in the ring yet. Were it written first, XLA would write it twice, each time into
        # a copy of all that is remembered.
        own = jnp.arange(p.shape[-1]) == at
        y = jnp.einsum("RNGE,RNEV->RNGV", jnp.where(own, 0, p), ring.values, preferred_element_type=jnp.float32)
        y = y + jnp.sum(jnp.where(own, p, 0), -1, keepdims=True) * v
        late = _after(y)
        if c.aggregate:
            ring = self._joined(ring, out, late, leaving, now.latest)
        values = lax.dynamic_update_slice_in_dim(ring.values, v.astype(ring.values.dtype), at + late, 2)
        ring = ring._replace(values=values)
        return unit.output(y[:, :, :, None].astype(v.dtype), gate), ring

    def _joined(self, ring: Ring, out: Array, late: Array, leaving: Array, latest: Array) -> Ring:
        """The token that leaves the window becomes a part of its code's mean."""
        c = self.config
        rows, heads = jnp.arange(len(leaving))[:, None], jnp.arange(c.key_heads)
        counts = ring.counts * (latest == leaving)[:, None, None] if c.documents else ring.counts
        code = lax.dynamic_index_in_dim(ring.codes, out, 2, keepdims=False)
        place = c.window + 1 + code  # beyond all means, for padding
        value = lax.dynamic_index_in_dim(ring.values, out, 2, keepdims=False)
        joins = (leaving > 0).astype(jnp.float32)[:, None]
        old = counts.at[rows, heads, code].get(mode="fill", fill_value=0.0)
        new = old + joins
        share = joins / jnp.maximum(new, 1.0)
        mean = ring.values.at[rows, heads, place].get(mode="fill", fill_value=0.0)
        mean = jnp.where((old > 0)[..., None], mean, 0.0)
        mean = mean * (1 - share)[..., None] + value * share[..., None]
        rounded = lambda a: a.astype(c.law.rounding).astype(jnp.float32)  # noqa: E731
        counts = counts.at[rows, heads, code].set(rounded(new), mode="drop")
        values = ring.values.at[rows, heads, place + late].set(rounded(mean), mode="drop")
        return ring._replace(counts=counts, values=values)

    def _seen_all(
        self, unit: Unit, queries: Array, by_distance: Array, k: Array, v: Array, gate: Array | None, visible: Array,
        now: Decode, memory: Grown,
    ) -> tuple[Array, Grown]:  # fmt: skip
        c = self.config
        distance = now.time - jnp.arange(memory.keys.shape[2])
        bias = jnp.take(by_distance, jnp.clip(c.window - distance, 0, c.window), axis=-1)
        scores = jnp.einsum("RNGH,RNSH->RNGS", queries, memory.keys)
        scores = scores + jnp.where((distance > 0) & (distance <= c.window), bias, 0.0)
        seen = visible & (distance > 0) & ((distance <= c.window) | c.aggregate)
        own = jnp.einsum("RNGH,RNTH->RNGT", queries, k) + by_distance[..., -1:]
        scores = jnp.concatenate([jnp.where(seen[:, None, None], scores, NEVER), own], axis=-1)
        p = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        y = jnp.einsum("RNGS,RNSV->RNGV", p[..., :-1], memory.values, preferred_element_type=jnp.float32)
        y = y + p[..., -1:] * v
        at = now.time + _after(y)  # as in a ring: written when all has been read
        grown = (lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), at, 2) for old, new in zip(memory, (k, v)))
        return unit.output(y[:, :, :, None].astype(v.dtype), gate), Grown(*grown)

    def select(self, state: Decode, beams: Int[Array, "B G"]) -> Decode:
        n = beams.shape[1]
        rows = (jnp.arange(len(beams))[:, None] * n + beams).reshape(-1)
        return _with_rows(state, lambda a: a[rows])


def _units(layer: Layer) -> list[Unit]:
    return [layer.first] if layer.second is None else [layer.first, layer.second]


def _with_rows(state: Decode, change: Any) -> Decode:
    per_row = (state.position, state.documents, state.latest, state.units)
    return state._replace(**dict(zip(("position", "documents", "latest", "units"), jax.tree.map(change, per_row))))


def _repeated(state: Decode, beams: int) -> Decode:
    return state if beams == 1 else _with_rows(state, lambda a: jnp.repeat(a, beams, axis=0))


def _after(read: Array) -> Int[Array, ""]:
    """0, known when `read` is. An index with it in waits for what was read: that can then be written over in its place,
    where XLA would else make a copy of it."""
    first = read.reshape(-1)[0]
    return (jnp.isnan(first) & (first == 0)).astype(jnp.int32)


def _ring(cache: Cache, aggregate: bool) -> Ring:
    """The next token's place is behind the window's last."""
    codes = jnp.pad(cache.codes, ((0, 0), (0, 0), (0, 1)))
    means = [cache.means] if aggregate else []
    values = jnp.concatenate([cache.values, jnp.zeros_like(cache.values[:, :, :1]), *means], axis=2)
    return Ring(codes, cache.counts, values)
