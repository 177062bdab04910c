"""Full softmax attention: `attend` works block by block, `attend_plain` is the textbook form.

`attend` is FlashAttention's algorithm: an online softmax over blocks of keys, and a custom backward pass that
recomputes the scores, so that memory is linear in the length. The relative bias is never stored as [N, T, S] either:
it depends only on the distance, so each block of it is a Toeplitz matrix cut from one vector of T + S - 1 distances.
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

# Finite, so that a query whose keys are all masked returns a meaningless average instead of NaN.
MASKED = -1e9
# Up to this many blocks, JAX may hoist masks and biases out of the loops and share them between layers. With more
# blocks they are tied to q, because the hoisted arrays would take memory of size [N, T, S].
BLOCKS_OF_MASKS = 16


class Plan(NamedTuple):
    """Masks and relative bias of full attention, shared by all layers of a stack."""

    valid: Bool[Array, "B S"] | None = None  # True for real keys
    bias: Float[Array, "N R"] | None = None  # R = T + S - 1; entry r is for key - query = r - (T - 1)
    causal: bool = False
    rate: float = 0.0  # dropout rate of the attention weights
    scale: Array | None = None  # scale factor of the scores, if it differs between layers
    # Instead of `valid`: segment numbers of queries and keys, for packed rows. A query sees only keys of its own
    # segment.
    segments: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None

    def rows(self) -> Any:
        """The arrays with a batch axis, for code that processes a few rows at a time; `of` puts them back."""
        return self.valid, self.segments

    def seeing(self, queries: Array | None, keys: Array | None) -> "Plan":
        """Set the mask: a boolean mask of the keys (True for real ones), or segment numbers of queries and keys.

        None means no mask.
        """
        if queries is None or keys is None or keys.dtype == bool:
            return self._replace(valid=keys)
        return self._replace(segments=(queries, keys))

    def scaled(self, q: Array) -> Array:
        """Multiply the queries by the layer's scale, if there is one."""
        return q if self.scale is None else q * self.scale.astype(q.dtype)

    def of(self, rows: Any) -> "Plan":
        """The plan for some rows of the batch, given their part of the arrays that `rows` returned."""
        return self._replace(valid=rows[0], segments=rows[1])

    def attend(self, q: Array, k: Array, v: Array, cache: Any = None, key: Array | None = None) -> tuple[Array, Any]:
        """Self-attention. If a cache is given, the keys and values are stored in it as those of the prompt."""
        return self.read(q, (k, v), key), None if cache is None else cache.with_prompt(k, v)

    def read(self, q: Array, source: tuple[Array, Array], key: Array | None = None) -> Array:
        """Attend to the keys and values in `source`."""
        return attend(self.scaled(q), *source, self, key)


def attend(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B N S H"],
    v: Float[Array, "B N S H"],
    plan: Plan,
    key: Array | None = None,
    block: int = 256,
) -> Float[Array, "B N T H"]:
    """Softmax attention in blocks of queries and keys, with memory linear in length, forward and backward."""
    (batch, n_heads, length, _), s = q.shape, k.shape[2]
    t_block, s_block = _even(length, block), _even(s, block)
    t_pad, s_pad = -length % t_block, -s % s_block
    valid = jnp.ones((batch, s), bool) if plan.valid is None else plan.valid
    queries, keys = plan.segments or (jnp.ones((batch, length), jnp.int32), valid.astype(jnp.int32))
    bias = jnp.zeros((n_heads, length + s - 1)) if plan.bias is None else plan.bias
    q = jnp.pad(q, ((0, 0), (0, 0), (0, t_pad), (0, 0)))
    k, v = (jnp.pad(a, ((0, 0), (0, 0), (0, s_pad), (0, 0))) for a in (k, v))
    segments = (jnp.pad(queries, ((0, 0), (0, t_pad))), jnp.pad(keys, ((0, 0), (0, s_pad))))
    # The padded queries come after the real ones, so their distances (key - query) extend the vector at its low end.
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
    """Softmax attention with all scores at once, for few queries; `bias` includes masks.

    With `transposed`, keys are [B, N, H, S].
    """
    rule = "BNTH,BNHS->BNTS" if transposed else "BNTH,BNSH->BNTS"
    scores = jnp.einsum(rule, q, k, preferred_element_type=jnp.float32) + bias
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("BNTS,BNSH->BNTH", weights, v, preferred_element_type=jnp.float32).astype(q.dtype)


class _Static(NamedTuple):
    """Settings that are constants of the compiled program."""

    t_block: int  # queries in a block
    s_block: int  # keys in a block
    causal: bool
    biased: bool
    segmented: bool
    rate: float


def _even(length: int, block: int) -> int:
    """The block length, at most `block`, that needs the least padding: equal blocks rather than a short last one."""
    return -(-length // -(-length // block))


def _toeplitz(window: Float[Array, "R"], t: int, s: int) -> Float[Array, "T S"]:
    """Expand R = t + s - 1 distances to the matrix M[i, j] = window[j - i + t - 1]; each row is a slice of them."""
    return jax.vmap(lambda i: lax.dynamic_slice_in_dim(window, t - 1 - i, s))(jnp.arange(t))


class _Head:
    """One head of one batch row: the bias, masks and dropout of each block of its scores.

    Block (i, j) holds queries i · t_block … and keys j · s_block …. The forward pass uses blocks [queries, keys], the
    backward pass their transposes [keys, queries].
    """

    def __init__(self, index: Array, bias: Array, segments: Any, seed: Array, n_t: int, static: _Static):
        self.index, self.bias, self.seed, self.n_t, self.static = index, bias, seed, n_t, static
        self.queries, self.keys = segments

    def window(self, i: Array, j: Array) -> Array:
        """Where the t_block + s_block - 1 distances of block (i, j) begin in the vector of all distances."""
        return (self.n_t - 1 - i) * self.static.t_block + j * self.static.s_block

    def offset(self, i: Array, j: Array, transposed: bool) -> Array:
        """Bias and masks of block (i, j), to be added to its scores."""
        t, s = self.static.t_block, self.static.s_block
        keys = lax.dynamic_slice_in_dim(self.keys, j * s, s)
        keys = keys[:, None] if transposed else keys[None]
        queries: Array | int = 1  # without segments, real keys have number 1 and padding has 0
        if self.static.segmented:
            segments = lax.dynamic_slice_in_dim(self.queries, i * t, t)
            queries = segments[None] if transposed else segments[:, None]
        offset = jnp.where(keys == queries, 0.0, MASKED)
        if self.static.causal:
            rows, columns = i * t + jnp.arange(t), j * s + jnp.arange(s)
            future = columns[:, None] > rows if transposed else columns > rows[:, None]
            offset = jnp.where(future, MASKED, offset)
        if self.static.biased:
            window = lax.dynamic_slice_in_dim(self.bias, self.window(i, j), t + s - 1)
            # The transpose of a Toeplitz matrix is the Toeplitz matrix of the reversed vector.
            block = _toeplitz(window[::-1], s, t) if transposed else _toeplitz(window, t, s)
            offset = offset + materialise(block)  # if fused, the slicing would be repeated for every element
        return offset

    def keep(self, i: Array, j: Array, transposed: bool) -> Array:
        """The scaled dropout mask of block (i, j). The backward pass recomputes it from the same hash, transposed."""
        t, s = self.static.t_block, self.static.s_block
        rows, columns = jnp.arange(t, dtype=jnp.uint32), jnp.arange(s, dtype=jnp.uint32)
        # Both forms give query r and key c the index r · s + c, so both draw the same mask.
        index = rows * s + columns[:, None] if transposed else rows[:, None] * s + columns
        return scaled_keep(self.seed, (self.index, i, j), index, self.static.rate)


def scaled_keep(seed: Array, numbers: tuple[Any, ...], index: Array, rate: float) -> Array:
    """The dropout mask of one block of attention weights, with entries 0 or 1 / (1 - rate).

    `numbers` identify the block (head, block of queries, …), `index` numbers the entries within it. The mask is a hash
    of the seed and these numbers, so the backward pass recomputes it instead of storing it.
    """
    key = jax.random.wrap_key_data(seed)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return jnp.where(keep_mask(key, index, rate), 1.0 / (1.0 - rate), 0.0)


def dot(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Matrix product that contracts axes[0] of a with axes[1] of b and accumulates in f32."""
    return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=jnp.float32)


def _blocks(a: Array, block: int) -> Array:
    """Split the first axis into blocks."""
    return a.reshape(-1, block, *a.shape[1:])


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _blockwise(q: Array, k: Array, v: Array, bias: Array, segments: Any, seed: Array, static: _Static) -> Array:
    return _forward(q, k, v, bias, segments, seed, static)[0]


def _broadcast_to_heads(bias: Array, segments: Any, like: Array) -> tuple[Array, Any]:
    """Broadcast bias and segments to every head of every batch row."""
    shape = like.shape[:2]

    def for_heads(a: Array) -> Array:
        return jnp.broadcast_to(a[:, None], (*shape, a.shape[1]))

    return jnp.broadcast_to(bias, (*shape, bias.shape[1])), jax.tree.map(for_heads, segments)


def _forward(
    q: Array, k: Array, v: Array, bias: Array, segments: Any, seed: Array, static: _Static
) -> tuple[Array, tuple[Any, ...]]:
    n_t, n_s = q.shape[2] // static.t_block, k.shape[2] // static.s_block

    def attend_head(index: Array, q: Array, k: Array, v: Array, bias: Array, segments: Any) -> tuple[Array, Array]:
        if n_t * n_s > BLOCKS_OF_MASKS:
            q, bias, segments = compute_together((q, bias, segments))
        head = _Head(index, bias, segments, seed, n_t, static)
        ks, vs = _blocks(k, static.s_block), _blocks(v, static.s_block)

        def row(i: Array, q: Array) -> tuple[Array, Array]:
            # Online softmax: `top` is the maximum score so far, `total` the sum of exp(score - top), and `acc` the sum
            # of exp(score - top) · value. When the maximum grows, the sums are rescaled to the new one.
            def column(carry: Any, jth: Any) -> tuple[Any, None]:
                (top, total, acc), (j, k, v) = carry, jth
                scores = dot(q, k, (1, 1)) + head.offset(i, j, transposed=False)
                new_top = jnp.maximum(top, scores.max(axis=1))
                weights = jnp.exp(scores - new_top[:, None])
                shrink = jnp.exp(top - new_top)
                total = total * shrink + weights.sum(axis=1)
                # Dropout acts on the normalised weights, so the normaliser `total` is summed before it.
                if static.rate:
                    weights = weights * head.keep(i, j, transposed=False)
                return (new_top, total, acc * shrink[:, None] + dot(weights.astype(v.dtype), v, (1, 0))), None

            start = (jnp.full(len(q), -jnp.inf), jnp.zeros(len(q)), jnp.zeros(q.shape))
            (top, total, acc), _ = lax.scan(column, start, (jnp.arange(n_s), ks, vs))
            return (acc / total[:, None]).astype(q.dtype), top + jnp.log(total)  # the second result is the log-sum-exp

        out, lse = lax.map(lambda xs: row(*xs), (jnp.arange(n_t), _blocks(q, static.t_block)))
        return out.reshape(q.shape), lse.reshape(-1)

    arrays = (q, k, v, *_broadcast_to_heads(bias, segments, q))
    out, lse = (save_for_backward(a) for a in few_heads_at_a_time(attend_head, static.t_block * static.s_block, arrays))
    return out, (q, k, v, bias, segments, seed, out, lse)


def _backward(static: _Static, residuals: tuple[Any, ...], g: Array) -> tuple[Array | None, ...]:
    """Gradients of q, k, v and the bias; scores and dropout masks are recomputed, block by block.

    Scores are recomputed transposed, as [keys, queries]: then all matmuls but one run along rows, which is twice as
    fast on CPUs. That one, for dq, reads a transposed copy of the keys instead.
    """
    q, k, v, bias, segments, seed, out, lse = residuals
    t, s = static.t_block, static.s_block
    n_t, n_s = q.shape[2] // t, k.shape[2] // s
    # The gradient of a softmax is weights · (dweights - sum of weights · dweights); that sum equals g · out.
    delta = jnp.einsum("BNTH,BNTH->BNT", g, out, preferred_element_type=jnp.float32)
    # The gradient of the Toeplitz expansion sums a block of dscores over each of its diagonals.
    sum_diagonals = jax.linear_transpose(
        lambda w: _toeplitz(w[::-1], s, t), jax.ShapeDtypeStruct((t + s - 1,), jnp.float32)
    )

    def head_gradients(
        index: Array, q: Array, k: Array, v: Array, g: Array, lse: Array, delta: Array, bias: Array, segments: Any
    ) -> Any:
        if n_t * n_s > BLOCKS_OF_MASKS:
            q, bias, segments = compute_together((q, bias, segments))
        head = _Head(index, bias, segments, seed, n_t, static)
        ks, vs = _blocks(k, s), _blocks(v, s)
        kts = materialise(ks.swapaxes(1, 2))

        def row(carry: Any, ith: Any) -> tuple[Any, Array]:
            (dks, dvs, dbias), (i, q, g, lse, delta) = carry, ith

            def column(carry: Any, jth: Any) -> tuple[Any, tuple[Array, Array]]:
                (dq, dbias), (j, k, kt, v, dk, dv) = carry, jth
                weights = jnp.exp(dot(k, q, (1, 1)) + head.offset(i, j, transposed=True) - lse)  # [keys, queries]
                dweights = dot(v, g, (1, 1))
                dropped = weights
                if static.rate:
                    keep = head.keep(i, j, transposed=True)
                    dropped, dweights = weights * keep, dweights * keep
                dv = dv + dot(dropped.astype(g.dtype), g, (1, 0))
                dscores = weights * (dweights - delta)
                if static.biased:
                    begin = head.window(i, j)
                    window = lax.dynamic_slice_in_dim(dbias, begin, t + s - 1) + sum_diagonals(dscores)[0]
                    dbias = lax.dynamic_update_slice_in_dim(dbias, window, begin, 0)
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

    arrays = (q, k, v, g, lse, delta, *_broadcast_to_heads(bias, segments, q))
    dq, dk, dv, dbias = few_heads_at_a_time(head_gradients, t * s, arrays)
    return dq, dk, dv, dbias.sum(axis=0), None, None


_blockwise.defvjp(_forward, _backward)
