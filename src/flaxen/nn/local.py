"""LongT5's encoder attention: local (a band around the diagonal) and transient-global (a band plus global tokens).

In local attention token t sees tokens t - radius … t + radius. A block of queries needs one contiguous slice of the
keys, so keys and values are never copied into overlapping windows; bias and band mask are the same for all blocks.

In transient-global attention a token also sees global tokens: each is the normalised sum of a block of tokens,
recomputed in every layer. They enter the same softmax as additional keys.

Scores are laid out as [keys, queries], so that every matmul runs along rows and every reduction across them, which is
fast on CPUs. They exist for one block of one head at a time, and the backward pass recomputes them.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from flaxen.nn import blockwise
from flaxen.nn.attention import Attention
from flaxen.nn.blockwise import MASKED, scaled_keep
from flaxen.nn.hardware import few_heads_at_a_time, materialise, widen
from flaxen.nn.layers import RMSNorm
from flaxen.nn.position import RelativeBias
from flaxen.nn.stack import compute_together, save_for_backward

BLOCK = 64  # queries in a block: with radius 127 a block touches 318 keys, and each query sees 255 of them


class GlobalTokens(NamedTuple):
    """The global tokens of transient-global attention: which tokens each one sums, and which tokens see it."""

    block: Int[Array, "B T"]  # index of the global token that a token is part of, or -1
    owner: Int[Array, "B Z"]  # segment of each global token; 0 for unused ones
    bias: Float[Array, "N R"]  # R = 2 Z - 1; entry r is for (global token - global token of the query) = r - (Z - 1)
    size: int  # tokens in a block


class LocalPlan(NamedTuple):
    """Masks and biases of local attention, shared by all layers of a stack."""

    segments: Int[Array, "B T"]  # tokens see each other within a segment; 0 is padding
    band: Float[Array, "N S X"]  # bias and mask of a block: the distance of key s from query x is s - radius - x
    radius: int
    rate: float  # dropout rate of the attention weights
    global_tokens: GlobalTokens | None = None

    def rows(self) -> Any:
        """The arrays with a batch axis, for code that processes a few rows at a time; `of` puts them back."""
        return self.segments, self.global_tokens and (self.global_tokens.block, self.global_tokens.owner)

    def of(self, rows: Any) -> "LocalPlan":
        """The plan for some rows of the batch, given their part of the arrays that `rows` returned."""
        segments, global_arrays = rows
        global_tokens = self.global_tokens and self.global_tokens._replace(
            block=global_arrays[0], owner=global_arrays[1]
        )
        return self._replace(segments=segments, global_tokens=global_tokens)

    def attend(self, q: Array, k: Array, v: Array, cache: None = None, key: Array | None = None) -> tuple[Array, None]:
        """Local self-attention. Only encoders use it, so there is never a cache."""
        return attend_local(q, k, v, self, key), None


def plan_local(
    bias: RelativeBias, segments: Int[Array, "B T"], radius: int, rate: float, global_tokens: GlobalTokens | None = None
) -> LocalPlan:
    """The attention plan of a stack: local, or with `global_tokens` transient-global."""
    block = min(BLOCK, segments.shape[1])
    width = -(-(block + 2 * radius) // 16) * 16  # keys in the slice of a block, rounded up to a multiple of 16
    distance = jnp.arange(width)[:, None] - radius - jnp.arange(block)
    # The keys added by rounding up are farther away than the radius, so this masks them as well.
    band = bias(distance) + jnp.where(jnp.abs(distance) <= radius, 0.0, MASKED)
    return LocalPlan(segments, band, radius, rate, global_tokens)


def plan_global(bias: RelativeBias, segments: Int[Array, "B T"], size: int) -> GlobalTokens | None:
    """Assign tokens to blocks of `size`, counted from the start of each segment; the last block takes the remainder.

    A segment shorter than a block has no global token. Returns None if no segment can have a block.
    """
    (batch, length), n_global = segments.shape, segments.shape[1] // size
    if not n_global:
        return None
    row, real = jnp.arange(batch)[:, None], segments > 0
    # Tables by segment number: its tokens, its complete blocks, and the tokens and blocks of the segments before it.
    count = jnp.zeros((batch, length + 1), jnp.int32).at[row, segments].add(real.astype(jnp.int32))
    blocks = count // size
    tokens_before, blocks_before = (jnp.cumsum(a, axis=1) - a for a in (count, blocks))

    def per_token(table: Array) -> Array:
        return table[row, segments]

    rank = jnp.cumsum(real, axis=1) - 1 - per_token(tokens_before)  # position within the segment
    block = per_token(blocks_before) + jnp.minimum(rank // size, per_token(blocks) - 1)
    block = jnp.where(real & (per_token(blocks) > 0), block, -1)
    # Tokens without a block have index -1, the extra last column, which is cut off.
    owner = jnp.zeros((batch, n_global + 1), jnp.int32).at[row, block].max(segments)[:, :n_global]
    return GlobalTokens(block, owner, bias(jnp.arange(1 - n_global, n_global)), size)


class TransientGlobalAttention(Attention):
    """LongT5's transient-global attention: global tokens share the key and value projections of tokens."""

    def __init__(self, d: int, n_heads: int, d_head: int, factor: float = 1.0, epsilon: float = 1e-6):
        super().__init__(d, n_heads, d_head, factor)
        self.norm = RMSNorm(d, epsilon, factor)

    def __call__(  # type: ignore[override]
        self, x: Float[Array, "B T D"], plan: LocalPlan, cache: None = None, key: Array | None = None
    ) -> tuple[Float[Array, "B T D"], None]:
        global_kv = plan.global_tokens and self.keys_values(self.norm(block_sums(x, plan.global_tokens), x.dtype))
        return self.output(attend_local(self.query(x), *self.keys_values(x), plan, key, global_kv)), None


def block_sums(x: Float[Array, "B T D"], global_tokens: GlobalTokens) -> Float[Array, "B Z D"]:
    """Sum the tokens of each block, in f32. Tokens without a block go to an extra one, which is cut off."""
    n_global = global_tokens.owner.shape[1]
    index = jnp.where(global_tokens.block < 0, n_global, global_tokens.block)
    return jax.vmap(lambda x, index: jax.ops.segment_sum(x, index, n_global + 1))(x.astype(jnp.float32), index)[:, :-1]


def attend_local(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B N T H"],
    v: Float[Array, "B N T H"],
    plan: LocalPlan,
    key: Array | None = None,
    global_kv: tuple[Float[Array, "B N Z H"], Float[Array, "B N Z H"]] | None = None,
) -> Float[Array, "B N T H"]:
    """Softmax attention over the band and the global tokens, whose keys and values are `global_kv`."""
    n_heads, length = q.shape[1:3]
    width, block = plan.band.shape[1:]
    n_blocks = -(-length // block)
    # Queries are padded at the end to whole blocks, keys at both ends so that every slice is complete. Padded keys have
    # segment 0.
    # The last slice begins at key (n_blocks - 1) · block of the padded keys and has `width` of them.
    tail = (0, n_blocks * block - length)
    ends = (plan.radius, (n_blocks - 1) * block + width - plan.radius - length)

    def pad(a: Array, width: tuple[int, int]) -> Array:
        return jnp.pad(a, [width if axis == 2 else (0, 0) for axis in range(a.ndim)])

    def for_heads(a: Array) -> Array:
        return jnp.broadcast_to(a[:, None], (len(a), n_heads, *a.shape[1:]))

    segments = for_heads(plan.segments)
    # `tensors` have gradients, `indices` (segments and global tokens) have none.
    indices: tuple[Array, ...] = (pad(segments, tail), pad(segments, ends))
    tensors: tuple[Array, ...] = (
        save_for_backward(pad(q, tail)),
        save_for_backward(pad(k, ends)),
        save_for_backward(pad(v, ends)),
        plan.band,
    )
    few = 0
    if plan.global_tokens is not None and global_kv is not None:
        tensors += (save_for_backward(global_kv[0]), save_for_backward(global_kv[1]), plan.global_tokens.bias)
        # Add 1 before padding with 0 and subtract it afterwards, so that padded queries get -1: no global token.
        indices += (pad(for_heads(plan.global_tokens.block) + 1, tail) - 1, for_heads(plan.global_tokens.owner))
        # Maximum number of global tokens that the queries of a block are part of: each sums at least `size` tokens.
        few = min(block, block // plan.global_tokens.size + 2)
    seed = jnp.zeros(2, jnp.uint32) if key is None else jax.random.key_data(key)
    static = _Static(block, width, few, 0.0 if key is None else plan.rate)
    return _attend_band(tensors, indices, seed, static)[:, :, :length]


class _Static(NamedTuple):
    """Settings that are constants of the compiled program."""

    t_block: int  # queries in a block
    s_block: int  # keys in the slice of a block
    few: int  # maximum number of global tokens that the queries of a block are part of; 0 without global tokens
    rate: float


class _Head:
    """One head of one batch row, one block of queries at a time.

    The keys of a block have one or two parts: the slice of neighbouring tokens, then the global tokens.
    """

    def __init__(self, index: Array, seed: Array, indices: tuple[Array, ...], band: Array, bias: Any, static: _Static):
        self.index, self.seed, self.band, self.bias, self.static = index, seed, band, bias, static
        # The segments of queries and keys; then the global token of each query and the segment of each global token.
        self.queries, self.keys, *self.global_indices = indices

    def queries_of(self, a: Array, i: Array) -> Array:
        """The part of a query-sized array that belongs to block i."""
        return lax.dynamic_slice_in_dim(a, i * self.static.t_block, self.static.t_block)

    def keys_of(self, a: Array, i: Array, axis: int = 0) -> Array:
        """The slice of a key-sized array that block i sees."""
        return lax.dynamic_slice_in_dim(a, i * self.static.t_block, self.static.s_block, axis)

    def offsets(self, i: Array) -> list[Array]:
        """Bias and masks of each part of the keys, as [keys, queries]."""
        segments = self.queries_of(self.queries, i)

        def segment_mask(keys: Array) -> Array:
            return jnp.where(keys[:, None] == segments, 0.0, MASKED)

        near = self.band + segment_mask(self.keys_of(self.keys, i))
        if not self.static.few:
            return [near]
        # The bias depends on the global token that a query is part of, and the queries of a block are part of only a
        # few: a matmul with their one-hot membership copies the right row to every query.
        first, member = self.membership(i)
        return [near, dot(self.bias_rows(first, self.bias), member, (0, 0)) + segment_mask(self.global_indices[1])]

    def membership(self, i: Array) -> tuple[Array, Array]:
        """The first global token that the queries of block i are part of, and a one-hot matrix [few, queries]."""
        block = self.queries_of(self.global_indices[0], i)
        first = jnp.min(jnp.where(block < 0, len(self.global_indices[1]), block))
        return first, (block == first + jnp.arange(self.static.few)[:, None]).astype(jnp.float32)

    def bias_rows(self, first: Array, bias: Array) -> Array:
        """The bias [few, Z] of the global tokens as keys; row j is for queries in global token first + j."""
        n = len(self.global_indices[1])
        starts = n - 1 - first - jnp.arange(self.static.few)
        return jax.vmap(lambda start: lax.dynamic_slice_in_dim(bias, start, n))(starts)

    def keep(self, i: Array, part: int, shape: tuple[int, ...]) -> Array:
        """The scaled dropout mask of one part's attention weights; the backward pass recomputes it."""
        index = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
        return scaled_keep(self.seed, (self.index, i, part), index, self.static.rate)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend_band(tensors: tuple[Array, ...], indices: tuple[Array, ...], seed: Array, static: _Static) -> Array:
    return _forward(tensors, indices, seed, static)[0]


def _split(tensors: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Separate the arrays with a batch axis from the biases, which all rows share; broadcast these to every row."""
    q, k, v, band, *global_arrays = tensors
    # Every row gets a copy because rows are computed separately; `_backward` adds up the gradients of the copies.
    biases = [band, *global_arrays[2:]]
    return (q, k, v, *global_arrays[:2]), tuple(jnp.broadcast_to(a, (len(q), *a.shape)) for a in biases)


def _forward(tensors: tuple[Array, ...], indices: tuple[Array, ...], seed: Array, static: _Static) -> tuple[Array, Any]:
    n_blocks = tensors[0].shape[2] // static.t_block

    def attend_head(index: Array, own: tuple[Array, ...], biases: tuple[Array, ...], indices: tuple[Array, ...]) -> Any:
        # Without this, the masks of all blocks would be computed first and stored.
        own, biases, indices = compute_together((own, biases, indices))
        q, k, v, *global_kv = own  # global_kv: keys and values of the global tokens, if there are any
        head = _Head(index, seed, indices, biases[0], biases[-1], static)
        vt = materialise(v.T)  # values as [H, keys], so that their matmul with the weights runs along rows
        global_parts = [(global_kv[0], global_kv[1].T)] if global_kv else []

        def block(i: Array) -> tuple[Array, Array]:
            queries, parts = head.queries_of(q, i), [(head.keys_of(k, i), head.keys_of(vt, i, 1)), *global_parts]
            scores = [dot(k, queries, (1, 1)) + offset for (k, _), offset in zip(parts, head.offsets(i))]
            # One softmax over both parts: a common maximum and a common sum.
            top = jnp.stack([s.max(axis=0) for s in scores]).max(axis=0)
            weights = [jnp.exp(s - top) for s in scores]
            total = sum(w.sum(axis=0) for w in weights)
            if static.rate:
                weights = [w * head.keep(i, part, w.shape) for part, w in enumerate(weights)]
            outs = [dot(vt, w.astype(vt.dtype), (1, 0)) for (_, vt), w in zip(parts, weights)]
            return (sum(outs[1:], outs[0]) / total).T.astype(q.dtype), top + jnp.log(total)

        out, lse = lax.map(block, jnp.arange(n_blocks))
        return out.reshape(q.shape), lse.reshape(-1)

    arrays = (*_split(tensors), indices)
    out, lse = (save_for_backward(a) for a in few_heads_at_a_time(attend_head, static.t_block * static.s_block, arrays))
    return out, (tensors, indices, seed, out, lse)


def _backward(static: _Static, residuals: Any, g: Array) -> tuple[Any, None, None]:
    """Gradients of `tensors`; scores and dropout masks are recomputed, block by block."""
    tensors, indices, seed, out, lse = residuals
    n_blocks = g.shape[2] // static.t_block
    # The gradient of a softmax is weights · (dweights - sum of weights · dweights); that sum equals g · out.
    delta = jnp.einsum("BNTH,BNTH->BNT", g, out, preferred_element_type=jnp.float32)

    def head_gradients(
        index: Array,
        own: tuple[Array, ...],
        biases: tuple[Array, ...],
        indices: Any,
        g: Array,
        lse: Array,
        delta: Array,
    ) -> Any:
        # Without this, the masks of all blocks would be computed first and stored.
        own, biases, indices = compute_together((own, biases, indices))
        q, k, v, *global_kv = own
        head = _Head(index, seed, indices, biases[0], biases[-1], static)
        kt = materialise(k.T)
        global_parts = [(global_kv[0], global_kv[0].T, global_kv[1])] if global_kv else []

        def block(carry: Any, i: Array) -> tuple[Any, Array]:
            (dkeys, dvalues), dband, *dglobal_bias = carry
            queries, g_i, lse_i, delta_i = (head.queries_of(a, i) for a in (q, g, lse, delta))
            # dq is summed transposed, [H, queries], so that its matmul runs along rows like the others.
            dq, start = jnp.zeros(queries.shape[::-1]), (i * static.t_block, jnp.zeros_like(i))
            dkeys, dvalues = list(dkeys), list(dvalues)
            parts = [(head.keys_of(k, i), head.keys_of(kt, i, 1), head.keys_of(v, i)), *global_parts]
            for part, ((k_part, kt_part, v_part), offset) in enumerate(zip(parts, head.offsets(i))):
                # lse = log(sum of exp(score)), so this is the normalised softmax weight.
                weights = jnp.exp(dot(k_part, queries, (1, 1)) + offset - lse_i)
                dweights, dropped = dot(v_part, g_i, (1, 1)), weights
                if static.rate:
                    # `delta` needs no mask: it was computed from the output, which already has dropout in it.
                    keep = head.keep(i, part, weights.shape)
                    dweights, dropped = dweights * keep, weights * keep
                dscores = weights * (dweights - delta_i)
                if part == 0:
                    dband = dband + dscores
                else:
                    # The transpose of `offsets`: sum over the members of each global token, then over the slices.
                    first, member = head.membership(i)
                    back = jax.linear_transpose(partial(head.bias_rows, first), dglobal_bias[0])
                    dglobal_bias = [dglobal_bias[0] + back(dot(member, dscores, (1, 1)))[0]]
                dscores = dscores.astype(q.dtype)
                dk, dv = dot(dscores, queries, (1, 0)), dot(dropped.astype(g.dtype), g_i, (1, 0))
                dq = dq + dot(kt_part, dscores, (1, 0))
                for sums, gradient in ((dkeys, dk), (dvalues, dv)):
                    # A slice is added at its position among the keys; every block sees all global tokens.
                    sums[part] = _add_at(sums[part], gradient, start) if part == 0 else sums[part] + gradient
            return ((tuple(dkeys), tuple(dvalues)), dband, *dglobal_bias), dq.T.astype(q.dtype)

        start = ((_zeros((k, *global_kv[:1])), _zeros((v, *global_kv[1:]))), *_zeros(biases))
        ends: Any
        ends, dq = lax.scan(block, start, jnp.arange(n_blocks))
        (dkeys, dvalues), *dbiases = ends
        dglobal = (dkeys[1], dvalues[1]) if global_kv else ()
        own_gradients = (a.astype(q.dtype) for a in (dq.reshape(q.shape), dkeys[0], dvalues[0], *dglobal))
        return tuple(own_gradients), tuple(dbiases)

    arrays = (*_split(tensors), indices, g, lse, delta)
    (dq, dk, dv, *dglobal), dbiases = few_heads_at_a_time(head_gradients, static.t_block * static.s_block, arrays)
    dband, *dbias = (a.sum(axis=0) for a in dbiases)
    return (dq, dk, dv, dband, *dglobal, *dbias), None, None


def dot(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Matrix product of blocks with f32 accumulation, in f32 if the target has no bf16 kernel for it."""
    return blockwise.dot(widen(a), widen(b), axes)


def _zeros(like: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(jnp.zeros(a.shape) for a in like)


def _add_at(a: Array, more: Array, start: tuple[Array, Array]) -> Array:
    return lax.dynamic_update_slice(a, lax.dynamic_slice(a, start, more.shape) + more, start)


_attend_band.defvjp(_forward, _backward)
