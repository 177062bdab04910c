"""Measure speed and memory of decoding and preprocessing JPEG files. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

import report
from report import Record
from rich.console import Console
from rich.table import Table
from run import HERE, PEERS_PYTHON, Ended, System, watch

# Do not import NumPy or Pillow here: the peak memory of a child process starts at that of its parent.

MEASURES = ("speed", "memory")
OURS = System("preprocessing.py", needs="PIL")
SYSTEMS = {  # the worker, and the number of threads, each of which gets its own core
    "transformers": (System("preprocessing.py", needs="transformers", python=PEERS_PYTHON), 1),
    "flaxen, 1 thread": (OURS, 1),
    "flaxen, 2 threads": (OURS, 2),
}
TOLERANCE = 1e-6  # largest accepted difference of pixels, which are between -1 and 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measure", choices=[*MEASURES, "all"], nargs="?", default="all")
    parser.add_argument("--rounds", type=int, default=3, help="number of processes per system; systems alternate")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls in each process")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument(
        "--tiny", action="store_true", help="only a few images, to check that everything runs; the figures mean nothing"
    )
    flags = parser.parse_args()
    if problem := OURS.missing():
        parser.error(problem)

    console = Console(width=None if sys.stdout.isatty() else 150)
    with tempfile.TemporaryDirectory(prefix="flaxen-bench-") as scratch:
        measures = MEASURES if flags.measure == "all" else (flags.measure,)
        bench = Bench(console, Path(scratch), flags.tiny, measures)
        if "speed" in measures:
            bench.speed(flags.rounds, flags.repeats)
        if "memory" in measures:
            bench.memory()
    console.print("\n".join(report.versions([(r["system"], r) for r in bench.samples if "versions" in r])))
    if flags.json:
        flags.json.write_text(json.dumps({"tiny": flags.tiny, "samples": bench.samples}))
    if any(not text.startswith(("not installed", "not run")) for text in bench.failures.values()):
        sys.exit(1)


class Bench:
    """Runs worker processes one at a time and collects their records or the reason of their failure."""

    def __init__(self, console: Console, scratch: Path, tiny: bool, measures: tuple[str, ...]) -> None:
        self.console, self.scratch = console, scratch
        self.files, self.block, self.rows = (16, 8, (20, 40)) if tiny else (512, 256, (1000, 20_000))
        self.samples: list[Record] = []
        self.failures: dict[str, str] = {}  # by system; a failed system is not run again
        self.cores = sorted(os.sched_getaffinity(0))
        numbers = ["--files", str(self.files), "--rows", *map(str, self.rows if "memory" in measures else ())]
        ended = self._watch(System("pictures.py", needs="PIL"), [str(scratch / "pictures"), *numbers], silent=True)
        if ended.failure:
            raise SystemExit(f"could not generate the images: {ended.failure}")

    def speed(self, rounds: int, repeats: int) -> None:
        for name, (system, threads) in SYSTEMS.items():
            if problem := system.missing():
                self.failures[name] = problem
            elif threads > len(self.cores):
                self.failures[name] = f"not run: this process may use only {len(self.cores)} core"
        flags = ["--table", str(self._table("files")), "--reference", str(self.scratch / "reference.npy")]
        flags += ["--block", str(self.block), "--repeats", str(repeats)]
        for number in range(1, rounds + 1):
            self.console.print(f"speed, round {number} of {rounds}", style="dim")
            for name, (system, threads) in SYSTEMS.items():
                if name not in self.failures:
                    self._worker(name, system, threads, name.split(",")[0], *flags)
        of = {name: [r for r in self.samples if r["system"] == name and "images" in r] for name in SYSTEMS}
        of = {name: records for name, records in of.items() if records}
        off = {
            name: [r["difference"] for r in self.samples if r["system"] == name and "difference" in r] for name in of
        }
        self.console.print(speed_table(of, off))
        for name, differences in off.items():
            if (wrong := max(differences)) > TOLERANCE:
                self.console.print(f"DIFFERENT WORK: pixels of {name} differ by up to {wrong:.2g}", style="red")
        if (busy := max((r["others"] for records in of.values() for r in records), default=0.0)) > 0.1:
            self.console.print(f"DISTURBED, do not quote: other processes used {busy:.2f} cores", style="red")
        for name, failure in self.failures.items():
            self.console.print(f"{name}: {failure}", style="red", markup=False)

    def memory(self) -> None:
        for rows in self.rows:
            self._worker("memory", OURS, 2, "memory", "--table", str(self._table(f"{rows}-rows")))
        self.console.print(memory_table([record for record in self.samples if "peaks" in record], self.files))
        if "memory" in self.failures:
            self.console.print(f"memory: {self.failures['memory']}", style="red", markup=False)

    def _table(self, folder: str) -> Path:
        return self.scratch / "pictures" / folder / "table.jsonl"

    def _worker(self, name: str, system: System, threads: int, *flags: str) -> None:
        """Run one process, with a core for each thread if there are enough."""
        cores = ["--pin", *map(str, self.cores[:threads])]
        ended = self._watch(system, [*flags, "--threads", str(threads), *cores])
        if ended.failure:
            self.failures[name] = ended.failure
        self.samples += [record | {"system": name, "threads": threads} for record in ended.records]
        style = "red" if ended.failure else "dim"
        self.console.print(f"  {name}: {ended.failure or ended}", style=style, markup=False)

    def _watch(self, system: System, flags: list[str], silent: bool = False) -> Ended:
        command = [str(system.python), str(HERE / "workers" / system.script), *flags]
        return watch(command, self.scratch / "cache", silent=silent)


def speed_table(of: dict[str, list[Record]], off: dict[str, list[float]]) -> Table:
    """Images per second of each system, and its ratio to the first system."""
    speeds = {
        name: {clock: median(record["images"] / record[clock] for record in records) for clock in ("cpu", "wall")}
        for name, records in of.items()
    }
    first = next(iter(of), "")
    result = Table(title="speed: from JPEG files of about 500 x 375 to pixels of 224 x 224", title_justify="left")
    ratios = [f"{clock} speed / {first}" for clock in ("CPU", "wall")]
    for header in ("system", "images / CPU s", "images / wall s", *ratios, "peak GB", "largest difference"):
        result.add_column(header, justify="left" if header == "system" else "right")
    for name, records in of.items():
        row = [f"{speed:.1f}" for speed in speeds[name].values()]
        row += [f"{speeds[name][clock] / speeds[first][clock]:.2f}" for clock in ("cpu", "wall")]
        row += [f"{max(record['peak_gb'] for record in records):.2f}"]
        result.add_row(name, *row, f"{max(off[name]):.2g}")
    return result


def memory_table(records: list[Record], files: int) -> Table:
    title = f"memory: peak resident MB while reading all images of a table (hard links to {files} files)"
    result = Table(title=title, title_justify="left")
    for header in ("rows", "after imports", "after the table", "after all images", "CPU s"):
        result.add_column(header, justify="right")
    for record in records:
        peaks = [f"{gigabytes * 1024:.0f}" for gigabytes in record["peaks"].values()]
        result.add_row(f"{record['rows']:,}", *peaks, f"{record['cpu']:.1f}")
    return result


if __name__ == "__main__":
    main()
