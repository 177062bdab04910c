"""A codebook: the vectors that keys are quantised to. It learns by exponential moving averages, not by gradients.

The vector of a code is sum / count: moving averages (EMA) of the sum and of the number of the keys assigned to it. The
EMA update reaches the optimizer as a surrogate gradient (`Codebook.surrogate`, `exponential_moving_averages` in
flaxen.train.optim).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from flaxen.nn.param import constant, normal
from flaxen.nn.stack import save_for_backward

LEAST = 0.01  # lower bound for counts and norms that are used as divisors


class Codebook(nnx.Module):
    """M codes of size H for each of N heads, stored as moving averages of the sums and counts of their keys."""

    def __init__(self, n_heads: int, n_codes: int, d: int):
        self.sum = normal(n_heads, n_codes, d, std=(n_heads * n_codes) ** -0.5)
        self.count = constant(n_heads, n_codes, value=1.0)

    def vectors(self) -> Float[Array, "N M H"]:
        """The vector of each code, in f32 and without gradient."""
        return lax.stop_gradient(vectors(self.sum[...], self.count[...]))

    def nearest(self, k: Float[Array, "B N T H"]) -> tuple[Int[Array, "B N T"], Float[Array, "B N T H"]]:
        """The nearest code of each key (the first one in a tie), and the quantised key.

        Straight-through estimator: in the forward pass a quantised key is its code's vector; in the backward pass its
        gradient goes to the key unchanged, as if it had not been quantised.
        """
        codes = self.vectors()
        # ‖k - c‖² = ‖k‖² - 2 k · c + ‖c‖², where ‖k‖² is the same for all codes and does not change the minimum.
        dots = jnp.einsum("BNTH,NMH->BNTM", lax.stop_gradient(k), codes)
        z = save_for_backward(jnp.argmin(jnp.square(codes).sum(-1)[:, None] - 2 * dots, axis=-1).astype(jnp.int32))
        chosen = codes[jnp.arange(len(codes))[:, None], z]
        return z, chosen + (k - lax.stop_gradient(k))

    def surrogate(
        self, k: Float[Array, "B N T H"], z: Int[Array, "B N T"], weights: Float[Array, "B T"]
    ) -> Float[Array, ""]:
        """A loss of value 0 whose gradients with respect to sum and count carry the statistics of the EMA update.

        The gradient with respect to `sum` is minus the sum of the keys assigned to each code; the one with respect to
        `count` is minus their number. The optimizer turns them into new = decay · old - (1 - decay) · gradient. Sums,
        unlike means, can be added over rows, microbatches and devices in the same way as all other gradients.
        """
        head = jnp.arange(z.shape[1])[:, None]
        w = jnp.broadcast_to(weights[:, None], z.shape)
        k = lax.stop_gradient(k) * w[..., None]
        keys = save_for_backward(jnp.zeros(self.sum.shape).at[head, z].add(k))
        counts = save_for_backward(jnp.zeros(self.count.shape).at[head, z].add(w))
        # statistic · (x - stop_gradient(x)) is 0, and its gradient with respect to x is the statistic.
        return -jnp.vdot(keys, _only_gradient(self.sum[...])) - jnp.vdot(counts, _only_gradient(self.count[...]))


def vectors(sums: Float[Array, "*B H"], counts: Float[Array, "*B"]) -> Float[Array, "*B H"]:
    """The vectors of codes, sum / count, in f32."""
    return sums.astype(jnp.float32) / jnp.maximum(counts.astype(jnp.float32), LEAST)[..., None]


def error(k: Float[Array, "B N T H"], chosen: Float[Array, "B N T H"], weights: Float[Array, "B T"]) -> Array:
    """Commitment loss, which pulls keys towards their codes: the weighted sum of squared distances between them."""
    squared = jnp.square(k - lax.stop_gradient(chosen)).sum(axis=(1, 3))
    return jnp.vdot(squared, weights)


def _only_gradient(x: Array) -> Array:
    """Return a value of 0 with the gradient of x."""
    return x - lax.stop_gradient(x)


def statistics(sums: Float[Array, "N M H"], counts: Float[Array, "N M"]) -> dict[str, Array]:
    """Metrics of a codebook: similarity, distance, norm and usage of its codes, averaged over heads."""
    c, usage = vectors(sums, counts), jnp.maximum(counts, LEAST)
    norm = jnp.linalg.norm(c, axis=-1)
    unit = c / jnp.maximum(norm, LEAST)[..., None]
    n = c.shape[1]
    pairs = ~jnp.eye(n, dtype=bool)
    similarity = jnp.einsum("NAH,NBH->NAB", unit, unit)  # A and B are both the axis of codes
    distance = jnp.linalg.norm(c[:, :, None] - c[:, None], axis=-1)
    probability = usage / usage.sum(-1, keepdims=True)
    metrics: dict[str, Array] = {}
    for name, a in (("c_sim", similarity), ("c_dist", distance)):
        mean = jnp.where(pairs, a, 0.0).sum((1, 2)) / (n * (n - 1))
        low, high = jnp.where(pairs, a, jnp.inf).min((1, 2)), jnp.where(pairs, a, -jnp.inf).max((1, 2))
        metrics |= {f"{name}_min": low, f"{name}_mean": mean, f"{name}_max": high}
    for name, a in (("c_norm", norm), ("c_usage", usage)):
        metrics |= {f"{name}_min": a.min(-1), f"{name}_mean": a.mean(-1), f"{name}_max": a.max(-1)}
    metrics["c_thresh_oob"] = ((usage < 1.0) | (usage > 1e6)).sum(-1).astype(jnp.float32)
    metrics["c_entropy"] = -(probability * jnp.log(probability)).sum(-1)
    return {name: jnp.mean(a) for name, a in metrics.items()}


def fitness(k: Float[Array, "B N T H"], chosen: Float[Array, "B N T H"]) -> dict[str, Array]:
    """Metrics of quantisation: norms of keys and quantised keys, and their distance relative to the norm of the key.

    Averaged over rows and heads; minimum, mean and maximum are over tokens.
    """
    norm = jnp.linalg.norm(k, axis=-1)
    relative = jnp.clip(jnp.linalg.norm(k - chosen, axis=-1) / jnp.maximum(norm, LEAST), 0.0, 10.0)
    extremes = {"min": relative.min(2), "mean": relative.mean(2), "max": relative.max(2)}
    norms = {"vec_norm_mean": norm.mean(), "vec_hat_norm_mean": jnp.linalg.norm(chosen, axis=-1).mean()}
    return norms | {f"relative_err_{name}": a.mean() for name, a in extremes.items()}


def fit(
    k: Float[Array, "N T H"], n_codes: int, key: Array, rounds: int = 5
) -> tuple[Float[Array, "N M H"], Float[Array, "N M"]]:
    """Sums and counts of a codebook fitted to keys: k-means, starting from randomly chosen keys."""

    def fit_head(k: Array, key: Array) -> tuple[Array, Array]:
        n = len(k)
        # If there are fewer keys than codes, keys are used repeatedly.
        start = k[jax.random.permutation(key, n)[jnp.arange(n_codes) % n]]

        def move(codes: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
            z = jnp.argmin(jnp.square(codes).sum(-1) - 2 * k @ codes.T, axis=-1)
            sums, counts = jnp.zeros_like(codes).at[z].add(k), jnp.zeros(n_codes).at[z].add(1.0)
            empty = counts < 1  # a code without keys stays where it is, with a count of 1
            sums, counts = jnp.where(empty[:, None], codes, sums), jnp.where(empty, 1.0, counts)
            return sums / counts[:, None], (sums, counts)

        _, (sums, counts) = lax.scan(move, start, None, rounds)
        return sums[-1], counts[-1]

    return jax.vmap(fit_head)(k, jax.random.split(key, len(k)))
