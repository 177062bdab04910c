"""A worker's side of a benchmark: its flags, cores and clocks, and one JSON line on stdout per repeat."""

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

# Inputs and labels -> the loss, and its gradients, all computed: they are looked at when the clock has stopped.
Loss = Callable[["np.ndarray", "np.ndarray"], tuple[float, list["np.ndarray"]]]
# Inputs and labels -> a training step, which updates the weights and returns the loss that it found before.
Train = Callable[["np.ndarray", "np.ndarray"], Callable[[], float]]
# Inputs, new tokens and beams -> the tokens of each row.
Generate = Callable[["np.ndarray", int, int], list[list[int]]]

NORM_PIECE = 1 << 18  # numbers at a time


class Worker:
    """Create it before importing NumPy, JAX or torch: they choose their threads when they start."""

    def __init__(
        self,
        description: str,
        precisions: tuple[str, ...] = ("f32",),
        works: Callable[[bool], tuple[Sizes, dict[str, Work]]] = sizes_and_works,
    ) -> None:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("workload", choices=["prepare", "loss", "train", "generate", "beam", "cold", "gemm"])
        parser.add_argument("--model-dir", type=Path, help="where `prepare` puts the model and the others find it")
        parser.add_argument("--repeats", type=int, default=3, help="timed calls, after one that is not timed")
        parser.add_argument("--pin", type=int, nargs="+", metavar="CORE", help="run on these cores only")
        parser.add_argument("--precision", choices=precisions, default=precisions[0])
        parser.add_argument("--attention", choices=["full", "local", "transient-global"], default="full")
        parser.add_argument("--source", type=int, default=0, help="length of the input, unless attention is full")
        parser.add_argument("--remat", action="store_true", help="keep no activations inside layers (flaxen)")
        parser.add_argument("--tiny", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
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

        # The clocks of the first phase start with the process, before Python itself is up.
        self._wall = flags.started or time.time()
        self._cpu = 0.0
        self.phases: dict[str, dict[str, float]] = {}

    def mark(self, phase: str) -> None:
        """End a phase of a cold start: what has passed since the last mark belongs to it."""
        wall, cpu = time.time(), time.process_time()
        self.phases[phase] = {"wall": wall - self._wall, "cpu": cpu - self._cpu}
        self._wall, self._cpu = wall, cpu

    def run(self, loss: Loss, train: Train, generate: Generate, libraries: list[str]) -> None:
        """Do the workload that the flags name. Marks "import" and "load" are the caller's."""
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
                    del gradients  # before the next call makes its own
                emit(**figures)
        emit(versions={name: version(name) for name in libraries})

    def _steps(self, train: Train) -> None:
        """Each step goes on from the weights of the one before, so the last loss is a check on all of them."""
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
    """Keep this process to some cores, with as many threads; how many they are."""
    cores = cores or sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[name] = str(len(cores))
    os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return len(cores)


def emit(**record: Any) -> None:
    print(json.dumps(record | {"peak_gb": peak_gb()}), flush=True)


def peak_gb() -> float:
    """The largest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def norm(arrays: list[np.ndarray]) -> float:
    # Summed in f64: in f32 the rounding of 16 million terms hides a real difference, or looks like one. And in pieces,
    # because a whole table in f64 can be more than the peak memory of the work that is measured.
    flat = [array.reshape(-1) for array in arrays]
    pieces = (array[at : at + NORM_PIECE] for array in flat for at in range(0, array.size, NORM_PIECE))
    return sum(float((piece.astype("float64") ** 2).sum()) for piece in pieces) ** 0.5


def timed(call: Callable[[], Any]) -> dict[str, Any]:
    """Wall seconds, CPU seconds of all threads, and what the call returned."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "result": result}
