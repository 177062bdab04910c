"""What is done for a CPU's caches and matrix kernels, in one place. Models call these functions by intent.

A `Target` says which of it a program is traced with. Every item can be switched off, and on an accelerator all of it
is: there XLA tiles, transposes and fuses by itself, and a loop over rows or heads would only leave the hardware idle.

The target is explicit: `with compile_for("tpu"):` traces TPU programs on any machine, and JAX retraces a jitted
function when the target changes. Without it, programs are for the platform JAX runs on by default.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

FEW = 64  # rows up to which a matmul is bound by reading the weights
PANEL = 16  # rows of a matrix that are transposed at a time
SMALL = 2**15  # elements up to which a loop over panels does not pay


@dataclass(frozen=True)
class Target:
    """The optimisations that programs are traced with. The defaults are an accelerator's: none of them."""

    activations: int | None = None  # elements that enter a layer at a time; None: the whole batch
    scores: int | None = None  # attention scores computed at a time; None: those of all heads
    rows_in_sequence: bool = False  # Transformer-VQ: head by head, block by block; small blocks where it only reads
    transposed_copies: bool = False  # transpose the operands of matmuls into arrays of their own
    panels: bool = False  # transpose 16 rows at a time, where cores are few
    separate_arrays: bool = False  # keep transposes and biases of blocks out of the fusions that read them
    transposed_keys: bool = False  # cached keys as [B, N, H, S], the way scores of few queries read them
    weights_first: bool = False  # matmuls of few rows as (W xᵀ)ᵀ, with weights laid out once before a decoding loop
    widen_bfloat16: bool = False  # matmuls of bf16 blocks in f32
    compiler_options: tuple[tuple[str, str], ...] = ()  # of training programs


_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
ACCELERATOR = Target()
CPU = Target(
    activations=2**18,  # such as 512 tokens of 512 features: megabytes with all that is made of them
    scores=2**16,  # a block of 256 x 256 in f32: 256 kB
    rows_in_sequence=True,
    transposed_copies=True,
    panels=_CORES <= 4,  # XLA's own transpose is shared by all cores, so with many of them it is faster
    separate_arrays=True,
    transposed_keys=True,
    weights_first=True,
    # jax 0.10.2 leaves some matmuls of bf16 blocks to a kernel that has none for them; that fails only when it runs.
    widen_bfloat16=True,
    # XLA orders the operations of a CPU program so that many can run at once, unless told otherwise. Ordered so that
    # little is alive at a time, training takes up to a fifth less memory at the same speed.
    compiler_options=(("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"),),
)
_explicit = jax.make_user_context(None)


def target() -> Target:
    """What programs are being traced for."""
    if _explicit.value is not None:
        return _explicit.value
    return CPU if jax.default_backend() == "cpu" else ACCELERATOR


def compile_for(what: str | Target) -> AbstractContextManager[Any]:
    """Trace programs for a platform ('cpu', 'tpu', 'cuda', 'rocm') or with the given optimisations."""
    return _explicit(what if isinstance(what, Target) else CPU if what == "cpu" else ACCELERATOR)


def training_options() -> dict[str, str] | None:
    """Compiler options of programs whose memory matters."""
    return dict(target().compiler_options) or None


def few_rows_at_a_time(function: Callable[..., Array], x: Array, key: Array | None, *more: Any) -> Array:
    """function(x, *more, key), for a few rows of the batch at a time, whose activations stay in the cache.

    `x` and the arrays of `more` have the batch first; rows must not depend on each other.
    """
    limit, batch = target().activations, len(x)
    if limit is None:
        return function(x, *more, key)
    n = max(1, min(batch, limit // (x.size // batch)))
    while batch % n:
        n -= 1
    if n == batch:
        return function(x, *more, key)
    chunks = jax.tree.map(lambda a: a.reshape(batch // n, n, *a.shape[1:]), (x, *more))
    keys = None if key is None else jax.random.split(key, batch // n)
    return lax.map(lambda xs: function(*xs[0], xs[1]), (chunks, keys)).reshape(x.shape)


def few_tokens_at_a_time(
    function: Callable[[Array, Array | None], Array], x: Array, key: Array | None, checkpoint: bool
) -> Array:
    """function(x, key) of x [B, T, D], for some tokens at a time, which must not depend on each other.

    With `checkpoint`, the backward recomputes what is inside, so that it holds it for one piece and not for all.
    """
    limit = target().activations
    pieces = 1 if limit is None else -(-x.size // limit)
    if pieces == 1:
        return function(x, key)
    function = jax.checkpoint(function) if checkpoint else function
    tokens = x.reshape(-1, x.shape[-1])
    size = -(-len(tokens) // pieces)
    chunks = jnp.pad(tokens, ((0, pieces * size - len(tokens)), (0, 0))).reshape(pieces, 1, size, -1)
    keys = None if key is None else jax.random.split(key, pieces)
    out = lax.map(lambda xs: function(*xs), (chunks, keys))
    return out.reshape(pieces * size, -1)[: len(tokens)].reshape(x.shape)


def few_heads_at_a_time(function: Callable[..., Any], scores: int, arrays: tuple[Any, ...]) -> Any:
    """function(number, *arrays) of each head of each row, the first two axes: as many at a time as have blocks of
    `scores` elements that fit in the cache together."""
    batch = jax.tree.leaves(arrays)[0].shape[:2]
    flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), arrays)
    index = jnp.arange(batch[0] * batch[1], dtype=jnp.uint32)
    limit = target().scores
    together = len(index) if limit is None else max(1, limit // scores)
    while len(index) % together:
        together -= 1
    if together == len(index):
        out = jax.vmap(function)(index, *flat)
    elif together == 1:
        out = lax.map(lambda xs: function(*xs), (index, *flat))
    else:
        out = lax.map(lambda xs: function(*xs), (index, *flat), batch_size=together)
    return jax.tree.map(lambda a: a.reshape(*batch, *a.shape[1:]), out)


def each_row(function: Callable[..., Any], arrays: Any) -> Any:
    """function(*arrays) of each row, the first axis: one after the other, or all at once."""
    if target().rows_in_sequence:
        return lax.map(lambda row: function(*row), arrays)
    return jax.vmap(function)(*arrays)


def transposed_copy(a: Array) -> Array:
    """aᵀ as the left operand of a matmul. CPU kernels run at half speed on a transposed view, so it becomes an array of
    its own. With few cores a loop takes some rows at a time, as many as stay in the nearest cache whatever their
    stride: up to three times as fast as XLA's transpose.
    """
    if not target().transposed_copies:
        return a.T
    rows, columns = a.shape
    if a.size < SMALL or rows < PANEL or not target().panels:
        return lax.optimization_barrier(lax.optimization_barrier(a).T)
    if a.dtype == jnp.bfloat16:  # as integers: XLA would widen the whole result, and round it again, in every iteration
        return lax.bitcast_convert_type(transposed_copy(lax.bitcast_convert_type(a, jnp.uint16)), a.dtype)

    def body(i: Array, out: Array) -> Array:
        at = jnp.minimum(i * PANEL, rows - PANEL)
        return lax.dynamic_update_slice_in_dim(out, lax.dynamic_slice_in_dim(a, at, PANEL).T, at, 1)

    return lax.fori_loop(0, -(-rows // PANEL), body, jnp.zeros((columns, rows), a.dtype))


def transposed_right(a: Array) -> Array:
    """aᵀ as the right operand of a matmul. In f32 kernels pack it from either side equally fast; the fast bf16 kernels
    need it contiguous, and without them bf16 is no faster than f32."""
    return transposed_copy(a) if a.dtype == jnp.bfloat16 else a.T


def materialise(a: Array) -> Array:
    """`a` as an array of its own. Fused into the loop that reads it, a transpose or a slice of a bias would be computed
    again for every element read."""
    return lax.optimization_barrier(a) if target().separate_arrays else a


def widen(a: Array) -> Array:
    """An operand of a matmul of blocks, in f32 where the target has no such matmul in bf16."""
    return a.astype(jnp.float32) if target().widen_bfloat16 else a


def matmul_few_rows(x: Array, wt: Array) -> Array:
    """x[R, D] · wtᵀ for few rows R and wt[F, D], in f32, as (wt · xᵀ)ᵀ: on a CPU up to twice as fast, because what the
    kernel repacks is then x and not the weights. The barrier keeps XLA from swapping them back."""
    product = jnp.dot(wt.astype(x.dtype), x.T, preferred_element_type=jnp.float32)
    return lax.optimization_barrier(product).T


def matmul_transposed(x: Array, wt: Array) -> Array:
    """x[..., D] · wtᵀ for wt[F, D], in f32: for few rows in the order that reads the weights once."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) <= FEW and target().weights_first:
        return matmul_few_rows(rows, wt).reshape(*x.shape[:-1], -1)
    return jnp.einsum("...D,FD->...F", x, wt.astype(x.dtype), preferred_element_type=jnp.float32)
