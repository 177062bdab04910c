"""LongT5's encoder attention: a token sees its neighbours and, with transient-global attention, a sum of every block.

Local attention is a band: token t sees t - radius … t + radius. The queries of a block need one slice of the keys, so
keys and values are never copied, and the bias of a block is the same for all of them. Side tokens, the sums, join the
same softmax. Scores lie as [keys, queries], which makes every matmul run along rows and every reduction across
them; they live for one block of one head, and the backward recomputes them.
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

BLOCK = 64  # queries at a time: with radius 127 they touch 318 keys, of which each sees 255


class GlobalTokens(NamedTuple):
    """Which tokens are summed, and who sees the sums."""

    block: Int[Array, "B T"]  # the side token that a token is part of, or -1
    owner: Int[Array, "B Z"]  # the segment of a side token; 0 for one that does not exist
    bias: Float[Array, "N R"]  # R = 2 Z - 1; entry r is for global token - block of the query = r - (Z - 1)
    size: int  # tokens of a block


class LocalPlan(NamedTuple):
    """Who sees whom in a band, the same in all layers of a stack."""

    segments: Int[Array, "B T"]  # tokens see each other within a segment; 0 is padding
    band: Float[Array, "N S X"]  # bias and mask of a block of X queries: key s of its slice is s - radius - x away
    radius: int
    rate: float  # dropout of the weights
    side: GlobalTokens | None = None

    def rows(self) -> Any:
        return self.segments, self.side and (self.side.block, self.side.owner)

    def of(self, rows: Any) -> "LocalPlan":
        segments, of_side = rows
        side = self.side and self.side._replace(block=of_side[0], owner=of_side[1])
        return self._replace(segments=segments, side=side)

    def attend(self, q: Array, k: Array, v: Array, cache: None = None, key: Array | None = None) -> tuple[Array, None]:
        """What tokens see of their neighbours. An encoder's attention, so there is never a cache."""
        return attend_local(q, k, v, self, key), None


def plan_local(
    bias: RelativeBias, segments: Int[Array, "B T"], radius: int, rate: float, side: GlobalTokens | None = None
) -> LocalPlan:
    """The plan of a stack; with `side`, of transient-global attention."""
    block = min(BLOCK, segments.shape[1])
    width = -(-(block + 2 * radius) // 16) * 16
    distance = jnp.arange(width)[:, None] - radius - jnp.arange(block)
    band = bias(distance) + jnp.where(jnp.abs(distance) <= radius, 0.0, MASKED)
    return LocalPlan(segments, band, radius, rate, side)


def plan_global(bias: RelativeBias, segments: Int[Array, "B T"], size: int) -> GlobalTokens | None:
    """Blocks of `size` tokens, counted from the start of each segment; tokens behind its last whole one join that.

    None if no segment can have a whole block.
    """
    (batch, length), n_side = segments.shape, segments.shape[1] // size
    if not n_side:
        return None
    row, real = jnp.arange(batch)[:, None], segments > 0
    # By segment number: its tokens, its whole blocks, and what lies before it.
    count = jnp.zeros((batch, length + 1), jnp.int32).at[row, segments].add(real.astype(jnp.int32))
    whole = count // size
    tokens_before, blocks_before = (jnp.cumsum(a, axis=1) - a for a in (count, whole))

    def own(table: Array) -> Array:
        return table[row, segments]

    rank = jnp.cumsum(real, axis=1) - 1 - own(tokens_before)
    block = own(blocks_before) + jnp.minimum(rank // size, own(whole) - 1)
    block = jnp.where(real & (own(whole) > 0), block, -1)
    owner = jnp.zeros((batch, n_side + 1), jnp.int32).at[row, block].max(segments)[:, :n_side]
    return GlobalTokens(block, owner, bias(jnp.arange(1 - n_side, n_side)), size)


class TransientGlobalAttention(Attention):
    """Attention to a band and to side tokens, whose keys and values come from the same projections."""

    def __init__(self, d: int, n_heads: int, d_head: int, factor: float = 1.0, epsilon: float = 1e-6):
        super().__init__(d, n_heads, d_head, factor)
        self.norm = RMSNorm(d, epsilon, factor)

    def __call__(  # type: ignore[override]
        self, x: Float[Array, "B T D"], plan: LocalPlan, cache: None = None, key: Array | None = None
    ) -> tuple[Float[Array, "B T D"], None]:
        side = plan.side and self.keys_values(self.norm(block_sums(x, plan.side), x.dtype))
        return self.output(attend_local(self.query(x), *self.keys_values(x), plan, key, side)), None


def block_sums(x: Float[Array, "B T D"], side: GlobalTokens) -> Float[Array, "B Z D"]:
    """The tokens of each block added up, in f32."""
    n_side = side.owner.shape[1]
    into = jnp.where(side.block < 0, n_side, side.block)
    return jax.vmap(lambda x, into: jax.ops.segment_sum(x, into, n_side + 1))(x.astype(jnp.float32), into)[:, :-1]


def attend_local(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B N T H"],
    v: Float[Array, "B N T H"],
    plan: LocalPlan,
    key: Array | None = None,
    side: tuple[Float[Array, "B N Z H"], Float[Array, "B N Z H"]] | None = None,
) -> Float[Array, "B N T H"]:
    """Softmax attention over the band and over the side tokens, whose keys and values are `side`."""
    n_heads, length = q.shape[1:3]
    width, block = plan.band.shape[1:]
    n_blocks = -(-length // block)
    # Before the first key and behind the last there are keys of no segment, so that every slice is whole.
    tail = (0, n_blocks * block - length)
    ends = (plan.radius, (n_blocks - 1) * block + width - plan.radius - length)

    def padded(a: Array, by: tuple[int, int]) -> Array:
        return jnp.pad(a, [by if axis == 2 else (0, 0) for axis in range(a.ndim)])

    def for_heads(a: Array) -> Array:
        return jnp.broadcast_to(a[:, None], (len(a), n_heads, *a.shape[1:]))

    segments = for_heads(plan.segments)
    facts: tuple[Array, ...] = (padded(segments, tail), padded(segments, ends))
    tensors: tuple[Array, ...] = (
        save_for_backward(padded(q, tail)),
        save_for_backward(padded(k, ends)),
        save_for_backward(padded(v, ends)),
        plan.band,
    )
    few = 0
    if plan.side is not None and side is not None:
        tensors += (save_for_backward(side[0]), save_for_backward(side[1]), plan.side.bias)
        facts += (padded(for_heads(plan.side.block) + 1, tail) - 1, for_heads(plan.side.owner))
        few = min(block, block // plan.side.size + 2)  # that consecutive queries can be part of
    seed = jnp.zeros(2, jnp.uint32) if key is None else jax.random.key_data(key)
    static = _Static(block, width, few, 0.0 if key is None else plan.rate)
    return _banded(tensors, facts, seed, static)[:, :, :length]


class _Static(NamedTuple):
    t_block: int
    s_block: int
    few: int  # how many side tokens the queries of a block are part of, at most; 0 without side tokens
    rate: float


class _Head:
    """One head of one row, block by block of its queries. Parts of its keys: the slice, then the side tokens."""

    def __init__(self, index: Array, seed: Array, facts: tuple[Array, ...], band: Array, bias: Any, static: _Static):
        self.index, self.seed, self.band, self.bias, self.static = index, seed, band, bias, static
        self.queries, self.keys, *self.side = facts

    def queries_of(self, a: Array, i: Array) -> Array:
        return lax.dynamic_slice_in_dim(a, i * self.static.t_block, self.static.t_block)

    def keys_of(self, a: Array, i: Array, axis: int = 0) -> Array:
        return lax.dynamic_slice_in_dim(a, i * self.static.t_block, self.static.s_block, axis)

    def offsets(self, i: Array) -> list[Array]:
        """Bias and masks of each part, [keys, queries]."""
        mine = self.queries_of(self.queries, i)

        def unseen(keys: Array) -> Array:
            return jnp.where(keys[:, None] == mine, 0.0, MASKED)

        near = self.band + unseen(self.keys_of(self.keys, i))
        if not self.static.few:
            return [near]
        # Each query's bias is one of a few rows, by the side token that it is part of.
        first, member = self.membership(i)
        return [near, dot(self.side_rows(first, self.bias), member, (0, 0)) + unseen(self.side[1])]

    def membership(self, i: Array) -> tuple[Array, Array]:
        """The first side token that the queries of block i are part of, and [few, queries]: 1.0 at each one's."""
        block = self.queries_of(self.side[0], i)
        first = jnp.min(jnp.where(block < 0, len(self.side[1]), block))
        return first, (block == first + jnp.arange(self.static.few)[:, None]).astype(jnp.float32)

    def side_rows(self, first: Array, bias: Array) -> Array:
        """The bias seen by members of side tokens first, first + 1, …"""
        n = len(self.side[1])
        rows = n - 1 - first - jnp.arange(self.static.few)
        return jax.vmap(lambda at: lax.dynamic_slice_in_dim(bias, at, n))(rows)

    def keep(self, i: Array, part: int, shape: tuple[int, ...]) -> Array:
        """The dropout of a part's weights, scaled; the backward recomputes it."""
        index = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
        return scaled_keep(self.seed, (self.index, i, part), index, self.static.rate)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _banded(tensors: tuple[Array, ...], facts: tuple[Array, ...], seed: Array, static: _Static) -> Array:
    return _forward(tensors, facts, seed, static)[0]


def _split(tensors: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """What each head of each row has, and the biases, which all rows share, for every row."""
    q, k, v, band, *side = tensors
    biases = [band, *side[2:]]
    return (q, k, v, *side[:2]), tuple(jnp.broadcast_to(a, (len(q), *a.shape)) for a in biases)


def _forward(tensors: tuple[Array, ...], facts: tuple[Array, ...], seed: Array, static: _Static) -> tuple[Array, Any]:
    n_blocks = tensors[0].shape[2] // static.t_block

    def head(index: Array, own: tuple[Array, ...], biases: tuple[Array, ...], facts: tuple[Array, ...]) -> Any:
        own, biases, facts = compute_together(
            (own, biases, facts)
        )  # or all masks, [T, S], would be computed first and kept
        q, k, v, *side = own
        here = _Head(index, seed, facts, biases[0], biases[-1], static)
        vt = materialise(v.T)
        sides = [(side[0], side[1].T)] if side else []

        def block(i: Array) -> tuple[Array, Array]:
            mine, parts = here.queries_of(q, i), [(here.keys_of(k, i), here.keys_of(vt, i, 1)), *sides]
            scores = [dot(k, mine, (1, 1)) + offset for (k, _), offset in zip(parts, here.offsets(i))]
            top = jnp.stack([s.max(axis=0) for s in scores]).max(axis=0)
            weights = [jnp.exp(s - top) for s in scores]
            total = sum(w.sum(axis=0) for w in weights)
            if static.rate:
                weights = [w * here.keep(i, part, w.shape) for part, w in enumerate(weights)]
            outs = [dot(vt, w.astype(vt.dtype), (1, 0)) for (_, vt), w in zip(parts, weights)]
            return (sum(outs[1:], outs[0]) / total).T.astype(q.dtype), top + jnp.log(total)

        out, lse = lax.map(block, jnp.arange(n_blocks))
        return out.reshape(q.shape), lse.reshape(-1)

    arrays = (*_split(tensors), facts)
    out, lse = (save_for_backward(a) for a in few_heads_at_a_time(head, static.t_block * static.s_block, arrays))
    return out, (tensors, facts, seed, out, lse)


def _backward(static: _Static, residuals: Any, g: Array) -> tuple[Any, None, None]:
    tensors, facts, seed, out, lse = residuals
    n_blocks = g.shape[2] // static.t_block
    delta = jnp.einsum("BNTH,BNTH->BNT", g, out, preferred_element_type=jnp.float32)

    def head(
        index: Array, own: tuple[Array, ...], biases: tuple[Array, ...], facts: Any, g: Array, lse: Array, delta: Array
    ) -> Any:
        own, biases, facts = compute_together(
            (own, biases, facts)
        )  # or all masks, [T, S], would be computed first and kept
        q, k, v, *side = own
        here = _Head(index, seed, facts, biases[0], biases[-1], static)
        kt = materialise(k.T)
        sides = [(side[0], side[0].T, side[1])] if side else []

        def block(carry: Any, i: Array) -> tuple[Any, Array]:
            (dkeys, dvalues), dband, *dside_bias = carry
            mine, slope, lse_i, delta_i = (here.queries_of(a, i) for a in (q, g, lse, delta))
            dq, at = jnp.zeros(mine.shape[::-1]), (i * static.t_block, jnp.zeros_like(i))
            dkeys, dvalues = list(dkeys), list(dvalues)
            parts = [(here.keys_of(k, i), here.keys_of(kt, i, 1), here.keys_of(v, i)), *sides]
            for part, ((k_part, kt_part, v_part), offset) in enumerate(zip(parts, here.offsets(i))):
                weights = jnp.exp(dot(k_part, mine, (1, 1)) + offset - lse_i)
                dweights, through = dot(v_part, slope, (1, 1)), weights
                if static.rate:
                    keep = here.keep(i, part, weights.shape)
                    dweights, through = dweights * keep, weights * keep
                dscores = weights * (dweights - delta_i)
                if part == 0:
                    dband = dband + dscores
                else:
                    first, member = here.membership(i)
                    back = jax.linear_transpose(partial(here.side_rows, first), dside_bias[0])
                    dside_bias = [dside_bias[0] + back(dot(member, dscores, (1, 1)))[0]]
                dscores = dscores.astype(q.dtype)
                dk, dv = dot(dscores, mine, (1, 0)), dot(through.astype(g.dtype), slope, (1, 0))
                dq = dq + dot(kt_part, dscores, (1, 0))
                for sums, more in ((dkeys, dk), (dvalues, dv)):
                    # The slice is added to its place; side tokens are whole.
                    sums[part] = _add_at(sums[part], more, at) if part == 0 else sums[part] + more
            return ((tuple(dkeys), tuple(dvalues)), dband, *dside_bias), dq.T.astype(q.dtype)

        start = ((_zeros((k, *side[:1])), _zeros((v, *side[1:]))), *_zeros(biases))
        ends: Any
        ends, dq = lax.scan(block, start, jnp.arange(n_blocks))
        (dkeys, dvalues), *dbiases = ends
        dside = (dkeys[1], dvalues[1]) if side else ()
        own_gradients = (a.astype(q.dtype) for a in (dq.reshape(q.shape), dkeys[0], dvalues[0], *dside))
        return tuple(own_gradients), tuple(dbiases)

    arrays = (*_split(tensors), facts, g, lse, delta)
    (dq, dk, dv, *dside), dbiases = few_heads_at_a_time(head, static.t_block * static.s_block, arrays)
    dband, *dbias = (a.sum(axis=0) for a in dbiases)
    return (dq, dk, dv, dband, *dside, *dbias), None, None


def dot(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """A matmul of blocks with f32 sums."""
    return blockwise.dot(widen(a), widen(b), axes)


def _zeros(like: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(jnp.zeros(a.shape) for a in like)


def _add_at(a: Array, more: Array, at: tuple[Array, Array]) -> Array:
    return lax.dynamic_update_slice(a, lax.dynamic_slice(a, at, more.shape) + more, at)


_banded.defvjp(_forward, _backward)
