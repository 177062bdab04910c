"""Full softmax attention: in blocks, with an online softmax and a backward of its own; and the textbook form.

The bias is never stored as [N, T, S]: a relative bias depends on the distance alone, so each block of it is cut
from one vector of T + S - 1 distances.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from flaxen.nn.hardware import few_heads_at_a_time, materialise
from flaxen.nn.layers import keep_mask
from flaxen.nn.stack import compute_together, save_for_backward

# Finite, so that a row whose keys are all masked is a mean over garbage and not NaN.
MASKED = -1e9
# Blocks up to which JAX may compute masks and biases before the loops and keep them for all layers. Beyond, they are
# tied to q, or it would keep [N, T, S].
BLOCKS_OF_MASKS = 16


class Plan(NamedTuple):
    """Who sees whom, the same in all layers of a stack: which keys exist, and the bias by distance."""

    valid: Bool[Array, "B S"] | None = None  # True for real keys
    bias: Float[Array, "N R"] | None = None  # R = T + S - 1; entry r is for key - query = r - (T - 1)
    causal: bool = False
    rate: float = 0.0  # dropout of the weights
    scale: Array | None = None  # of the scores, where it differs from layer to layer
    segments: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None  # instead of `valid`: each sees its own

    def rows(self) -> Any:
        """What differs from row to row of the batch."""
        return self.valid, self.segments

    def seeing(self, queries: Array | None, keys: Array | None) -> "Plan":
        """With a mask of the keys (True for real ones), or with numbers of the segments of both; None is no mask."""
        if queries is None or keys is None or keys.dtype == bool:
            return self._replace(valid=keys)
        return self._replace(segments=(queries, keys))

    def scaled(self, q: Array) -> Array:
        return q if self.scale is None else q * self.scale.astype(q.dtype)

    def of(self, rows: Any) -> "Plan":
        """The plan for some rows, out of what `rows` gave."""
        return self._replace(valid=rows[0], segments=rows[1])

    def attend(self, q: Array, k: Array, v: Array, cache: Any = None, key: Array | None = None) -> tuple[Array, Any]:
        """What tokens see of each other. A cache takes their keys and values as those of its prompt."""
        return self.read(q, (k, v), key), None if cache is None else cache.with_prompt(k, v)

    def read(self, q: Array, source: tuple[Array, Array], key: Array | None = None) -> Array:
        """What tokens see of the given keys and values."""
        return attend(self.scaled(q), *source, self, key)


def attend(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B N S H"],
    v: Float[Array, "B N S H"],
    plan: Plan,
    key: Array | None = None,
    block: int = 256,
) -> Float[Array, "B N T H"]:
    """Softmax attention in blocks of queries and keys; memory linear in length, forward and backward."""
    (batch, n_heads, length, _), s = q.shape, k.shape[2]
    t_block, s_block = _even(length, block), _even(s, block)
    t_pad, s_pad = -length % t_block, -s % s_block
    valid = jnp.ones((batch, s), bool) if plan.valid is None else plan.valid
    queries, keys = plan.segments or (jnp.ones((batch, length), jnp.int32), valid.astype(jnp.int32))
    bias = jnp.zeros((n_heads, length + s - 1)) if plan.bias is None else plan.bias
    q = jnp.pad(q, ((0, 0), (0, 0), (0, t_pad), (0, 0)))
    k, v = (jnp.pad(a, ((0, 0), (0, 0), (0, s_pad), (0, 0))) for a in (k, v))
    segments = (jnp.pad(queries, ((0, 0), (0, t_pad))), jnp.pad(keys, ((0, 0), (0, s_pad))))
    # Padded queries come after the real ones, so the vector of distances grows at its low end.
    bias = jnp.pad(bias, ((0, 0), (t_pad, s_pad)))
    rate = 0.0 if key is None else plan.rate
    seed = jnp.zeros(2, jnp.uint32) if key is None else jax.random.key_data(key)
    static = _Static(t_block, s_block, plan.causal, plan.bias is not None, plan.segments is not None, rate)
    return _blockwise(save_for_backward(q), save_for_backward(k), save_for_backward(v), bias, segments, seed, static)[
        :, :, :length
    ]


def attend_plain(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B N S H"] | Float[Array, "B N H S"],
    v: Float[Array, "B N S H"],
    bias: Float[Array, "#B #N #T #S"],
    transposed: bool = False,
) -> Float[Array, "B N T H"]:
    """The textbook form, for few queries; `bias` holds masks. With `transposed`, keys are [B, N, H, S]."""
    rule = "BNTH,BNHS->BNTS" if transposed else "BNTH,BNSH->BNTS"
    scores = jnp.einsum(rule, q, k, preferred_element_type=jnp.float32) + bias
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("BNTS,BNSH->BNTH", weights, v, preferred_element_type=jnp.float32).astype(q.dtype)


class _Static(NamedTuple):
    t_block: int
    s_block: int
    causal: bool
    biased: bool
    segmented: bool
    rate: float


def _even(length: int, block: int) -> int:
    """The block length near `block` that pads `length` least: equal blocks rather than a short last one."""
    return -(-length // -(-length // block))


def _toeplitz(window: Float[Array, "R"], t: int, s: int) -> Float[Array, "T S"]:
    """M[i, j] = window[j - i + t - 1] from R = t + s - 1 distances: each row is a slice of them."""
    return jax.vmap(lambda i: lax.dynamic_slice_in_dim(window, t - 1 - i, s))(jnp.arange(t))


class _Head:
    """One head of one row: its scores in blocks, and their transposes."""

    def __init__(self, index: Array, bias: Array, segments: Any, seed: Array, n_t: int, static: _Static):
        self.index, self.bias, self.seed, self.n_t, self.static = index, bias, seed, n_t, static
        self.queries, self.keys = segments

    def window(self, i: Array, j: Array) -> Array:
        """Where the distances of block (i, j) begin in the vector of them all."""
        return (self.n_t - 1 - i) * self.static.t_block + j * self.static.s_block

    def offset(self, i: Array, j: Array, transposed: bool) -> Array:
        """Bias and masks of block (i, j): what is added to its products."""
        t, s = self.static.t_block, self.static.s_block
        keys = lax.dynamic_slice_in_dim(self.keys, j * s, s)
        keys = keys[:, None] if transposed else keys[None]
        queries: Array | int = 1
        if self.static.segmented:
            mine = lax.dynamic_slice_in_dim(self.queries, i * t, t)
            queries = mine[None] if transposed else mine[:, None]
        hidden = jnp.where(keys == queries, 0.0, MASKED)
        if self.static.causal:
            rows, columns = i * t + jnp.arange(t), j * s + jnp.arange(s)
            ahead = columns[:, None] > rows if transposed else columns > rows[:, None]
            hidden = jnp.where(ahead, MASKED, hidden)
        if self.static.biased:
            window = lax.dynamic_slice_in_dim(self.bias, self.window(i, j), t + s - 1)
            block = _toeplitz(window[::-1], s, t) if transposed else _toeplitz(window, t, s)
            hidden = hidden + materialise(block)  # fused with what reads it, it would be computed by element
        return hidden

    def keep(self, i: Array, j: Array, transposed: bool) -> Array:
        """The dropout mask of block (i, j), scaled; the backward recomputes it, transposed."""
        t, s = self.static.t_block, self.static.s_block
        rows, columns = jnp.arange(t, dtype=jnp.uint32), jnp.arange(s, dtype=jnp.uint32)
        index = rows * s + columns[:, None] if transposed else rows[:, None] * s + columns
        return scaled_keep(self.seed, (self.index, i, j), index, self.static.rate)


def scaled_keep(seed: Array, numbers: tuple[Any, ...], index: Array, rate: float) -> Array:
    """The dropout mask of the block of weights that `numbers` name, scaled; `index` numbers its entries."""
    key = jax.random.wrap_key_data(seed)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return jnp.where(keep_mask(key, index, rate), 1.0 / (1.0 - rate), 0.0)


def dot(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=jnp.float32)


def _blocks(a: Array, block: int) -> Array:
    return a.reshape(-1, block, *a.shape[1:])


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _blockwise(q: Array, k: Array, v: Array, bias: Array, segments: Any, seed: Array, static: _Static) -> Array:
    return _forward(q, k, v, bias, segments, seed, static)[0]


def _spread(bias: Array, segments: Any, like: Array) -> tuple[Array, Any]:
    """Bias and segments for every head of every row."""
    shape = like.shape[:2]

    def for_heads(a: Array) -> Array:
        return jnp.broadcast_to(a[:, None], (*shape, a.shape[1]))

    return jnp.broadcast_to(bias, (*shape, bias.shape[1])), jax.tree.map(for_heads, segments)


def _forward(
    q: Array, k: Array, v: Array, bias: Array, segments: Any, seed: Array, static: _Static
) -> tuple[Array, tuple[Any, ...]]:
    n_t, n_s = q.shape[2] // static.t_block, k.shape[2] // static.s_block

    def head(index: Array, q: Array, k: Array, v: Array, bias: Array, segments: Any) -> tuple[Array, Array]:
        if n_t * n_s > BLOCKS_OF_MASKS:
            q, bias, segments = compute_together((q, bias, segments))
        here = _Head(index, bias, segments, seed, n_t, static)
        ks, vs = _blocks(k, static.s_block), _blocks(v, static.s_block)

        def row(i: Array, q: Array) -> tuple[Array, Array]:
            def column(carry: Any, jth: Any) -> tuple[Any, None]:
                (top, total, acc), (j, k, v) = carry, jth
                scores = dot(q, k, (1, 1)) + here.offset(i, j, transposed=False)
                new_top = jnp.maximum(top, scores.max(axis=1))
                weights = jnp.exp(scores - new_top[:, None])
                shrink = jnp.exp(top - new_top)
                total = total * shrink + weights.sum(axis=1)
                if static.rate:
                    weights = weights * here.keep(i, j, transposed=False)
                return (new_top, total, acc * shrink[:, None] + dot(weights.astype(v.dtype), v, (1, 0))), None

            start = (jnp.full(len(q), -jnp.inf), jnp.zeros(len(q)), jnp.zeros(q.shape))
            (top, total, acc), _ = lax.scan(column, start, (jnp.arange(n_s), ks, vs))
            return (acc / total[:, None]).astype(q.dtype), top + jnp.log(total)

        out, lse = lax.map(lambda xs: row(*xs), (jnp.arange(n_t), _blocks(q, static.t_block)))
        return out.reshape(q.shape), lse.reshape(-1)

    arrays = (q, k, v, *_spread(bias, segments, q))
    out, lse = (save_for_backward(a) for a in few_heads_at_a_time(head, static.t_block * static.s_block, arrays))
    return out, (q, k, v, bias, segments, seed, out, lse)


def _backward(static: _Static, residuals: tuple[Any, ...], g: Array) -> tuple[Array | None, ...]:
    """Scores are recomputed, transposed: then every matmul but one runs along rows, which CPUs do twice as fast."""
    q, k, v, bias, segments, seed, out, lse = residuals
    t, s = static.t_block, static.s_block
    n_t, n_s = q.shape[2] // t, k.shape[2] // s
    delta = jnp.einsum("BNTH,BNTH->BNT", g, out, preferred_element_type=jnp.float32)
    gather = jax.linear_transpose(lambda w: _toeplitz(w[::-1], s, t), jax.ShapeDtypeStruct((t + s - 1,), jnp.float32))

    def head(
        index: Array, q: Array, k: Array, v: Array, g: Array, lse: Array, delta: Array, bias: Array, segments: Any
    ) -> Any:
        if n_t * n_s > BLOCKS_OF_MASKS:
            q, bias, segments = compute_together((q, bias, segments))
        here = _Head(index, bias, segments, seed, n_t, static)
        ks, vs = _blocks(k, s), _blocks(v, s)
        kts = materialise(ks.swapaxes(1, 2))

        def row(carry: Any, ith: Any) -> tuple[Any, Array]:
            (dks, dvs, dbias), (i, q, g, lse, delta) = carry, ith

            def column(carry: Any, jth: Any) -> tuple[Any, tuple[Array, Array]]:
                (dq, dbias), (j, k, kt, v, dk, dv) = carry, jth
                weights = jnp.exp(dot(k, q, (1, 1)) + here.offset(i, j, transposed=True) - lse)  # [s, t]
                dweights = dot(v, g, (1, 1))
                dropped = weights
                if static.rate:
                    keep = here.keep(i, j, transposed=True)
                    dropped, dweights = weights * keep, dweights * keep
                dv = dv + dot(dropped.astype(g.dtype), g, (1, 0))
                dscores = weights * (dweights - delta)
                if static.biased:
                    at = here.window(i, j)
                    more = lax.dynamic_slice_in_dim(dbias, at, t + s - 1) + gather(dscores)[0]
                    dbias = lax.dynamic_update_slice_in_dim(dbias, more, at, 0)
                dscores = dscores.astype(q.dtype)
                dk = dk + dot(dscores, q, (1, 0))
                return (dq + dot(kt, dscores, (1, 0)), dbias), (dk, dv)

            blocks = (jnp.arange(n_s), ks, kts, vs, dks, dvs)
            (dq, dbias), (dks, dvs) = lax.scan(column, (jnp.zeros(q.shape[::-1]), dbias), blocks)
            return (dks, dvs, dbias), dq.T.astype(q.dtype)

        start = (jnp.zeros(ks.shape), jnp.zeros(vs.shape), jnp.zeros(bias.shape))
        rows = (jnp.arange(n_t), *(_blocks(a, t) for a in (q, g, lse, delta)))
        (dks, dvs, dbias), dqs = lax.scan(row, start, rows)
        return dqs.reshape(q.shape), dks.reshape(k.shape).astype(k.dtype), dvs.reshape(v.shape).astype(v.dtype), dbias

    arrays = (q, k, v, g, lse, delta, *_spread(bias, segments, q))
    dq, dk, dv, dbias = few_heads_at_a_time(head, t * s, arrays)
    return dq, dk, dv, dbias.sum(axis=0), None, None


_blockwise.defvjp(_forward, _backward)
