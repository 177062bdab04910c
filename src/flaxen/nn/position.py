"""Positions: T5's relative position bias, with one learned bias per bucket of distances and head; and sinusoids."""

import math

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from flaxen.nn.param import normal


def relative_bucket(
    distance: Int[Array, "*R"], bidirectional: bool, n_buckets: int, max_distance: int
) -> Int[Array, "*R"]:
    """T5's bucket of distance = key position - query position: exact if small, then logarithmic up to max_distance."""
    # A bidirectional encoder uses the upper half of the buckets for keys after the query. A decoder sees no such keys,
    # so it uses all buckets for the past.
    side = jnp.zeros_like(distance)
    if bidirectional:
        n_buckets //= 2
        side = jnp.where(distance > 0, n_buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = n_buckets // 2
    # Half of the buckets hold one distance each; beyond `exact`, bucket widths grow geometrically up to max_distance.
    # The maximum keeps log away from 0 at near distances, whose logarithm is not used.
    ratio = jnp.log(jnp.maximum(distance, exact).astype(jnp.float32) / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (n_buckets - exact)).astype(jnp.int32)
    return side + jnp.where(distance < exact, distance, jnp.minimum(far, n_buckets - 1))


class RelativeBias(nnx.Module):
    """T5's relative position bias: one number per bucket and head, for a whole stack or (umT5) for one layer."""

    def __init__(self, n_heads: int, n_buckets: int, max_distance: int, bidirectional: bool, std: float):
        self.weight = normal(n_buckets, n_heads, std=std)
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    def __call__(self, distance: Int[Array, "*R"]) -> Float[Array, "N *R"]:
        """The bias of every head at each distance (key - query), in f32."""
        table = self.weight[...].astype(jnp.float32)
        ids = relative_bucket(distance, self.bidirectional, table.shape[0], self.max_distance)
        # [*R, N] to [N, *R]: attention works head by head.
        return jnp.moveaxis(table[ids], -1, 0)


def sinusoids(positions: Int[Array, "*T"], width: int, wavelength: float) -> Float[Array, "*T D"]:
    """Sinusoidal positions: sines, then cosines, at width / 2 frequencies from 1 down to 1 / wavelength, in f32."""
    frequencies = 1 / wavelength ** (jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
