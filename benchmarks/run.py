"""Measure Flaxen, torch and Flax side by side, one process per system, and print the ratios. See README.md."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import report
from rich.console import Console
from workers.workloads import Sizes, Work, sizes_and_works

# Do not import NumPy, JAX or torch here: the peak memory of a child process starts at that of its parent.

HERE = Path(__file__).resolve().parent
PEERS_PYTHON = HERE.parent / ".venv-peers" / "bin" / "python"

WORKLOADS = ("loss", "train", "generate", "beam", "cold")
POLL = 0.1  # seconds between two checks of a worker's memory
OUT_OF_MEMORY = "out of memory"  # prefix of the failure message of such a worker
SHORT_OF_MEMORY = r"(?i)out of memory|can't allocate memory|RESOURCE_EXHAUSTED|bad_alloc|MemoryError"

Record = dict[str, Any]


@dataclass(frozen=True)
class System:
    """A worker script, the Python that runs it, and the module it requires."""

    script: str
    needs: str
    python: Path = Path(sys.executable)
    precision: str = "f32"
    workloads: tuple[str, ...] = WORKLOADS

    def missing(self) -> str | None:
        """Return why the system cannot run, or None."""
        if not self.python.exists():
            return "not installed; run: make bench-peers"
        if self.python == Path(sys.executable) and find_spec(self.needs) is None:
            return f"not installed: no module {self.needs!r} in this environment; use the one that make builds"
        return None


SYSTEMS = {
    "torch": System("torch_t5.py", needs="torch"),
    "flax": System("flax_t5.py", needs="transformers", python=PEERS_PYTHON),
    "flaxen": System("flaxen_t5.py", needs="flaxen"),
    "flaxen-bf16": System("flaxen_t5.py", needs="flaxen", precision="bf16", workloads=WORKLOADS[:-1]),
}
GEMM = System("gemm.py", needs="torch")


def main(
    description: str | None = __doc__,
    systems: dict[str, System] = SYSTEMS,
    workloads: tuple[str, ...] = WORKLOADS,
    works: Callable[[bool], tuple[Sizes, dict[str, Work]]] = sizes_and_works,
) -> None:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("workload", choices=[*workloads, "all"], nargs="?", default="all")
    parser.add_argument(
        "--cores", type=int, default=1, help="number of cores; ratios are of CPU time for 1 core, of wall time for more"
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of processes per system; systems alternate")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls in each process")
    parser.add_argument("--systems", choices=list(systems), nargs="+", default=list(systems), metavar="SYSTEM")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes, to check that everything runs; the figures mean nothing"
    )
    flags = parser.parse_args()

    available = sorted(os.sched_getaffinity(0))
    if not 1 <= flags.cores <= len(available):
        parser.error(f"--cores {flags.cores}: this process may use {len(available)}")
    if problem := GEMM.missing():
        parser.error(f"the random model and the GEMM peak require torch; {problem}")

    console = Console(width=None if sys.stdout.isatty() else 150)
    with tempfile.TemporaryDirectory(prefix="flaxen-bench-") as scratch:
        cores = available[: flags.cores]
        bench = Bench(console, Path(scratch), cores, flags.repeats, flags.tiny, systems, *works(flags.tiny))
        bench.prepare(flags.systems)
        for workload in workloads if flags.workload == "all" else (flags.workload,):
            names = [name for name in flags.systems if workload in systems[name].workloads]
            bench.gemm()
            for number in range(1, flags.rounds + 1):
                console.print(f"{workload}, round {number} of {flags.rounds}", style="dim")
                bench.round(workload, names)
            bench.show(workload, names)
    console.print(report.footer(bench.samples, flags.cores))
    if flags.json:
        flags.json.write_text(json.dumps({"cores": flags.cores, "tiny": flags.tiny, "samples": bench.samples}))
    if any(not text.startswith("not installed") for text in bench.failures.values()):
        sys.exit(1)


class Bench:
    """Runs worker processes one at a time and collects their records in `samples[workload][system]`."""

    def __init__(
        self,
        console: Console,
        scratch: Path,
        cores: list[int],
        repeats: int,
        tiny: bool,
        systems: dict[str, System],
        sizes: Sizes,
        works: dict[str, Work],
    ) -> None:
        self.console, self.scratch, self.cores = console, scratch, cores
        self.repeats, self.tiny = repeats, tiny
        self.systems, self.sizes, self.works = systems, sizes, works
        self.samples: dict[str, dict[str, list[Record]]] = {}
        self.failures: dict[str, str] = {}  # by system; a failed system is not run again

    def prepare(self, names: list[str]) -> None:
        """Create the random model with torch, and convert it to a format that Flax can read."""
        self._worker("torch", self.systems["torch"], "prepare")
        if "torch" in self.failures:
            raise SystemExit(f"could not create the random model: {self.failures['torch']}")
        for name in names:
            if problem := self.systems[name].missing():
                self.failures[name] = problem
        if "flax" in names and "flax" not in self.failures:
            self._worker("flax", self.systems["flax"], "prepare")

    def gemm(self) -> None:
        self._keep("gemm", "gemm", self._worker("gemm", GEMM, "gemm"))
        if "gemm" in self.failures:
            raise SystemExit(f"could not measure the GEMM peak: {self.failures['gemm']}")

    def round(self, workload: str, names: list[str]) -> None:
        for name in names:
            if name in self.failures:
                continue
            if workload != "cold":
                self._keep(workload, name, self._worker(name, self.systems[name], workload, cache=name))
                continue
            with tempfile.TemporaryDirectory(dir=self.scratch) as empty:
                for start in ("first", "second"):
                    if name in self.failures:
                        break
                    records = self._worker(name, self.systems[name], "cold", cache=empty)
                    self._keep(workload, name, [record | {"start": start} for record in records])

    def show(self, workload: str, names: list[str]) -> None:
        cores = len(self.cores)
        if workload == "cold" and self.samples.get("cold"):
            self.console.print(report.cold_table(self.samples, cores))
        elif self.samples.get(workload):
            self.console.print(report.work_table(workload, self.samples, cores, self.sizes, self.works[workload]))
        checked = self.samples.get(workload) if workload in ("loss", "train") else None
        if checked and (wrong := report.disagreement(checked)):
            self.console.print(f"DIFFERENT WORK: {wrong}", style="red", markup=False)
        if disturbed := report.disturbed(workload, self.samples):
            self.console.print(f"DISTURBED, do not quote: {disturbed}", style="red", markup=False)
        for name in names:
            if name in self.failures:
                self.console.print(f"{name}: {self.failures[name]}", style="red", markup=False)

    def _keep(self, workload: str, name: str, records: list[Record]) -> None:
        if records:
            self.samples.setdefault(workload, {}).setdefault(name, []).extend(records)

    def _worker(self, name: str, system: System, workload: str, cache: str = "prepare") -> list[Record]:
        """Run one process and return its records; if it fails, return none and add it to `failures`."""
        flags = ["--model-dir", str(self.scratch / "model"), "--repeats", str(self.repeats)]
        flags += ["--pin", *map(str, self.cores), *["--tiny"] * self.tiny]
        # Each system has its own compilation cache, so that only the first round compiles.
        ended = launch(system, workload, flags, self.scratch / "cache" / cache)
        if ended.failure:
            self.failures[name] = f"failed in {workload}: {ended.failure}"
            self.console.print(f"  {name}: {self.failures[name]}", style="red", markup=False)
        else:
            self.console.print(f"  {name}: {ended}", style="dim")
        return ended.records


@dataclass(frozen=True)
class Ended:
    """The result of a worker process: its records, or why it failed."""

    records: list[Record]
    failure: str | None
    seconds: float
    others: float  # average number of cores used by other processes meanwhile

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s in total, other processes used {self.others:.2f} cores"


def launch(system: System, workload: str, flags: list[str], cache: Path, limit_gb: float = math.inf) -> Ended:
    """Run a worker; kill it if it uses more than `limit_gb` of memory."""
    command = [str(system.python), str(HERE / "workers" / system.script), workload, "--precision", system.precision]
    return watch([*command, *flags, "--started", str(time.time())], cache, limit_gb, silent=workload == "prepare")


def watch(command: list[str], cache: Path, limit_gb: float = math.inf, silent: bool = False) -> Ended:
    """Run a process; kill it if it uses more than `limit_gb`. Printing no records is a failure, unless `silent`."""
    environment = os.environ | {
        "XDG_CACHE_HOME": str(cache),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    started, busy = time.time(), others_cpu()
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
    stdout, stderr, resident = None, "", 0.0
    try:
        while stdout is None:
            try:
                stdout, stderr = process.communicate(timeout=POLL)
            except subprocess.TimeoutExpired:
                resident = max(resident, resident_gb(process.pid))
                if resident > limit_gb:
                    process.kill()
    finally:
        process.kill()  # in case we were interrupted; no effect on a process that has ended
    seconds = time.time() - started
    others = (others_cpu() - busy) / seconds
    records = [json.loads(line) | {"others": others} for line in stdout.splitlines() if line.startswith("{")]
    failure = None
    if resident > limit_gb:
        failure = f"{OUT_OF_MEMORY}: more than {limit_gb:g} GB"
    elif process.returncode != 0 or not (silent or records):
        reason = (stderr.strip().splitlines() or ["no message"])[-1]
        # Out of memory: the kernel kills the process, torch and XLA raise exceptions.
        short = process.returncode == -signal.SIGKILL or re.search(SHORT_OF_MEMORY, stderr)
        failure = f"{OUT_OF_MEMORY}: " * bool(short) + f"exit {process.returncode}, {reason}"
    return Ended([] if failure else records, failure, seconds, others)


def resident_gb(pid: int) -> float:
    """Current resident memory of a process (Linux)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


def others_cpu() -> float:
    """CPU seconds since boot of all processes except our finished children (Linux; includes stolen time)."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK") - children.ru_utime - children.ru_stime


if __name__ == "__main__":
    main()
