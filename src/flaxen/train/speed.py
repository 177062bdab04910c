"""How fast the hardware can multiply: the denominator of model FLOP utilisation (MFU)."""

import time

import jax
import jax.numpy as jnp

# Dense bf16 peaks in TFLOP/s by device kind.
PEAKS = {
    "TPU v3": 123, "TPU v4": 275, "TPU v5 lite": 197, "TPU v5e": 197, "TPU v5p": 459, "TPU v5": 459, "TPU v6 lite": 918,
    "TPU v6e": 918, "NVIDIA A100": 312, "NVIDIA H100": 989, "NVIDIA L4": 121, "NVIDIA T4": 65,
}  # fmt: skip


def peak() -> float | None:
    """FLOP/s of the device that trains: from the table; on a CPU measured, in a fraction of a second; else unknown."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return _measured()
    known = [tflops for name, tflops in PEAKS.items() if device.device_kind.startswith(name)]
    return known[0] * 1e12 if known else None


def _measured(n: int = 1024, repeats: int = 4) -> float:
    product = jax.jit(jnp.dot)
    x = jnp.ones((n, n))
    product(x, x).block_until_ready()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        product(x, x).block_until_ready()
        times.append(time.perf_counter() - started)
    return 2 * n**3 / min(times)
