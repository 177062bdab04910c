"""Peak matmul throughput of the hardware: the denominator of model FLOP utilisation (MFU)."""

import time

import jax
import jax.numpy as jnp

# Peak dense bf16 throughput in TFLOP/s by device kind. Longer names precede their prefixes: the first match counts.
PEAKS = {
    "TPU v3": 123, "TPU v4": 275, "TPU v5 lite": 197, "TPU v5e": 197, "TPU v5p": 459, "TPU v5": 459, "TPU v6 lite": 918,
    "TPU v6e": 918, "NVIDIA A100": 312, "NVIDIA H100": 989, "NVIDIA L4": 121, "NVIDIA T4": 65,
}  # fmt: skip


def peak() -> float | None:
    """Return the peak FLOP/s of the first device: from the table, measured on a CPU, or None if unknown."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return _measure_matmul()
    known = [tflops for name, tflops in PEAKS.items() if device.device_kind.startswith(name)]
    return known[0] * 1e12 if known else None


def _measure_matmul(n: int = 1024, repeats: int = 4) -> float:
    """Time the product of two n × n float32 matrices and return its FLOP/s, in a fraction of a second."""
    matmul = jax.jit(jnp.dot)
    x = jnp.ones((n, n))
    matmul(x, x).block_until_ready()  # compile before timing
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        matmul(x, x).block_until_ready()
        times.append(time.perf_counter() - started)
    return 2 * n**3 / min(times)
