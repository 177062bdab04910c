"""Attention over quantised keys: exact softmax attention to all the past, at a cost linear in its length.

A query sees the last C keys one by one, with a bias for their distance. Keys that have left this window are known by
their codes alone: all keys with one code have one score, so their number and the mean of their values stand for them.
Queries go in blocks of W; the result does not depend on W. Axes as in nn/vq_plan.py.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from flaxen.nn.hardware import each_row
from flaxen.nn.stack import save_for_backward
from flaxen.nn.vq_block import BlockInputs, SoftmaxScale, block_backward, block_forward, hidden_keys
from flaxen.nn.vq_plan import HeadInputs, VQSpec


class VQCache(NamedTuple):
    """What one attention carries from block to block and from call to call. Its size does not depend on the past's."""

    codes: Int[Array, "B N W"]
    keys: Float[Array, "B N W H"]
    values: Float[Array, "B N W U"]
    counts: Float[Array, "B N M"]  # of keys that have left the window
    means: Float[Array, "B N M U"]  # of their values

    @staticmethod
    def empty(rows: int, heads: int, window: int, codes: int, d_k: int, d_v: int) -> "VQCache":
        return VQCache(
            jnp.full((rows, heads, window), codes, jnp.int32),
            jnp.zeros((rows, heads, window, d_k)),
            jnp.zeros((rows, heads, window, d_v)),
            jnp.zeros((rows, heads, codes)),
            jnp.zeros((rows, heads, codes, d_v)),
        )


class ScanOperands(NamedTuple):
    """One head of one row, before it is cut into blocks. Keys and values begin with those of the window."""

    queries: Float[Array, "J QX H"]  # R = G · W queries of a block, with what keys are compared to
    distant: Float[Array, "J QX H"]  # and with what distances are
    keys: Float[Array, "S H"]
    values: Float[Array, "S U"]
    table: Float[Array, "Q E H"]  # of the distances C, C - 1, … 0


class ScanConstants(NamedTuple):
    """The rest of it, through which no gradient goes."""

    codes: Int[Array, "S"]
    documents: Int[Array, "S"]
    before: Int[Array, "J"]
    keep: Bool[Array, "J"]
    evicted: Bool[Array, "J X"]
    codebook: Float[Array, "M H"]
    counts: Float[Array, "M"]
    means: Float[Array, "M U"]


@dataclass(frozen=True)
class BlockwisePass:
    """The plan of a pass over T tokens, a multiple of the block."""

    spec: VQSpec
    documents: Int[Array, "B S"]  # of each token of the window, then of the T at hand: from 1 on, 0 for padding
    latest: Int[Array, "B"]  # the document that the means are of
    weights: Float[Array, "B T"] | None = None  # which tokens codebooks learn from, if any
    parallel: bool = False  # all blocks at once: of use where one block cannot fill the hardware

    def attend(self, heads: HeadInputs, cache: VQCache) -> tuple[Float[Array, "B N Q T U"], VQCache]:
        """What each query sees, and the cache behind the last block."""
        assert heads.codes is not None
        spec, shape = self.spec, heads.queries.shape
        # No gradient goes into what the pass before has left.
        codes, keys, values = (
            jnp.concatenate([lax.stop_gradient(old), new.astype(old.dtype)], axis=2)
            for old, new in (
                (cache.codes, heads.codes),
                (cache.keys, heads.keys),
                (cache.values.astype(heads.values.dtype), heads.values),
            )
        )
        operands = ScanOperands(
            self._split(heads.queries),
            self._split(heads.distant),
            keys,
            values,
            jnp.broadcast_to(heads.table, (shape[0], *heads.table.shape)),
        )
        context = lax.stop_gradient(self._context(codes, heads.codebook, cache))
        one = partial(_parallel if self.parallel else _scanned, spec)
        rows = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (operands, context))
        out, counts, means = each_row(one, rows)
        out = out.reshape(*shape[:2], -1, shape[2], spec.block, out.shape[-1]).swapaxes(2, 3).reshape(*shape[:4], -1)
        last = slice(keys.shape[2] - spec.window, None)
        counts, means = counts.reshape(cache.counts.shape), means.reshape(cache.means.shape)
        after = VQCache(codes[:, :, last], keys[:, :, last], values[:, :, last].astype(jnp.float32), counts, means)
        return out, lax.stop_gradient(after)

    def _split(self, q: Float[Array, "B N Q T H"]) -> Float[Array, "B N J QX H"]:
        """Queries by block; those of one key head that stand in one block are one matrix."""
        b, n, g, t, _ = q.shape
        blocks = t // self.spec.block
        q = q.reshape(b, n, g, blocks, self.spec.block, -1).swapaxes(2, 3)
        return q.reshape(b, n, blocks, g * self.spec.block, -1)

    def _context(self, codes: Int[Array, "B N S"], codebook: Array | None, cache: VQCache) -> "ScanConstants":
        assert codebook is not None
        b, n = codes.shape[:2]
        per_row = (self.documents, *self._evictions())
        documents, before, keep, evicted = (jnp.broadcast_to(a[:, None], (b, n, *a.shape[1:])) for a in per_row)
        codebooks = jnp.broadcast_to(codebook, (b, *codebook.shape))
        return ScanConstants(codes, documents, before, keep, evicted, codebooks, cache.counts, cache.means)

    def _evictions(self) -> tuple[Int[Array, "B J"], Bool[Array, "B J"], Bool[Array, "B J X"]]:
        """For each block: whose means it reads, whether they are kept behind it, which keys then join them."""
        spec = self.spec
        blocks = (self.documents.shape[1] - spec.window) // spec.block
        evicted = self.documents[:, : blocks * spec.block].reshape(len(self.latest), blocks, spec.block)
        after = evicted[:, :, -1]
        before = jnp.concatenate([self.latest[:, None], after[:, :-1]], axis=1)
        if not spec.documents:
            return before, jnp.ones(before.shape, bool), evicted > 0
        return before, before == after, (evicted > 0) & (evicted == after[:, :, None])


# One head of one row, block after block. ------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scanned(spec: VQSpec, operands: ScanOperands, context: ScanConstants) -> tuple[Array, Array, Array]:
    out, _, _, last = _scan(spec, operands, context)
    return out, *last


def _scan(spec: VQSpec, operands: ScanOperands, context: ScanConstants) -> tuple[Array, SoftmaxScale, tuple, tuple]:
    """What is seen, the scale of its scores, counts and means before each block, and behind the last."""

    def body(carry: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], tuple]:
        counts, means = carry
        out, scale = block_forward(spec, _window(spec, operands, context, i), counts, means)
        return _joined(spec, context, operands.values, i, counts, means), (out, scale, counts, means)

    start = (context.counts, context.means)
    last, (out, scale, *past) = lax.scan(body, start, jnp.arange(len(operands.queries)))
    return out, scale, tuple(past), last


def _scanned_forward(spec: VQSpec, operands: ScanOperands, context: ScanConstants) -> tuple[tuple, tuple]:
    out, scale, past, last = _scan(spec, operands, context)
    # Counts and means before each block are not kept: to recompute them is cheap, and they are a tenth of the memory.
    out, scale = jax.tree.map(save_for_backward, (out, scale))
    return (out, *last), (operands, context, out, scale, past)


def _scanned_backward(
    spec: VQSpec, residuals: tuple, gradients: tuple[Array, Array, Array]
) -> tuple[ScanOperands, None]:
    """From the last block to the first. What is carried besides sums is the gradient of the means.

    Behind block i, means' = old · means + Σ share · value over the keys that leave the window, with old and share
    constants: so a leaving value gets its share of the gradient of its code's mean, and the means before the block get
    what is left of it, with what the block itself has read of them.
    """
    operands, context, out, scale, past = residuals

    def body(carry: tuple[Array, Array, Array, Array], xs: tuple) -> tuple[tuple, tuple]:
        dkeys, dvalues, dtable, dmeans = carry
        i, g, out, scale, counts, means = xs
        slopes = block_backward(spec, _window(spec, operands, context, i), counts, means, out, scale, g)
        dk, dv = slopes.keys, slopes.values
        if spec.through:
            if spec.aggregate:
                old, _, share = _shares(spec, context, i, counts)
                at = _evicted(spec, context.codes, i)
                moved = (dmeans.at[at].get(mode="fill", fill_value=0.0) * share[:, None]).astype(dv.dtype)
                dv = dv.at[: spec.block].add(moved)
                dmeans = slopes.means + old[:, None] * dmeans
        else:  # keys and values of the window are what the block before left: constants
            present = (jnp.arange(len(dk)) >= spec.window)[:, None]
            dk, dv = jnp.where(present, dk, 0.0), jnp.where(present, dv, 0.0)
        dkeys, dvalues = _add_at(dkeys, dk, i * spec.block), _add_at(dvalues, dv, i * spec.block)
        return (dkeys, dvalues, dtable + slopes.table, dmeans), (slopes.queries, slopes.distant)

    zero = (
        jnp.zeros_like(operands.keys),
        jnp.zeros(operands.values.shape, jnp.float32),
        jnp.zeros_like(operands.table),
        jnp.zeros_like(context.means),
    )
    xs = (jnp.arange(len(out)), gradients[0], out, scale, *past)
    (dkeys, dvalues, dtable, _), (dq, dd) = lax.scan(body, zero, xs, reverse=True)
    return ScanOperands(dq, dd, dkeys, dvalues.astype(operands.values.dtype), dtable), None


_scanned.defvjp(_scanned_forward, _scanned_backward)


def _add_at(sums: Array, more: Array, at: Array) -> Array:
    there = lax.dynamic_slice_in_dim(sums, at, len(more))
    return lax.dynamic_update_slice_in_dim(sums, there + more.astype(sums.dtype), at, 0)


def _window(spec: VQSpec, operands: ScanOperands, context: ScanConstants, i: Array) -> BlockInputs:
    """Of block i."""

    def cut(a: Array) -> Array:
        return lax.dynamic_slice_in_dim(a, i * spec.block, spec.window + spec.block)

    documents = cut(context.documents)
    own = documents[spec.window :]
    return BlockInputs(
        operands.queries[i],
        operands.distant[i],
        cut(operands.keys),
        cut(operands.values),
        operands.table,
        context.codebook,
        hidden_keys(spec, documents),
        own == context.before[i] if spec.documents else None,
    )


def _evicted(spec: VQSpec, a: Array, i: Array) -> Array:
    """Of the keys that leave the window behind block i."""
    return lax.dynamic_slice_in_dim(a, i * spec.block, spec.block)


def _shares(spec: VQSpec, context: ScanConstants, i: Array, counts: Array) -> tuple[Array, Array, Array]:
    """What remains of the old means, the new counts, and what share of its code's mean each leaving key is.

    Means instead of sums, so that numbers stay of the size of a value however many keys there are. A code of M, one too
    many, marks a slot that was never filled: what is read or written there is dropped.
    """
    codes, joins = _evicted(spec, context.codes, i), context.evicted[i].astype(jnp.float32)
    old = counts * context.keep[i]
    new = old.at[codes].add(joins, mode="drop")
    least = jnp.maximum(new, 1.0)
    share = joins / least.at[codes].get(mode="fill", fill_value=1.0)
    return old / least, new, share


def _joined(
    spec: VQSpec, context: ScanConstants, values: Array, i: Array, counts: Array, means: Array
) -> tuple[Float[Array, "M"], Float[Array, "M U"]]:
    """Counts and means with the keys that leave the window behind block i."""
    if not spec.collect:
        return counts, means
    old, new, share = _shares(spec, context, i, counts)
    codes, evicted = _evicted(spec, context.codes, i), _evicted(spec, values, i).astype(jnp.float32)
    joined = (old[:, None] * means).at[codes].add(evicted * share[:, None], mode="drop")
    return spec.rounded(new), spec.rounded(joined)


# One head of one row, all blocks at once. -----------------------------------------------------------------------------


def _parallel(spec: VQSpec, operands: ScanOperands, context: ScanConstants) -> tuple[Array, Array, Array]:
    """As `_scanned`. Differentiated by JAX, so that each checks the other."""
    blocks = jnp.arange(len(operands.queries))
    counts, means, last = _all_joined(spec, context, operands.values, len(blocks))
    if not spec.through:
        counts, means = lax.stop_gradient((counts, means))

    def one(i: Array, counts: Array, means: Array) -> Array:
        w = _window(spec, operands, context, i)
        if not spec.through:
            w = w._replace(keys=_constant_window(spec, w.keys), values=_constant_window(spec, w.values))
        return block_forward(spec, w, counts, means)[0]

    return jax.vmap(one)(blocks, counts, means), *last


def _constant_window(spec: VQSpec, a: Float[Array, "S _"]) -> Float[Array, "S _"]:
    """With gradients for the tokens of the block itself alone."""
    return jnp.concatenate([lax.stop_gradient(a[: spec.window]), a[spec.window :]])


def _all_joined(
    spec: VQSpec, context: ScanConstants, values: Array, n: int
) -> tuple[Array, Array, tuple[Array, Array]]:
    """Counts and means before each block, and behind the last, by an associative combination of neighbours."""
    if not spec.collect:
        last = (context.counts, context.means)
        counts, means = (jnp.broadcast_to(a, (n, *a.shape)) for a in last)
        return counts, means, last

    def alone(i: Array) -> tuple[Array, Array]:
        nothing = jnp.zeros_like(context.counts)
        return _joined(spec, context, values, i, nothing, jnp.zeros_like(context.means))

    def combine(a: tuple, b: tuple) -> tuple:
        """Part b behind part a: its keep says whether anything of a is left. (n, mean) pairs combine to the sum of
        counts and the weighted mean, which is associative."""
        keep_a, count_a, mean_a = a
        keep_b, count_b, mean_b = b
        left = count_a * keep_b[..., None]
        count = left + count_b
        share = (left / jnp.maximum(count, 1.0))[..., None]
        return keep_a & keep_b, count, share * mean_a + (1 - share) * mean_b

    first = (jnp.ones((1,), bool), context.counts[None], context.means[None])
    rest = (context.keep, *jax.vmap(alone)(jnp.arange(n)))
    parts = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, rest)
    _, counts, means = lax.associative_scan(combine, parts)
    return counts[:-1], means[:-1], (counts[-1], means[-1])
