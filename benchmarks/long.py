"""Measure LongT5 on inputs of growing length: one process per system, attention, length and workload. See README.md."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import report
from report import PEERS, Record
from rich.console import Console
from rich.table import Table
from run import OUT_OF_MEMORY, SYSTEMS, launch
from workers.workloads import long_sizes_and_works

# Do not import NumPy, JAX or torch here: the peak memory of a child process starts at that of its parent.

ATTENTIONS = ("local", "transient-global")
WORKLOADS = ("loss", "generate")
LENGTHS, TINY_LENGTHS = (1024, 4096, 8192, 16384), (64, 128)
PEERS_UP_TO = 16384  # longer inputs are measured with Flaxen only


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--lengths", type=int, nargs="+", metavar="N", help=f"input lengths in tokens (default: {LENGTHS})"
    )
    parser.add_argument("--attention", choices=ATTENTIONS, nargs="+", default=list(ATTENTIONS))
    parser.add_argument("--workloads", choices=WORKLOADS, nargs="+", default=list(WORKLOADS))
    parser.add_argument("--systems", choices=list(SYSTEMS), nargs="+", default=list(SYSTEMS), metavar="SYSTEM")
    parser.add_argument(
        "--remat",
        action="store_true",
        help="flaxen: recompute layers in the backward pass instead of storing activations",
    )
    parser.add_argument(
        "--cores", type=int, default=1, help="number of cores; ratios are of CPU time for 1 core, of wall time for more"
    )
    parser.add_argument("--rounds", type=int, default=1, help="number of processes per system; systems alternate")
    parser.add_argument("--repeats", type=int, default=2, help="timed calls in each process")
    parser.add_argument("--limit-gb", type=float, default=20.0, help="kill a process that uses more memory than this")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes, to check that everything runs; the figures mean nothing"
    )
    flags = parser.parse_args()
    available = sorted(os.sched_getaffinity(0))
    if not 1 <= flags.cores <= len(available):
        parser.error(f"--cores {flags.cores}: this process may use {len(available)}")
    if problem := SYSTEMS["torch"].missing():
        parser.error(f"creating the random model requires torch; {problem}")
    flags.lengths = sorted(set(flags.lengths or (TINY_LENGTHS if flags.tiny else LENGTHS)))

    console = Console(width=None if sys.stdout.isatty() else 150)
    with tempfile.TemporaryDirectory(prefix="flaxen-bench-") as scratch:
        bench = Bench(console, Path(scratch), available[: flags.cores], flags)
        for attention in flags.attention:
            bench.prepare(attention)
            for workload in flags.workloads:
                for length in flags.lengths:
                    for number in range(1, flags.rounds + 1):
                        console.print(
                            f"{workload}, {attention}, {length:,}: round {number} of {flags.rounds}", style="dim"
                        )
                        bench.round(attention, workload, length)
                bench.show(attention, workload)
    named = [(case.system, record) for case, records in bench.samples.items() for record in records]
    console.print("\n".join(report.versions(named)))
    if flags.json:
        samples = [case._asdict() | record for case, records in bench.samples.items() for record in records]
        failures = [case._asdict() | {"failure": failure} for case, failure in bench.failures.items()]
        settings = {"cores": flags.cores, "tiny": flags.tiny, "remat": flags.remat}
        flags.json.write_text(json.dumps(settings | {"samples": samples, "failures": failures}))
    if any(not failure.startswith(OUT_OF_MEMORY) for failure in bench.failures.values()):
        sys.exit(1)


class Case(NamedTuple):
    """The measurement of one process."""

    attention: str
    workload: str
    length: int
    system: str


class Bench:
    """Runs worker processes one at a time and collects their records or the reason of their failure."""

    def __init__(self, console: Console, scratch: Path, cores: list[int], flags: argparse.Namespace) -> None:
        self.console, self.scratch, self.cores, self.flags = console, scratch, cores, flags
        self.samples: dict[Case, list[Record]] = {}
        self.failures: dict[Case, str] = {}  # a case that failed is not run again
        self.missing = {name: problem for name in flags.systems if (problem := SYSTEMS[name].missing())}

    def prepare(self, attention: str) -> None:
        """Create the random model with torch, and convert it to a format that Flax can read."""
        with_flax = "flax" in self.flags.systems and "flax" not in self.missing
        for name in ("torch", "flax") if with_flax else ("torch",):
            ended = launch(SYSTEMS[name], "prepare", self._worker_flags(attention), self.scratch / "cache" / "prepare")
            if ended.failure:
                raise SystemExit(f"{name} could not prepare the random model: {ended.failure}")

    def round(self, attention: str, workload: str, length: int) -> None:
        for name in self.flags.systems:
            case = Case(attention, workload, length, name)
            if name in self.missing or case in self.failures or (name in PEERS and length > PEERS_UP_TO):
                continue
            more = ["--source", str(length), *["--remat"] * (self.flags.remat and name not in PEERS)]
            # Each system has its own compilation cache, so that only the first round compiles.
            cache = self.scratch / "cache" / name
            ended = launch(SYSTEMS[name], workload, self._worker_flags(attention) + more, cache, self.flags.limit_gb)
            if ended.failure:
                self.failures[case] = ended.failure
            self.samples.setdefault(case, []).extend(ended.records)
            style = "red" if ended.failure else "dim"
            self.console.print(f"  {name}: {ended.failure or ended}", style=style, markup=False)

    def show(self, attention: str, workload: str) -> None:
        mine = {case: records for case, records in self.samples.items() if case[:2] == (attention, workload)}
        # A case that failed in a later round has no figures.
        figures = {
            case: Figures(records, len(self.cores)) for case, records in mine.items() if case not in self.failures
        }
        result = table(self._title(attention, workload), list(mine), figures, self.failures, len(self.cores))
        self.console.print(result)
        if rows := growth(figures):
            self.console.print(rows)
        for length in sorted({case.length for case in figures}):
            systems = {case.system: mine[case] for case in figures if case.length == length}
            if workload == "loss" and (wrong := report.disagreement(systems)):
                self.console.print(f"DIFFERENT WORK at {length:,}: {wrong}", style="red", markup=False)
        if (busy := max((record["others"] for records in mine.values() for record in records), default=0.0)) > 0.1:
            self.console.print(f"DISTURBED, do not quote: other processes used {busy:.2f} cores", style="red")
        for case in [case for case in mine if case in self.failures]:
            self.console.print(f"{case.system} at {case.length:,}: {self.failures[case]}", style="red", markup=False)
        for name, problem in self.missing.items():
            self.console.print(f"{name}: {problem}", style="red", markup=False)
        if max(self.flags.lengths) > PEERS_UP_TO:
            self.console.print(f"{', '.join(PEERS)}: not run beyond {PEERS_UP_TO:,}", style="dim")

    def _title(self, attention: str, workload: str) -> str:
        target = long_sizes_and_works(attention, 0, self.flags.tiny)[1][workload].target
        if workload == "generate":
            return f"generate, {attention}: greedy, batch 1, {target} new tokens"
        remat = ", flaxen with remat" if self.flags.remat else ""
        return f"loss, {attention}: forward + backward, batch 1, {target} out{remat}"

    def _worker_flags(self, attention: str) -> list[str]:
        flags = ["--model-dir", str(self.scratch / attention), "--attention", attention]
        flags += ["--repeats", str(self.flags.repeats), *["--tiny"] * self.flags.tiny]
        return [*flags, "--pin", *map(str, self.cores)]


class Figures:
    """Times of the fastest call over all rounds, the largest peak memory, and the result."""

    def __init__(self, records: list[Record], cores: int) -> None:
        calls = [record for record in records if "wall" in record]
        self.cpu, self.wall = (min(call[clock] for call in calls) for clock in ("cpu", "wall"))
        self.seconds = min(call[report.clock(cores)] for call in calls)  # the time that ratios are computed from
        self.peak_gb = max(call["peak_gb"] for call in calls)
        self.result = calls[-1]["result"]


def table(title: str, cases: list[Case], figures: dict[Case, Figures], failures: dict[Case, str], cores: int) -> Table:
    """One row per length and system, with ratios to torch and Flax at that length."""
    clock = {"cpu": "CPU", "wall": "wall"}[report.clock(cores)]
    peers = [peer for peer in PEERS if any(case.system == peer for case in cases)]
    generates = any(case.workload == "generate" for case in cases)
    result = Table(title=title, title_justify="left")
    result.add_column("input", justify="right")
    result.add_column("system")
    ratios = [f"{what} / {peer}" for peer in peers for what in (clock, "peak")]
    for header in ("CPU s", "wall s", "peak GB", *ratios, "same tokens" if generates else "loss, |gradient|"):
        result.add_column(header, justify="right")
    for length in sorted({case.length for case in cases}):
        result.add_section()
        first: Figures | None = None  # the system whose tokens the others are compared with
        for case in cases:
            if case.length != length:
                continue
            if case in failures:
                short = OUT_OF_MEMORY if failures[case].startswith(OUT_OF_MEMORY) else "failed"
                result.add_row(f"{length:,}", case.system, short)
                continue
            own = figures[case]
            first = first or own
            row = [f"{own.cpu:.3g}", f"{own.wall:.3g}", f"{own.peak_gb:.2f}"]
            for peer in peers:
                other = figures.get(case._replace(system=peer))
                row += (
                    [f"{own.seconds / other.seconds:.2f}", f"{own.peak_gb / other.peak_gb:.2f}"] if other else ["", ""]
                )
            row.append(
                f"{report.agreement(own.result, first.result):.0%}" if generates else report.loss_cell(own.result)
            )
            result.add_row(f"{length:,}", case.system, *row)
    return result


def growth(figures: dict[Case, Figures]) -> Table | None:
    """Growth of Flaxen's time and memory from each length to the next; None if there is only one length."""
    result = Table(title="growth", title_justify="left")
    for header in ("system", "input", "time ×", "exponent of time", "peak ×"):
        result.add_column(header, justify="left" if header in ("system", "input") else "right")
    for system in dict.fromkeys(case.system for case in figures if case.system not in PEERS):
        for (before, short), (after, long) in pairwise((c, f) for c, f in figures.items() if c.system == system):
            time, peak = long.seconds / short.seconds, long.peak_gb / short.peak_gb
            exponent = math.log(time) / math.log(after.length / before.length)
            lengths = f"{before.length:,} → {after.length:,}"
            result.add_row(system, lengths, f"{time:.2f}", f"{exponent:.2f}", f"{peak:.2f}")
    return result if result.row_count else None


if __name__ == "__main__":
    main()
