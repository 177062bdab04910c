"""The seam between a unit of Transformer-VQ and its attention.

A unit projects, adds biases, gates and projects back, in one way for training, prefill and decoding. What lies between
is a `VQPlan`, one for all layers of a pass: blocks of queries over quantised keys (nn/vq.py), all keys one by one
(nn/full.py), or one token against a ring buffer (nn/vq_ring.py).

Axes of these files, beside those of docs/design.md: N heads with keys of their own, G queries for each of them, T
tokens = K blocks of W, C window, E = C + 1 distances, S = C + T keys (C + W in one block), M codes, H size of a key, U
size of a value.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

NEVER = -1e30  # a score that weighs nothing, whatever the others


class VQSpec(NamedTuple):
    """What does not change from call to call."""

    window: int  # C
    block: int  # W
    aggregate: bool = True  # see keys beyond the window at all
    through: bool = True  # let gradients pass from block to block
    documents: bool = False  # see nothing of other documents
    rounding: str = "float32"  # of counts and means between blocks
    collect: bool = True  # keep counts and means of keys beyond the window, seen or not

    def rounded(self, a: Array) -> Array:
        """Counts or means, as they are kept between blocks."""
        return a.astype(self.rounding).astype(jnp.float32)


class HeadInputs(NamedTuple):
    """What a unit hands to its attention."""

    queries: Float[Array, "B N Q T H"]  # as keys are compared to them
    distant: Float[Array, "B N Q T H"]  # as distances are
    keys: Float[Array, "B N T H"]  # the vectors of their codes; with full attention, the keys as they are
    values: Float[Array, "B N T U"]
    table: Float[Array, "N Q E H"]  # of the distances C, C - 1, … 0
    codes: Int[Array, "B N T"] | None = None  # None for full attention
    codebook: Float[Array, "N M H"] | None = None


@runtime_checkable
class VQPlan(Protocol):
    """What the attentions of all layers share in one pass over some tokens."""

    @property
    def weights(self) -> Float[Array, "B T"] | None:
        """Which tokens codebooks learn from; None: they learn nothing."""

    def attend(self, heads: HeadInputs, cache: Any) -> tuple[Float[Array, "B N Q T U"], Any]:
        """What each query sees, and the cache behind the last token."""
