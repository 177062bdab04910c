"""The interface between a Transformer-VQ unit and its attention.

A unit normalises, projects, adds biases, gates and projects back in the same way for training, prefill and decoding.
The attention in between is a `VQPlan`, shared by all layers of a pass: blocks of queries over quantised keys
(nn/vq.py), full quadratic attention (nn/full.py), or one token against a ring buffer (nn/vq_ring.py).

The array axes are those of the legend in flaxen.nn.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

# The score of a key that a query must not see: after the softmax its weight is 0. It is finite, so that a row in which
# every key is hidden (padding) gives finite numbers instead of inf - inf = NaN.
NEVER = -1e30


class VQSpec(NamedTuple):
    """Attention settings that are the same for every call."""

    window: int  # W
    block: int  # X
    aggregate: bool = True  # attend to keys beyond the window, through their counts and means
    through: bool = True  # let gradients flow from block to block
    documents: bool = False  # do not attend to other documents
    rounding: str = "float32"  # dtype that counts and means are rounded to after each block
    collect: bool = True  # update counts and means, whether they are read or not

    def rounded(self, a: Array) -> Array:
        """Round counts or means to the dtype in which they are carried between blocks, and return them in f32."""
        return a.astype(self.rounding).astype(jnp.float32)


class HeadInputs(NamedTuple):
    """The projections of a unit that its attention needs."""

    queries: Float[Array, "B N Q T H"]  # with the content bias: multiplied by keys
    distant: Float[Array, "B N Q T H"]  # with the distance bias: multiplied by the table of distances
    keys: Float[Array, "B N T H"]  # quantised keys; with full attention, the keys themselves
    values: Float[Array, "B N T U"]
    table: Float[Array, "N Q E H"]  # embeddings of the distances W, W - 1, … 0
    codes: Int[Array, "B N T"] | None = None  # None for full attention
    codebook: Float[Array, "N M H"] | None = None


@runtime_checkable
class VQPlan(Protocol):
    """The attention of all layers during one pass over some tokens."""

    @property
    def weights(self) -> Float[Array, "B T"] | None:
        """Weight of each token in the codebook update; None if codebooks are not updated."""

    def attend(self, heads: HeadInputs, cache: Any) -> tuple[Float[Array, "B N Q T U"], Any]:
        """Return the attention output of each query and the cache after the last token."""
