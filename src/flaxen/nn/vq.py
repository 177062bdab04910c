"""Attention over quantised keys: exact softmax attention to the whole past, at a cost linear in its length.

Quantised keys take only M different values, the vectors of a codebook. A query sees the last W keys individually, with
a bias that depends on their distance. A key that has left this window no longer has a distance bias, so its score
depends on its code alone. With n keys of code m, whose vector is c_m, their contribution to the softmax is

    Σ exp(q · c_m) v_j = exp(q · c_m + log n) · mean(v_j)

so a count and a mean value for each code represent all evicted keys exactly: this is the compressive cache.

Queries are computed in blocks of X tokens. The result does not depend on X: keys that are farther than W but have not
been evicted yet, because they are needed by the first queries of the block, are seen individually, without a distance
bias.
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
    """The state of one attention unit, carried from block to block and from call to call. Its size is constant."""

    codes: Int[Array, "B N W"]
    keys: Float[Array, "B N W H"]
    values: Float[Array, "B N W U"]
    counts: Float[Array, "B N M"]  # number of evicted keys with each code
    means: Float[Array, "B N M U"]  # mean of their values

    @staticmethod
    def empty(rows: int, heads: int, window: int, codes: int, d_k: int, d_v: int) -> "VQCache":
        """The cache before the first token. Code M, which does not exist, marks empty slots of the window."""
        return VQCache(
            jnp.full((rows, heads, window), codes, jnp.int32),
            jnp.zeros((rows, heads, window, d_k)),
            jnp.zeros((rows, heads, window, d_v)),
            jnp.zeros((rows, heads, codes)),
            jnp.zeros((rows, heads, codes, d_v)),
        )


class ScanOperands(NamedTuple):
    """The differentiable inputs of one key head of one row. S = W + T: keys and values start with the cached window."""

    queries: Float[Array, "J QX H"]  # the Q · X queries of each block, with the content bias
    distant: Float[Array, "J QX H"]  # the same queries with the distance bias
    keys: Float[Array, "S H"]
    values: Float[Array, "S U"]
    table: Float[Array, "Q E H"]  # embeddings of the distances W, W - 1, … 0


class ScanConstants(NamedTuple):
    """The inputs of one key head of one row that get no gradient."""

    codes: Int[Array, "S"]
    documents: Int[Array, "S"]
    before: Int[Array, "J"]  # the document whose means each block reads
    keep: Bool[Array, "J"]  # whether these means are kept after the block, or reset
    evicted: Bool[Array, "J X"]  # which of the X keys that leave the window after the block are merged into the means
    codebook: Float[Array, "M H"]
    counts: Float[Array, "M"]  # before the first block
    means: Float[Array, "M U"]  # before the first block


@dataclass(frozen=True)
class BlockwisePass:
    """Attention of T tokens, a multiple of the block, to themselves and to a cache."""

    spec: VQSpec
    documents: Int[Array, "B S"]  # document number of each token of the window and of this pass; 0 for padding
    latest: Int[Array, "B"]  # the document that the cached means belong to
    weights: Float[Array, "B T"] | None = None  # weight of each token in the codebook update; None: no update
    parallel: bool = False  # compute all blocks at once, for hardware that one block does not keep busy

    def attend(self, heads: HeadInputs, cache: VQCache) -> tuple[Float[Array, "B N Q T U"], VQCache]:
        """Return the attention output of each query and the cache after the last block."""
        assert heads.codes is not None
        spec, shape = self.spec, heads.queries.shape
        # Truncated backpropagation: no gradient flows into the cache of the previous pass.
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
        constants = lax.stop_gradient(self._constants(codes, heads.codebook, cache))
        attend_row = partial(_parallel_blocks if self.parallel else _scan_blocks, spec)
        # Every key head of every row is independent: [B, N, …] to [B · N, …].
        rows = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (operands, constants))
        out, counts, means = each_row(attend_row, rows)
        # [B · N, J, Q · X, U] to [B, N, Q, T, U].
        out = out.reshape(*shape[:2], -1, shape[2], spec.block, out.shape[-1]).swapaxes(2, 3).reshape(*shape[:4], -1)
        last = slice(keys.shape[2] - spec.window, None)
        counts, means = counts.reshape(cache.counts.shape), means.reshape(cache.means.shape)
        after = VQCache(codes[:, :, last], keys[:, :, last], values[:, :, last].astype(jnp.float32), counts, means)
        return out, lax.stop_gradient(after)

    def _split(self, q: Float[Array, "B N Q T H"]) -> Float[Array, "B N J QX H"]:
        """Split queries into blocks. The queries of a block that share a key head become one matrix."""
        b, n, query_heads, t, _ = q.shape
        blocks = t // self.spec.block
        q = q.reshape(b, n, query_heads, blocks, self.spec.block, -1).swapaxes(2, 3)
        return q.reshape(b, n, blocks, query_heads * self.spec.block, -1)

    def _constants(self, codes: Int[Array, "B N S"], codebook: Array | None, cache: VQCache) -> "ScanConstants":
        assert codebook is not None
        b, n = codes.shape[:2]
        per_row = (self.documents, *self._plan_evictions())
        documents, before, keep, evicted = (jnp.broadcast_to(a[:, None], (b, n, *a.shape[1:])) for a in per_row)
        codebooks = jnp.broadcast_to(codebook, (b, *codebook.shape))
        return ScanConstants(codes, documents, before, keep, evicted, codebooks, cache.counts, cache.means)

    def _plan_evictions(self) -> tuple[Int[Array, "B J"], Bool[Array, "B J"], Bool[Array, "B J X"]]:
        """For each block: the document whose means it reads, whether they are kept after it, which keys join them.

        Counts and means belong to one document at a time, that of the key evicted last. All later queries come after
        that key, so the evicted keys of earlier documents are never needed again: they are dropped.
        """
        spec = self.spec
        blocks = (self.documents.shape[1] - spec.window) // spec.block
        # Block i evicts the first X of its W + X keys: keys i · X to (i + 1) · X, counted from the cached window.
        evicted = self.documents[:, : blocks * spec.block].reshape(len(self.latest), blocks, spec.block)
        after = evicted[:, :, -1]
        before = jnp.concatenate([self.latest[:, None], after[:, :-1]], axis=1)
        if not spec.documents:
            return before, jnp.ones(before.shape, bool), evicted > 0
        return before, before == after, (evicted > 0) & (evicted == after[:, :, None])


# Scan form: the blocks of one key head of one row, one after the other. -----------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan_blocks(spec: VQSpec, operands: ScanOperands, constants: ScanConstants) -> tuple[Array, Array, Array]:
    """Attention output of all blocks, and counts and means after the last one.

    The backward pass is written by hand: JAX's own would save the softmax weights of every block, and would add each
    block's gradient of keys and values as an array as long as the sequence.
    """
    out, _, _, last = _scan_with_residuals(spec, operands, constants)
    return out, *last


def _scan_with_residuals(
    spec: VQSpec, operands: ScanOperands, constants: ScanConstants
) -> tuple[Array, SoftmaxScale, tuple, tuple]:
    """Attention output, its softmax scale, (counts, means) before each block, and (counts, means) after the last."""

    def body(carry: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], tuple]:
        counts, means = carry
        out, scale = block_forward(spec, _block_inputs(spec, operands, constants, i), counts, means)
        return _merge_evicted(spec, constants, operands.values, i, counts, means), (out, scale, counts, means)

    start = (constants.counts, constants.means)
    last, (out, scale, *past) = lax.scan(body, start, jnp.arange(len(operands.queries)))
    return out, scale, tuple(past), last


def _scan_blocks_forward(spec: VQSpec, operands: ScanOperands, constants: ScanConstants) -> tuple[tuple, tuple]:
    out, scale, past, last = _scan_with_residuals(spec, operands, constants)
    # Counts and means before each block are not saved: they would take a tenth of the memory, and recomputing them is
    # cheap.
    out, scale = jax.tree.map(save_for_backward, (out, scale))
    return (out, *last), (operands, constants, out, scale, past)


def _scan_blocks_backward(
    spec: VQSpec, residuals: tuple, cotangents: tuple[Array, Array, Array]
) -> tuple[ScanOperands, None]:
    """Gradients of the operands, computed from the last block to the first.

    The carry is the gradient of the means, and the sums of the gradients of keys, values and table. After block i,
    means' = retained · means + Σ share · value over the evicted keys, where retained and share depend on counts only
    and are constants. So an evicted value gets its share of the gradient of its code's mean, and the means before the
    block get the retained fraction of that gradient, plus the gradient from the block that has read them.
    """
    operands, constants, out, scale, past = residuals

    def body(carry: tuple[Array, Array, Array, Array], xs: tuple) -> tuple[tuple, tuple]:
        dkeys, dvalues, dtable, dmeans = carry
        i, dout, out, scale, counts, means = xs
        block = block_backward(spec, _block_inputs(spec, operands, constants, i), counts, means, out, scale, dout)
        dk, dv = block.keys, block.values
        if spec.through:
            if spec.aggregate:
                retained, _, share = _merge_weights(spec, constants, i, counts)
                codes = _slice_evicted(spec, constants.codes, i)
                through_means = (dmeans.at[codes].get(mode="fill", fill_value=0.0) * share[:, None]).astype(dv.dtype)
                dv = dv.at[: spec.block].add(through_means)
                dmeans = block.means + retained[:, None] * dmeans
        else:  # keys and values of the window come from earlier blocks and are constants
            present = (jnp.arange(len(dk)) >= spec.window)[:, None]
            dk, dv = jnp.where(present, dk, 0.0), jnp.where(present, dv, 0.0)
        # The W + X keys of neighbouring blocks overlap, so gradients are added into one array, in place.
        dkeys, dvalues = _add_slice(dkeys, dk, i * spec.block), _add_slice(dvalues, dv, i * spec.block)
        return (dkeys, dvalues, dtable + block.table, dmeans), (block.queries, block.distant)

    zero = (
        jnp.zeros_like(operands.keys),
        jnp.zeros(operands.values.shape, jnp.float32),
        jnp.zeros_like(operands.table),
        jnp.zeros_like(constants.means),
    )
    # The cotangents of counts and means after the last block are ignored: the caller stops gradients of the cache.
    xs = (jnp.arange(len(out)), cotangents[0], out, scale, *past)
    (dkeys, dvalues, dtable, _), (dqueries, ddistant) = lax.scan(body, zero, xs, reverse=True)
    return ScanOperands(dqueries, ddistant, dkeys, dvalues.astype(operands.values.dtype), dtable), None


_scan_blocks.defvjp(_scan_blocks_forward, _scan_blocks_backward)


def _add_slice(sums: Array, update: Array, start: Array) -> Array:
    """Add `update` to the rows of `sums` from `start` on."""
    old = lax.dynamic_slice_in_dim(sums, start, len(update))
    return lax.dynamic_update_slice_in_dim(sums, old + update.astype(sums.dtype), start, 0)


def _block_inputs(spec: VQSpec, operands: ScanOperands, constants: ScanConstants, i: Array) -> BlockInputs:
    """Cut out block i: its queries, and the W keys before it with its own X keys."""

    def cut(a: Array) -> Array:
        return lax.dynamic_slice_in_dim(a, i * spec.block, spec.window + spec.block)

    documents = cut(constants.documents)
    own = documents[spec.window :]
    return BlockInputs(
        operands.queries[i],
        operands.distant[i],
        cut(operands.keys),
        cut(operands.values),
        operands.table,
        constants.codebook,
        hidden_keys(spec, documents),
        own == constants.before[i] if spec.documents else None,
    )


def _slice_evicted(spec: VQSpec, a: Array, i: Array) -> Array:
    """The rows of `a`, which has one row per key, for the X keys that leave the window after block i."""
    return lax.dynamic_slice_in_dim(a, i * spec.block, spec.block)


def _merge_weights(spec: VQSpec, constants: ScanConstants, i: Array, counts: Array) -> tuple[Array, Array, Array]:
    """Weights that merge the keys evicted after block i into the means: the retained fraction of each old mean [M],
    the new counts [M], and the share of each evicted value in the new mean of its code [X].

    Means are stored instead of sums, so that numbers have the magnitude of a value however many keys there are. Code M,
    which is out of range, marks slots that were never filled: reads and writes there are dropped.
    """
    codes, joins = _slice_evicted(spec, constants.codes, i), constants.evicted[i].astype(jnp.float32)
    old = counts * constants.keep[i]
    new = old.at[codes].add(joins, mode="drop")
    divisor = jnp.maximum(new, 1.0)  # a code without keys has mean 0
    share = joins / divisor.at[codes].get(mode="fill", fill_value=1.0)
    return old / divisor, new, share


def _merge_evicted(
    spec: VQSpec, constants: ScanConstants, values: Array, i: Array, counts: Array, means: Array
) -> tuple[Float[Array, "M"], Float[Array, "M U"]]:
    """Counts and means after block i, with the keys that leave the window merged into them."""
    if not spec.collect:
        return counts, means
    retained, new, share = _merge_weights(spec, constants, i, counts)
    codes, evicted = _slice_evicted(spec, constants.codes, i), _slice_evicted(spec, values, i).astype(jnp.float32)
    merged = (retained[:, None] * means).at[codes].add(evicted * share[:, None], mode="drop")
    return spec.rounded(new), spec.rounded(merged)


# Parallel form: all blocks of one key head of one row at once. --------------------------------------------------------


def _parallel_blocks(spec: VQSpec, operands: ScanOperands, constants: ScanConstants) -> tuple[Array, Array, Array]:
    """Attention output of all blocks, and counts and means after the last one: the same results as `_scan_blocks`.

    JAX derives this form's backward pass, so the tests can check the two forms against each other.
    """
    blocks = jnp.arange(len(operands.queries))
    counts, means, last = _merge_all_blocks(spec, constants, operands.values, len(blocks))
    if not spec.through:
        counts, means = lax.stop_gradient((counts, means))

    def attend_block(i: Array, counts: Array, means: Array) -> Array:
        inputs = _block_inputs(spec, operands, constants, i)
        if not spec.through:
            inputs = inputs._replace(
                keys=_stop_gradient_of_window(spec, inputs.keys), values=_stop_gradient_of_window(spec, inputs.values)
            )
        return block_forward(spec, inputs, counts, means)[0]

    return jax.vmap(attend_block)(blocks, counts, means), *last


def _stop_gradient_of_window(spec: VQSpec, a: Float[Array, "S _"]) -> Float[Array, "S _"]:
    """Let gradients pass only to the tokens of the block itself."""
    return jnp.concatenate([lax.stop_gradient(a[: spec.window]), a[spec.window :]])


def _merge_all_blocks(
    spec: VQSpec, constants: ScanConstants, values: Array, n: int
) -> tuple[Array, Array, tuple[Array, Array]]:
    """Counts and means before each of n blocks, and (counts, means) after the last, by an associative scan.

    Element 0 of the scan is the initial cache, element i + 1 the counts and means of the keys that block i evicts. The
    prefix up to element i is what block i reads; log₂(n) rounds of pairwise merges compute all prefixes.
    """
    if not spec.collect:
        last = (constants.counts, constants.means)
        counts, means = (jnp.broadcast_to(a, (n, *a.shape)) for a in last)
        return counts, means, last

    def evicted_alone(i: Array) -> tuple[Array, Array]:
        """Counts and means of the keys that block i evicts, without those of earlier blocks."""
        zero = jnp.zeros_like(constants.counts)
        return _merge_evicted(spec, constants, values, i, zero, jnp.zeros_like(constants.means))

    def merge(a: tuple, b: tuple) -> tuple:
        """Merge range `a` of blocks with the range `b` after it. Pairs (count, mean) merge to the sum of counts and the
        mean weighted by counts, which is associative. If a block of `b` starts a new document, keep_b is
        False, and `a` is dropped."""
        keep_a, count_a, mean_a = a
        keep_b, count_b, mean_b = b
        retained = count_a * keep_b[..., None]
        count = retained + count_b
        share = (retained / jnp.maximum(count, 1.0))[..., None]
        return keep_a & keep_b, count, share * mean_a + (1 - share) * mean_b

    initial = (jnp.ones((1,), bool), constants.counts[None], constants.means[None])
    blocks = (constants.keep, *jax.vmap(evicted_alone)(jnp.arange(n)))
    elements = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), initial, blocks)
    _, counts, means = lax.associative_scan(merge, elements)
    return counts[:-1], means[:-1], (counts[-1], means[-1])
