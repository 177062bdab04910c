"""Full attention: plain, and blockwise with an online softmax and a backward of its own.

Layout [B, N, T, H] throughout: CPU products over it are 10-60 % faster than over [B, T, N, H].
The bias is never stored as [N, T, S]: a relative bias depends on the distance alone, so each block of it is cut
from one vector of T + S - 1 distances.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float

from flaxen.nn.layers import Linear, keep_mask

# Finite, so that a row whose keys are all masked is a mean over garbage and not NaN.
MASKED = -1e9


class Plan(NamedTuple):
    """What no layer of a stack changes: which keys exist, and the bias by distance."""

    valid: Bool[Array, "B S"] | None = None  # True for real keys
    bias: Float[Array, "N R"] | None = None  # R = T + S - 1; entry r is for key - query = r - (T - 1)
    causal: bool = False
    rate: float = 0.0  # dropout of the weights


class Attention(nnx.Module):
    """The four projections of one attention layer."""

    def __init__(self, d: int, n_heads: int, d_head: int, factor: float = 1.0):
        # T5 folds 1/sqrt(H) into q's initial scale, so the scores are unscaled.
        self.q = Linear((d,), (n_heads, d_head), std=factor * (d * d_head) ** -0.5)
        self.k = Linear((d,), (n_heads, d_head), std=factor * d**-0.5)
        self.v = Linear((d,), (n_heads, d_head), std=factor * d**-0.5)
        self.o = Linear((n_heads, d_head), (d,), std=factor * (n_heads * d_head) ** -0.5)

    def query(self, x: Float[Array, "B T D"]) -> Float[Array, "B N T H"]:
        return self.q(x).swapaxes(1, 2)

    def keys_values(self, x: Float[Array, "B S D"]) -> tuple[Float[Array, "B N S H"], Float[Array, "B N S H"]]:
        return self.k(x).swapaxes(1, 2), self.v(x).swapaxes(1, 2)

    def output(self, y: Float[Array, "B N T H"]) -> Float[Array, "B T D"]:
        return self.o(y.swapaxes(1, 2))

    def __call__(
        self, x: Float[Array, "B T D"], source: Float[Array, "B S D"], plan: Plan, key: Array | None
    ) -> Float[Array, "B T D"]:
        return self.output(attend(self.query(x), *self.keys_values(source), plan, key))


def attend(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B N S H"],
    v: Float[Array, "B N S H"],
    plan: Plan,
    key: Array | None = None,
    block: int = 128,
    key_block: int = 512,
) -> Float[Array, "B N T H"]:
    """Softmax attention in blocks of queries and keys; memory linear in length, forward and backward."""
    (batch, n_heads, length, _), s = q.shape, k.shape[2]
    t_block, s_block = _even(length, block), _even(s, key_block)
    t_pad, s_pad = -length % t_block, -s % s_block
    valid = jnp.ones((batch, s), bool) if plan.valid is None else plan.valid
    bias = jnp.zeros((n_heads, length + s - 1)) if plan.bias is None else plan.bias
    q = jnp.pad(q, ((0, 0), (0, 0), (0, t_pad), (0, 0)))
    k, v = (jnp.pad(a, ((0, 0), (0, 0), (0, s_pad), (0, 0))) for a in (k, v))
    mask = jnp.where(jnp.pad(valid, ((0, 0), (0, s_pad))), 0.0, MASKED)
    # Padded queries come after the real ones, so the vector of distances grows at its low end.
    bias = jnp.pad(bias, ((0, 0), (t_pad, s_pad)))
    rate = plan.rate if key is not None else 0.0
    seed = jax.random.key_data(key) if rate else jnp.zeros(2, jnp.uint32)
    static = _Static(t_block, s_block, plan.causal, plan.bias is not None, rate)
    return _blockwise(q, k, v, bias, mask, seed, static)[:, :, :length]


def attend_plain(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B N S H"],
    v: Float[Array, "B N S H"],
    bias: Float[Array, "#B #N #T S"],
) -> Float[Array, "B N T H"]:
    """The textbook form, for a few queries at a time: `bias` holds masks too."""
    scores = jnp.einsum("BNTH,BNSH->BNTS", q, k, preferred_element_type=jnp.float32) + bias
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("BNTS,BNSH->BNTH", weights, v, preferred_element_type=jnp.float32).astype(q.dtype)


class _Static(NamedTuple):
    t_block: int
    s_block: int
    causal: bool
    biased: bool
    rate: float


def _even(length: int, block: int) -> int:
    """The block length near `block` that pads `length` least: equal blocks rather than a short last one."""
    return -(-length // -(-length // block))


def _blocks(a: Array, block: int) -> Array:
    """[B, N, T, ...] as [T / block, B, N, block, ...], to scan over."""
    return jnp.moveaxis(a.reshape(*a.shape[:2], -1, block, *a.shape[3:]), 2, 0)


def _unblocks(a: Array) -> Array:
    a = jnp.moveaxis(a, 0, 2)
    return a.reshape(*a.shape[:2], -1, *a.shape[4:])


def _toeplitz(window: Float[Array, "N R"], t: int, s: int) -> Float[Array, "N T S"]:
    """M[i, j] = window[j - i + t - 1] from R = t + s - 1 distances, by reshaping alone: no gather, no scatter."""
    n, r = window.shape
    rolled = jnp.roll(jnp.pad(window, ((0, 0), (0, 1))), 1 - t, axis=1)
    # Rows of r + 1 read as rows of r: each row starts one later, which is what a Toeplitz matrix is.
    tiled = jnp.broadcast_to(rolled[:, None], (n, t, r + 1)).reshape(n, -1)
    return tiled[:, : t * r].reshape(n, t, r)[:, :, :s]


def _scores(
    q: Array, k: Array, bias: Array, mask: Array, i: Array, j: Array, n_t: int, static: _Static
) -> Float[Array, "B N t s"]:
    t, s = static.t_block, static.s_block
    scores = jnp.einsum("BNTH,BNSH->BNTS", q, k, preferred_element_type=jnp.float32)
    if static.biased:
        block = _toeplitz(lax.dynamic_slice_in_dim(bias, (n_t - 1 - i) * t + j * s, t + s - 1, 1), t, s)
        scores = scores + lax.optimization_barrier(block)
    hidden = lax.dynamic_slice_in_dim(mask, j * s, s, 1)[:, None, None]
    if static.causal:
        ahead = (j * s + jnp.arange(s)) > (i * t + jnp.arange(t))[:, None]
        hidden = jnp.where(ahead, MASKED, hidden)
    return scores + hidden


def _keep(seed: Array, shape: tuple[int, ...], i: Array, j: Array, rate: float) -> Array:
    """The dropout mask of one block, scaled; the backward makes it again."""
    key = jax.random.wrap_key_data(seed)
    keep = keep_mask(jax.random.fold_in(jax.random.fold_in(key, i), j), shape, rate)
    return jnp.where(keep, 1.0 / (1.0 - rate), 0.0)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _blockwise(q: Array, k: Array, v: Array, bias: Array, mask: Array, seed: Array, static: _Static) -> Array:
    return _forward(q, k, v, bias, mask, seed, static)[0]


def _forward(
    q: Array, k: Array, v: Array, bias: Array, mask: Array, seed: Array, static: _Static
) -> tuple[Array, tuple[Array, ...]]:
    qs, ks, vs = _blocks(q, static.t_block), _blocks(k, static.s_block), _blocks(v, static.s_block)
    n_t, n_s = len(qs), len(ks)

    def row(_: None, ith: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        i, q = ith

        def column(carry: tuple[Array, ...], jth: tuple[Array, ...]) -> tuple[tuple[Array, ...], None]:
            top, total, acc = carry
            j, k, v = jth
            scores = _scores(q, k, bias, mask, i, j, n_t, static)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            weights = jnp.exp(scores - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            total = total * shrink + weights.sum(axis=-1)
            if static.rate:
                weights = weights * _keep(seed, weights.shape, i, j, static.rate)
            new = jnp.einsum("BNTS,BNSH->BNTH", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
            return (new_top, total, acc * shrink[..., None] + new), None

        start = (jnp.full(q.shape[:3], -jnp.inf), jnp.zeros(q.shape[:3]), jnp.zeros(q.shape))
        (top, total, acc), _ = lax.scan(column, start, (jnp.arange(n_s), ks, vs))
        return None, ((acc / total[..., None]).astype(q.dtype), top + jnp.log(total))

    _, (out, lse) = lax.scan(row, None, (jnp.arange(n_t), qs))
    out, lse = _unblocks(out), _unblocks(lse)
    return out, (q, k, v, bias, mask, seed, out, lse)


def _backward(static: _Static, residuals: tuple[Array, ...], g: Array) -> tuple[Array | None, ...]:
    q, k, v, bias, mask, seed, out, lse = residuals
    t, s = static.t_block, static.s_block
    delta = jnp.einsum("BNTH,BNTH->BNT", g, out, preferred_element_type=jnp.float32)
    qs, gs, lses, deltas = (_blocks(a, t) for a in (q, g, lse, delta))
    ks, vs = _blocks(k, s), _blocks(v, s)
    n_t, n_s = len(qs), len(ks)

    def row(carry: tuple[Array, ...], ith: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
        dks, dvs, dbias = carry
        i, q, g, lse, delta = ith

        def column(carry: tuple[Array, ...], jth: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple[Array, Array]]:
            dq, dbias = carry
            j, k, v, dk, dv = jth
            weights = jnp.exp(_scores(q, k, bias, mask, i, j, n_t, static) - lse[..., None])
            dweights = jnp.einsum("BNTH,BNSH->BNTS", g, v, preferred_element_type=jnp.float32)
            kept = weights
            if static.rate:
                keep = _keep(seed, weights.shape, i, j, static.rate)
                kept, dweights = weights * keep, dweights * keep
            dv = dv + jnp.einsum("BNTS,BNTH->BNSH", kept.astype(g.dtype), g, preferred_element_type=jnp.float32)
            dscores = weights * (dweights - delta[..., None])
            if static.biased:
                at = (n_t - 1 - i) * t + j * s
                expand = jax.linear_transpose(
                    lambda w: _toeplitz(w, t, s),
                    jax.ShapeDtypeStruct((bias.shape[0], t + s - 1), jnp.float32),
                )
                (window,) = expand(dscores.sum(axis=0))
                old = lax.dynamic_slice_in_dim(dbias, at, t + s - 1, 1)
                dbias = lax.dynamic_update_slice_in_dim(dbias, old + window, at, 1)
            dscores = dscores.astype(q.dtype)
            dq = dq + jnp.einsum("BNTS,BNSH->BNTH", dscores, k, preferred_element_type=jnp.float32)
            dk = dk + jnp.einsum("BNTS,BNTH->BNSH", dscores, q, preferred_element_type=jnp.float32)
            return (dq, dbias), (dk, dv)

        (dq, dbias), (dks, dvs) = lax.scan(column, (jnp.zeros(q.shape), dbias), (jnp.arange(n_s), ks, vs, dks, dvs))
        return (dks, dvs, dbias), dq.astype(q.dtype)

    start = (jnp.zeros(ks.shape), jnp.zeros(vs.shape), jnp.zeros(bias.shape))
    (dks, dvs, dbias), dqs = lax.scan(row, start, (jnp.arange(n_t), qs, gs, lses, deltas))
    dk, dv = _unblocks(dks).astype(k.dtype), _unblocks(dvs).astype(v.dtype)
    return _unblocks(dqs), dk, dv, dbias, jnp.zeros_like(mask), None


_blockwise.defvjp(_forward, _backward)
