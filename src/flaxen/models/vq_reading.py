"""Read a text into the state of a Transformer-VQ, from which it can generate later."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from flaxen.models import vq_lm
from flaxen.nn.param import with_config

LARGEST = 6  # a piece has at most 2^6 blocks


def read(model: vq_lm.VQLM, ids: Sequence[int], state: vq_lm.VQState | None = None) -> vq_lm.VQState:
    """The state after reading `ids`, starting from `state`. Its size does not depend on the number of ids."""
    block = model.config.block
    state, first = vq_lm.initial_state(model.config, 1) if state is None else state, 0
    for n in _piece_sizes(len(ids), block):
        state = _read_piece(model, min(n, block), jnp.asarray([ids[first : first + n]]), state)
        first += n
    return state


def _piece_sizes(n: int, block: int) -> Iterator[int]:
    """Split n tokens into pieces of few different sizes, since a program is compiled for each size: 64, 32, … 1 blocks,
    and then powers of 2 below one block."""
    while n:
        # The largest power of 2 that fits, in blocks if there is at least one block, otherwise in tokens.
        size = block << min((n // block).bit_length() - 1, LARGEST) if n >= block else 1 << (n.bit_length() - 1)
        yield size
        n -= size


@partial(jax.jit, static_argnames="block")
def _read_piece(model: vq_lm.VQLM, block: int, ids: Array, state: vq_lm.VQState) -> vq_lm.VQState:
    """The state after one piece. The result does not depend on the block size, so small pieces may use small blocks."""
    return with_config(model, dataclasses.replace(model.config, block=block))(ids, state)[1]
