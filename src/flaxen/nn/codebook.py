"""A codebook: vectors that keys are replaced by. It learns as a running mean, not by gradients."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from flaxen.nn.param import constant, normal
from flaxen.nn.stack import save_for_backward

LEAST = 0.01  # what a count is taken for at least


class Codebook(nnx.Module):
    """For each of N heads, M codes of H numbers: running sums of the keys that chose them, over running counts."""

    def __init__(self, n_heads: int, n_codes: int, d: int):
        self.sum = normal(n_heads, n_codes, d, std=(n_heads * n_codes) ** -0.5)
        self.count = constant(n_heads, n_codes, value=1.0)

    def vectors(self) -> Float[Array, "N M H"]:
        """In f32, and without gradient."""
        return lax.stop_gradient(vectors(self.sum[...], self.count[...]))

    def nearest(self, k: Float[Array, "B N T H"]) -> tuple[Int[Array, "B N T"], Float[Array, "B N T H"]]:
        """The code of each key, the first if there are several, and its vector with the gradient of the key."""
        codes = self.vectors()
        dots = jnp.einsum("BNTH,NMH->BNTM", lax.stop_gradient(k), codes)
        z = save_for_backward(jnp.argmin(jnp.square(codes).sum(-1)[:, None] - 2 * dots, axis=-1).astype(jnp.int32))
        chosen = codes[jnp.arange(len(codes))[:, None], z]
        return z, chosen + (k - lax.stop_gradient(k))

    def surrogate(
        self, k: Float[Array, "B N T H"], z: Int[Array, "B N T"], weights: Float[Array, "B T"]
    ) -> Float[Array, ""]:
        """0, with minus the sum of the keys of each code, and minus their number, as the gradient of sum and count.

        Such gradients add over rows, pieces and devices as no mean would; the optimizer turns them into running sums.
        """
        head = jnp.arange(z.shape[1])[:, None]
        w = jnp.broadcast_to(weights[:, None], z.shape)
        k = lax.stop_gradient(k) * w[..., None]
        keys = save_for_backward(jnp.zeros(self.sum.shape).at[head, z].add(k))
        counts = save_for_backward(jnp.zeros(self.count.shape).at[head, z].add(w))
        return -jnp.vdot(keys, _only_gradient(self.sum[...])) - jnp.vdot(counts, _only_gradient(self.count[...]))


def vectors(sums: Float[Array, "*B H"], counts: Float[Array, "*B"]) -> Float[Array, "*B H"]:
    return sums.astype(jnp.float32) / jnp.maximum(counts.astype(jnp.float32), LEAST)[..., None]


def error(k: Float[Array, "B N T H"], chosen: Float[Array, "B N T H"], weights: Float[Array, "B T"]) -> Array:
    """The sum of squared distances of keys to their codes, which draws keys to them."""
    gap = jnp.square(k - lax.stop_gradient(chosen)).sum(axis=(1, 3))
    return jnp.vdot(gap, weights)


def _only_gradient(x: Array) -> Array:
    return x - lax.stop_gradient(x)


def statistics(sums: Float[Array, "N M H"], counts: Float[Array, "N M"]) -> dict[str, Array]:
    """What a codebook looks like: similarity, distance, norm and usage of its codes; means over heads."""
    c, usage = vectors(sums, counts), jnp.maximum(counts, LEAST)
    norm = jnp.linalg.norm(c, axis=-1)
    unit = c / jnp.maximum(norm, LEAST)[..., None]
    n = c.shape[1]
    pairs = ~jnp.eye(n, dtype=bool)
    similar = jnp.einsum("NAH,NBH->NAB", unit, unit)
    apart = jnp.linalg.norm(c[:, :, None] - c[:, None], axis=-1)
    share = usage / usage.sum(-1, keepdims=True)
    found: dict[str, Array] = {}
    for name, a in (("c_sim", similar), ("c_dist", apart)):
        total = jnp.where(pairs, a, 0.0).sum((1, 2)) / (n * (n - 1))
        low, high = jnp.where(pairs, a, jnp.inf).min((1, 2)), jnp.where(pairs, a, -jnp.inf).max((1, 2))
        found |= {f"{name}_min": low, f"{name}_mean": total, f"{name}_max": high}
    for name, a in (("c_norm", norm), ("c_usage", usage)):
        found |= {f"{name}_min": a.min(-1), f"{name}_mean": a.mean(-1), f"{name}_max": a.max(-1)}
    found["c_thresh_oob"] = ((usage < 1.0) | (usage > 1e6)).sum(-1).astype(jnp.float32)
    found["c_entropy"] = -(share * jnp.log(share)).sum(-1)
    return {name: jnp.mean(a) for name, a in found.items()}


def fitness(k: Float[Array, "B N T H"], chosen: Float[Array, "B N T H"]) -> dict[str, Array]:
    """How near keys are to their codes: norms of both, and the distance over the norm; means over rows and heads."""
    norm = jnp.linalg.norm(k, axis=-1)
    gap = jnp.clip(jnp.linalg.norm(k - chosen, axis=-1) / jnp.maximum(norm, LEAST), 0.0, 10.0)
    extremes = {"min": gap.min(2), "mean": gap.mean(2), "max": gap.max(2)}
    norms = {"vec_norm_mean": norm.mean(), "vec_hat_norm_mean": jnp.linalg.norm(chosen, axis=-1).mean()}
    return norms | {f"relative_err_{name}": a.mean() for name, a in extremes.items()}


def fit(
    k: Float[Array, "N T H"], n_codes: int, key: Array, rounds: int = 5
) -> tuple[Float[Array, "N M H"], Float[Array, "N M"]]:
    """Sums and counts of a codebook made from keys: k-means from codes drawn among them."""

    def one(k: Array, key: Array) -> tuple[Array, Array]:
        n = len(k)
        start = k[jax.random.permutation(key, n)[jnp.arange(n_codes) % n]]

        def move(codes: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
            z = jnp.argmin(jnp.square(codes).sum(-1) - 2 * k @ codes.T, axis=-1)
            sums, counts = jnp.zeros_like(codes).at[z].add(k), jnp.zeros(n_codes).at[z].add(1.0)
            empty = counts < 1
            sums, counts = jnp.where(empty[:, None], codes, sums), jnp.where(empty, 1.0, counts)
            return sums / counts[:, None], (sums, counts)

        _, (sums, counts) = lax.scan(move, start, None, rounds)
        return sums[-1], counts[-1]

    return jax.vmap(one)(k, jax.random.split(key, len(k)))
