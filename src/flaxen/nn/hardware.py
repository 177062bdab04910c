"""Hardware-specific optimisations in one place: mostly for a CPU's caches and matrix kernels.

A `Target` says which optimisations a program is traced with. Each can be switched off, and on accelerators all are:
there XLA tiles, transposes and fuses by itself, and a loop over rows or heads would only leave the hardware idle.

`with compile_for("tpu"):` sets the target explicitly, so TPU programs can be traced on any machine; JAX retraces a
jitted function when the target changes. Otherwise programs are traced for JAX's default platform.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

FEW = 64  # up to this many rows, a matmul is bound by reading the weights
PANEL = 16  # rows of a matrix transposed at a time
SMALL = 2**15  # up to this many elements, a loop over panels does not pay off


@dataclass(frozen=True)
class Target:
    """The optimisations that programs are traced with. The defaults, for accelerators, enable none of them."""

    activations: int | None = None  # number of elements that a layer processes at a time; None: the whole batch
    scores: int | None = None  # number of attention scores computed at a time; None: the scores of all heads
    # Transformer-VQ: compute head by head and block by block, with small blocks where no gradient is needed.
    rows_in_sequence: bool = False
    transposed_copies: bool = False  # copy transposed operands of matmuls into new arrays
    panels: bool = False  # transpose 16 rows at a time; faster with few cores
    separate_arrays: bool = False  # keep transposes and biases of blocks out of the fusions that read them
    transposed_keys: bool = False  # cache keys as [B, N, H, S], the layout in which few queries read them fastest
    weights_first: bool = False  # compute matmuls of few rows as (W xᵀ)ᵀ; decoding lays out the weights for this once
    widen_bfloat16: bool = False  # compute matmuls of bf16 blocks in f32
    compiler_options: tuple[tuple[str, str], ...] = ()  # XLA options for training programs


_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
ACCELERATOR = Target()
CPU = Target(
    activations=2**18,  # e.g. 512 tokens of 512 features: a few megabytes, including a layer's intermediate results
    scores=2**16,  # a block of 256 x 256 in f32: 256 kB
    rows_in_sequence=True,
    transposed_copies=True,
    panels=_CORES <= 4,  # XLA's own transpose uses all cores, so with many of them it is faster
    separate_arrays=True,
    transposed_keys=True,
    weights_first=True,
    # jax 0.10.2 compiles some matmuls of bf16 blocks to calls to a kernel that does not support them; they fail at
    # run time.
    widen_bfloat16=True,
    # By default XLA orders the operations of a CPU program for concurrency. Ordered for memory instead, training takes
    # up to a fifth less memory at the same speed.
    compiler_options=(("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"),),
)
_explicit = jax.make_user_context(None)  # part of the key of JAX's tracing cache: a new target causes retracing


def target() -> Target:
    """The target that programs are currently traced for."""
    if _explicit.value is not None:
        return _explicit.value
    return CPU if jax.default_backend() == "cpu" else ACCELERATOR


def compile_for(what: str | Target) -> AbstractContextManager[Any]:
    """Trace programs for a platform ('cpu', 'tpu', 'cuda', 'rocm') or with the given optimisations."""
    return _explicit(what if isinstance(what, Target) else CPU if what == "cpu" else ACCELERATOR)


def training_options() -> dict[str, str] | None:
    """Compiler options that save memory, for `jax.jit` of training programs; None if there are none."""
    return dict(target().compiler_options) or None


def few_rows_at_a_time(function: Callable[..., Array], x: Array, key: Array | None, *more: Any) -> Array:
    """Compute function(x, *more, key) for a few batch rows at a time, so that their activations stay in the CPU cache.

    The first axis of `x` and of every array in `more` is the batch; rows must not depend on each other.
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
    """Compute function(x, key) for x [B, T, D], a few tokens at a time; tokens must not depend on each other.

    With `checkpoint`, the backward pass recomputes the intermediate results, so that it holds those of one chunk of
    tokens instead of all.
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
    """Compute function(number, *arrays) for each head of each batch row, the first two axes of `arrays`.

    `scores` is the number of attention scores in one block; heads are computed in groups whose blocks fit in the CPU
    cache together. `number` counts heads over all rows, and dropout uses it as a seed.
    """
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
    """Compute function(*arrays) for each index of the first axis: in a loop, or all at once with vmap."""
    if target().rows_in_sequence:
        return lax.map(lambda row: function(*row), arrays)
    return jax.vmap(function)(*arrays)


def transposed_copy(a: Array) -> Array:
    """Transpose a matmul's left operand into a new array: CPU kernels run at half speed on a transposed view.

    With few cores, a loop transposes some rows at a time, few enough to stay in the L1 cache whatever their stride.
    This is up to three times as fast as XLA's transpose.
    """
    if not target().transposed_copies:
        return a.T
    rows, columns = a.shape
    if a.size < SMALL or rows < PANEL or not target().panels:
        return lax.optimization_barrier(lax.optimization_barrier(a).T)
    # bf16 is transposed as integers: otherwise XLA would convert the whole result to f32 and back in every iteration.
    if a.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(transposed_copy(lax.bitcast_convert_type(a, jnp.uint16)), a.dtype)

    def body(i: Array, out: Array) -> Array:
        start = jnp.minimum(i * PANEL, rows - PANEL)  # the last panel may overlap the one before
        return lax.dynamic_update_slice_in_dim(out, lax.dynamic_slice_in_dim(a, start, PANEL).T, start, 1)

    return lax.fori_loop(0, -(-rows // PANEL), body, jnp.zeros((columns, rows), a.dtype))


def transposed_right(a: Array) -> Array:
    """Transpose the right operand of a matmul, into a new array only if it is bf16.

    CPU kernels pack an f32 right operand equally fast from either layout. The fast bf16 kernels need it contiguous, and
    without them bf16 is no faster than f32.
    """
    return transposed_copy(a) if a.dtype == jnp.bfloat16 else a.T


def materialise(a: Array) -> Array:
    """Compute `a` before the operation that reads it, using a barrier that prevents fusion.

    Fused into its reader, a transpose or a slice of a bias would be recomputed for every element read.
    """
    return lax.optimization_barrier(a) if target().separate_arrays else a


def widen(a: Array) -> Array:
    """Cast an operand of a matmul of blocks to f32 if the target has no bf16 kernel for it."""
    return a.astype(jnp.float32) if target().widen_bfloat16 else a


def matmul_few_rows(x: Array, wt: Array) -> Array:
    """x[rows, D] · wtᵀ in f32 for few rows and wt[F, D], computed as (wt · xᵀ)ᵀ.

    On CPUs this is up to twice as fast, because the kernel repacks its right operand: x instead of the weights.
    """
    # The barrier keeps XLA from swapping the operands back.
    product = jnp.dot(wt.astype(x.dtype), x.T, preferred_element_type=jnp.float32)
    return lax.optimization_barrier(product).T


def matmul_transposed(x: Array, wt: Array) -> Array:
    """x[..., D] · wtᵀ in f32 for wt[F, D]; few rows go through `matmul_few_rows` if the target has `weights_first`."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) <= FEW and target().weights_first:
        return matmul_few_rows(rows, wt).reshape(*x.shape[:-1], -1)
    return jnp.einsum("...D,FD->...F", x, wt.astype(x.dtype), preferred_element_type=jnp.float32)


def write_after_read(index: Array, read: Array) -> Array:
    """Make `index` depend on `read`, so that a write at `index` waits until `read` has been computed.

    A loop that reads a buffer and writes to it can then do so in place. Without the dependency XLA may order the write
    first, and then it copies the whole buffer at every step to keep the values that are still to be read.
    """
    # Always adds 0, because no number is both NaN and 0; the compiler does not know that, so the dependency remains.
    first = read.reshape(-1)[0]
    return index + (jnp.isnan(first) & (first == 0)).astype(index.dtype)
