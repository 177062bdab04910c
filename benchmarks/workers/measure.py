"""Common code of benchmark workers: flags, core pinning, clocks, and JSON records on stdout."""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads import Sizes, Work, long_sizes_and_works, sizes_and_works

if TYPE_CHECKING:
    import numpy as np

# (inputs, labels) -> loss and gradients, fully computed; they are inspected after the clock has stopped.
Loss = Callable[["np.ndarray", "np.ndarray"], tuple[float, list["np.ndarray"]]]
# (inputs, labels) -> a training step, which updates the weights and returns the loss before the update.
Train = Callable[["np.ndarray", "np.ndarray"], Callable[[], float]]
# (inputs, new tokens, beams) -> the generated tokens of each row.
Generate = Callable[["np.ndarray", int, int], list[list[int]]]

NORM_PIECE = 1 << 18  # values per step of `norm`


class Worker:
    """A benchmark worker. Create it before importing NumPy, JAX or torch, which choose their threads on import."""

    def __init__(
        self,
        description: str,
        precisions: tuple[str, ...] = ("f32",),
        works: Callable[[bool], tuple[Sizes, dict[str, Work]]] = sizes_and_works,
    ) -> None:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("workload", choices=["prepare", "loss", "train", "generate", "beam", "cold", "gemm"])
        parser.add_argument("--model-dir", type=Path, help="directory that `prepare` writes the model to")
        parser.add_argument("--repeats", type=int, default=3, help="number of timed calls, after an untimed one")
        parser.add_argument("--pin", type=int, nargs="+", metavar="CORE", help="run on these cores only")
        parser.add_argument("--precision", choices=precisions, default=precisions[0])
        parser.add_argument("--attention", choices=["full", "local", "transient-global"], default="full")
        parser.add_argument("--source", type=int, default=0, help="input length, unless --attention is full")
        parser.add_argument("--remat", action="store_true", help="recompute layers in the backward pass (flaxen)")
        parser.add_argument("--tiny", action="store_true", help="tiny sizes, to check that everything runs")
        parser.add_argument("--started", type=float, help="time.time() when this process was started (cold)")
        flags = parser.parse_args()
        self.workload: str = flags.workload
        self.model_dir: Path = flags.model_dir
        self.repeats: int = flags.repeats
        self.precision: str = flags.precision
        self.remat: bool = flags.remat
        if flags.attention == "full":
            self.sizes, self.works = works(flags.tiny)
        else:
            self.sizes, self.works = long_sizes_and_works(flags.attention, flags.source, flags.tiny)

        self.threads = pin(flags.pin)

        # The first phase starts with the process, so that it includes the startup of Python.
        self._wall = flags.started or time.time()
        self._cpu = 0.0
        self.phases: dict[str, dict[str, float]] = {}

    def mark(self, phase: str) -> None:
        """End a phase of a cold start: the time since the previous mark is attributed to it."""
        wall, cpu = time.time(), time.process_time()
        self.phases[phase] = {"wall": wall - self._wall, "cpu": cpu - self._cpu}
        self._wall, self._cpu = wall, cpu

    def run(self, loss: Loss, train: Train, generate: Generate, libraries: list[str]) -> None:
        """Run the workload given by the flags. The caller has marked "import" and "load"."""
        if self.workload == "cold":
            self._generate("cold-generate", generate)()
            self.mark("generate")
            self._loss("cold-loss", loss)()
            self.mark("loss")
            emit(phases=self.phases)
        elif self.workload == "train":
            self._steps(train)
        else:
            call = self._loss("loss", loss) if self.workload == "loss" else self._generate(self.workload, generate)
            call()
            for _ in range(self.repeats):
                figures = timed(call)
                if self.workload == "loss":
                    value, gradients = figures["result"]
                    figures["result"] = {"loss": value, "gradient_norm": norm(gradients)}
                    del gradients  # free them before the next call allocates its own
                emit(**figures)
        emit(versions={name: version(name) for name in libraries})

    def _steps(self, train: Train) -> None:
        """Time training steps. Each updates the weights of the previous one, so the last loss checks all of them."""
        work = self.works["train"]
        step = train(work.inputs(self.sizes), work.labels(self.sizes))
        first = step()
        for _ in range(self.repeats):
            figures = timed(step)
            emit(**figures | {"result": {"first_loss": first, "loss": figures["result"]}})

    def _loss(self, name: str, loss: Loss) -> Callable[[], Any]:
        inputs, labels = self.works[name].inputs(self.sizes), self.works[name].labels(self.sizes)
        return lambda: loss(inputs, labels)

    def _generate(self, name: str, generate: Generate) -> Callable[[], list[list[int]]]:
        work, inputs = self.works[name], self.works[name].inputs(self.sizes)

        def call() -> list[list[int]]:
            tokens = generate(inputs, work.target, work.beams)
            lengths = {len(row) for row in tokens}
            if len(tokens) != work.batch or lengths != {work.target}:
                raise SystemExit(
                    f"{name}: expected {work.batch} rows of {work.target} new tokens, "
                    f"got {len(tokens)} rows of lengths {sorted(lengths)}"
                )
            return tokens

        return call


def pin(cores: list[int] | None) -> int:
    """Pin this process to some cores, with one thread per core; return the number of threads."""
    cores = cores or sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[name] = str(len(cores))
    os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return len(cores)


def emit(**record: Any) -> None:
    """Print a record, with the peak memory so far, as a line of JSON."""
    print(json.dumps(record | {"peak_gb": peak_gb()}), flush=True)


def peak_gb() -> float:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def norm(arrays: list[np.ndarray]) -> float:
    """Euclidean norm of all arrays together."""
    # Sum in f64: in f32, the rounding errors of 16 million terms can hide a real difference or look like one. In
    # pieces, because an embedding table in f64 can exceed the peak memory of the measured work.
    flat = [array.reshape(-1) for array in arrays]
    pieces = (array[at : at + NORM_PIECE] for array in flat for at in range(0, array.size, NORM_PIECE))
    return sum(float((piece.astype("float64") ** 2).sum()) for piece in pieces) ** 0.5


def timed(call: Callable[[], Any]) -> dict[str, Any]:
    """Return wall seconds, CPU seconds of all threads, and the result of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "result": result}
