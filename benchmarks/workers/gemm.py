"""Measure the matmul [4096, 512] x [512, 2048] on this machine: NumPy, XLA and torch in f32, XLA in bf16."""

from collections.abc import Callable
from functools import partial
from typing import Any

from measure import Worker, emit, timed

ROWS, INNER, COLUMNS = 4096, 512, 2048
CALLS = 10  # per repeat, so that a repeat is long compared to the resolution of the CPU clock


def main() -> None:
    worker = Worker(__doc__)
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch

    torch.set_num_threads(worker.threads)
    rng = np.random.default_rng(0)
    a = rng.standard_normal((ROWS, INNER), dtype=np.float32)
    b = rng.standard_normal((INNER, COLUMNS), dtype=np.float32)

    @jax.jit
    def xla(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a, b, preferred_element_type=jnp.float32)

    x, y = jnp.asarray(a), jnp.asarray(b)
    x16, y16 = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    s, t = torch.from_numpy(a), torch.from_numpy(b)
    # No bf16 in torch: on processors without bf16 instructions one matmul takes 15 seconds.
    products: dict[tuple[str, str], Callable[[], Any]] = {
        ("numpy", "f32"): lambda: a @ b,
        ("xla", "f32"): lambda: xla(x, y).block_until_ready(),
        ("torch", "f32"): lambda: s @ t,
        ("xla", "bf16"): lambda: xla(x16, y16).block_until_ready(),
    }
    for (library, precision), product in products.items():
        product()
        for _ in range(worker.repeats):
            figures = timed(partial(repeat, product))
            emit(library=library, precision=precision, flops=2 * ROWS * INNER * COLUMNS * CALLS, **figures)


def repeat(product: Callable[[], Any]) -> None:
    for _ in range(CALLS):
        product()


if __name__ == "__main__":
    main()
