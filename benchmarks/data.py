"""Measure the data pipeline: tokenization speed, memory, and whether training waits for batches."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import report
from rich.console import Console
from rich.table import Table
from run import HERE, others_cpu

# Do not import NumPy or JAX here: the peak memory of a child process starts at that of its parent.

Record = dict[str, Any]
MEASURES = ("tokenize", "memory", "feed")
SYSTEMS = ("datasets", "flaxen", "flaxen-json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measure", choices=[*MEASURES, "all"], nargs="?", default="all")
    parser.add_argument(
        "--cores", type=int, default=1, help="number of cores; ratios are of CPU time for 1 core, of wall time for more"
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of interleaved rounds (tokenize, feed)")
    parser.add_argument("--large", action="store_true", help="memory: also measure 1 GB of text (needs 3 GB of disk)")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument(
        "--tiny", action="store_true", help="very little text, to check that everything runs; the figures mean nothing"
    )
    flags = parser.parse_args()
    available = sorted(os.sched_getaffinity(0))
    if not 1 <= flags.cores <= len(available):
        parser.error(f"--cores {flags.cores}: this process may use {len(available)}")

    console = Console(width=None if sys.stdout.isatty() else 150)
    with tempfile.TemporaryDirectory(prefix="flaxen-bench-") as scratch:
        data = Data(console, Path(scratch), available[: flags.cores], flags.tiny)
        for name in MEASURES if flags.measure == "all" else (flags.measure,):
            match name:
                case "tokenize":
                    data.tokenize(flags.rounds)
                    console.print(tokenize_table(data.samples["tokenize"], flags.cores))
                case "memory":
                    data.memory([0.5, 1] if flags.tiny else [10, 100, *[1000] * flags.large])
                    console.print(memory_table(data.samples["memory"]))
                case "feed":
                    data.feed(flags.rounds)
                    console.print(feed_table(data.samples["feed"], flags.cores))
            # Other processes do not affect the memory of this one.
            if name != "memory" and (busy := max(record["others"] for record in data.samples[name])) > 0.1:
                console.print(
                    f"DISTURBED, do not quote: other processes used {busy:.2f} cores during {name}", style="red"
                )
    console.print(data.versions(), end="")
    if flags.json:
        flags.json.write_text(json.dumps({"cores": flags.cores, "tiny": flags.tiny, "samples": data.samples}))


class Data:
    """Runs worker processes one at a time and collects their records in `samples[measure]`."""

    def __init__(self, console: Console, scratch: Path, cores: list[int], tiny: bool) -> None:
        self.console, self.scratch, self.cores, self.tiny = console, scratch, cores, tiny
        self.samples: dict[str, list[Record]] = defaultdict(list)
        self.text, self.vocabulary = scratch / "text.txt", scratch / "vocabulary"
        self._write_text(self.text, 1 if tiny else 8)
        size = ["--size", "2000" if tiny else "8000"]
        self._run("corpus.py", "vocabulary", str(self.text), "--out", str(self.vocabulary), *size)

    def tokenize(self, rounds: int) -> None:
        for _ in range(rounds):
            for system in SYSTEMS:
                files = ["--text", str(self.text), "--vocabulary", str(self.vocabulary)]
                self._worker("tokenize", {"system": system}, "tokenizing.py", system, *files)

    def memory(self, sizes: list[float]) -> None:
        for megabytes in sizes:
            text = self._write_text(self.scratch / "large.txt", megabytes)
            for tokenizer in ("bytes", "sentencepiece"):
                if tokenizer == "sentencepiece" and megabytes > 100:
                    continue  # would take minutes, and memory does not depend on the tokenizer
                vocabulary = [] if tokenizer == "bytes" else ["--vocabulary", str(self.vocabulary)]
                flags = ["--text", str(text), *vocabulary]
                self._worker("memory", {"tokenizer": tokenizer}, "store_memory.py", *flags)

    def feed(self, rounds: int) -> None:
        # Many short rounds: within a minute, the speed of a busy machine varies by more than the effect to be measured.
        flags = ["--text", str(self.text), "--vocabulary", str(self.vocabulary), "--rounds", str(6 * rounds)]
        self._worker("feed", {}, "feeding.py", *flags, *["--tiny"] * self.tiny)

    def versions(self) -> str:
        used = {record["system"]: record["versions"] for record in self._all() if "versions" in record}
        return "".join(f"{name}: {' '.join(map(' '.join, libraries.items()))}\n" for name, libraries in used.items())

    def _all(self) -> list[Record]:
        return [record for records in self.samples.values() for record in records]

    def _write_text(self, text: Path, megabytes: float) -> Path:
        self._run("corpus.py", "text", str(text), "--megabytes", str(megabytes))
        return text

    def _worker(self, measure: str, about: Record, script: str, *flags: str) -> None:
        """Run one worker in a temporary directory and collect its records."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as empty:
            pinned = ["--scratch", empty, "--pin", *map(str, self.cores)]
            started, busy = time.time(), others_cpu()
            output = self._run(script, *flags, *pinned)
        seconds = time.time() - started
        others = (others_cpu() - busy) / seconds
        name = " ".join([measure, *about.values()])
        self.console.print(f"  {name}: {seconds:.0f} s in total, other processes used {others:.2f} cores", style="dim")
        records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        self.samples[measure] += [record | about | {"others": others} for record in records]

    def _run(self, script: str, *flags: str) -> str:
        command = [sys.executable, str(HERE / "workers" / script), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise SystemExit(f"{script} failed (exit {done.returncode}): {reason}")
        return done.stdout


def tokenize_table(records: list[Record], cores: int) -> Table:
    runs = [record for record in records if "tokens" in record]
    clock = report.clock(cores)
    table = _table(
        f"tokenize: from {runs[0]['megabytes']:.1f} MB of text to training rows",
        ["system", "wall s (min)", "CPU s (min)", f"MB/{clock} s", "speed / datasets", "peak GB", "tokens", "in rows"],
    )
    of = {system: [record for record in runs if record["system"] == system] for system in SYSTEMS}
    slowest = median(record[clock] for record in of["datasets"])
    for system, mine in of.items():
        cells = [system]
        for kind in ("wall", "cpu"):
            times = [record[kind] for record in mine]
            cells.append(f"{median(times):.3g} ({min(times):.3g})")
        seconds = median(record[clock] for record in mine)
        cells += [f"{mine[0]['megabytes'] / seconds:.2f}", f"{slowest / seconds:.2f}"]
        cells += [f"{max(record['peak_gb'] for record in mine):.2f}", f"{mine[0]['tokens']:,}", f"{mine[0]['kept']:,}"]
        table.add_row(*cells)
    parts = {name: median(record["parts"][name] for record in of["datasets"]) for name in of["datasets"][0]["parts"]}
    table.caption = "CPU s of datasets: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
    return table


def memory_table(records: list[Record]) -> Table:
    headers = [
        "tokenizer",
        "text MB",
        "tokens",
        "after imports",
        "after building",
        "after 2,000 batches",
        "build CPU s",
        "read CPU s",
    ]
    table = _table("memory: peak resident MB while building a token store and reading it", headers)
    for record in sorted(records, key=lambda record: (record["tokenizer"], record["megabytes"])):
        peaks = [f"{gigabytes * 1024:.0f}" for gigabytes in record["peaks"].values()]
        seconds = [f"{record[name]['cpu']:.1f}" for name in ("build", "read")]
        table.add_row(record["tokenizer"], f"{record['megabytes']:.0f}", f"{record['tokens']:,}", *peaks, *seconds)
    return table


def feed_table(records: list[Record], cores: int) -> Table:
    headers = ["batches", "wall ms / step", "CPU ms / step", "waiting ms / step"]
    table = _table("feed: a training step with batches from the loader, and with a constant batch", headers)
    of = {name: [record for record in records if record.get("feed") == name] for name in ("constant", "loader")}
    for name, samples in of.items():
        table.add_row(
            name, *[_spread([1e3 * record[what] for record in samples]) for what in ("wall", "cpu", "waited")]
        )
    clock = report.clock(cores)
    pairs = [ours[clock] / other[clock] for ours, other in zip(of["loader"], of["constant"])]
    of_medians = median(r[clock] for r in of["loader"]) / median(r[clock] for r in of["constant"])
    making = 1e3 * median(record["making"] for record in records if "making" in record)
    table.caption = (
        f"loader / constant, {clock} time: {of_medians:.3f}; of {len(pairs)} pairs {_spread(pairs, '.3f')}\n"
        f"The loader takes {making:.2f} CPU ms per batch."
    )
    return table


def _spread(values: list[float], form: str = ".4g") -> str:
    return f"{median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def _table(title: str, headers: list[str]) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number else "left")
    return table


if __name__ == "__main__":
    main()
