"""Measure the time to the first step of `flaxen train denoise`: with empty caches, with warm caches, and resuming."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report
from rich.console import Console
from rich.table import Table
from run import HERE, others_cpu

Record = dict[str, Any]
STARTS = {
    "first": "empty caches",
    "second": "the same command in another directory: tokens and compiled programs are cached",
    "resumed": "the first run, resumed after a kill at its first checkpoint",
}
TINY = {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
POLL = 0.02  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cores", type=int, default=1, help="number of cores; ratios are of CPU time for 1 core, of wall time for more"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="number of rounds of all three starts, each round with its own caches"
    )
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model, to check that everything runs; the figures mean nothing"
    )
    flags = parser.parse_args()
    available = sorted(os.sched_getaffinity(0))
    if not 1 <= flags.cores <= len(available):
        parser.error(f"--cores {flags.cores}: this process may use {len(available)}")
    os.sched_setaffinity(0, available[: flags.cores])  # inherited by child processes

    console = Console(width=None if sys.stdout.isatty() else 150)
    samples: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="flaxen-bench-") as scratch:
        model = prepare(Path(scratch), flags.tiny)
        for _ in range(flags.rounds):
            with tempfile.TemporaryDirectory(dir=scratch) as caches:
                samples += starts(console, model, Path(caches))
    console.print(table(samples, flags.cores))
    if (busy := max(sample["others"] for sample in samples)) > 0.1:
        console.print(f"DISTURBED, do not quote: other processes used {busy:.2f} cores", style="red")
    if flags.json:
        flags.json.write_text(json.dumps({"cores": flags.cores, "tiny": flags.tiny, "samples": samples}))


def prepare(scratch: Path, tiny: bool) -> list[str]:
    """Write a text and a vocabulary, and return the flags that select them and the model."""
    for name, megabytes in (("text.txt", 1), ("more.txt", 4)):
        make_corpus("text", str(scratch / name), "--megabytes", str(megabytes))
    size = ["--size", "2000" if tiny else "8000"]
    make_corpus("vocabulary", str(scratch / "more.txt"), "--out", str(scratch / "vocabulary"), *size)
    flags = ["--model.tokenizer", str(scratch / "vocabulary"), "--data.train", str(scratch / "text.txt")]
    if not tiny:
        return ["--model.preset", "t5-small", *flags]
    (scratch / "config.json").write_text(json.dumps(TINY))
    return ["--model.config", str(scratch / "config.json"), "--objective.input-length", "64", *flags]


def make_corpus(*flags: str) -> None:
    subprocess.run([sys.executable, str(HERE / "workers" / "corpus.py"), *flags], check=True)


def starts(console: Console, model: list[str], caches: Path) -> list[Record]:
    """Measure all three kinds of start, beginning with empty caches."""
    samples = []
    for start in STARTS:
        run = caches / ("second" if start == "second" else "first")
        if start == "resumed":
            (run / "metrics.jsonl").unlink()  # so that its first record is the first step after resuming
        busy, begun = others_cpu(), time.monotonic()
        with Training(run, model, caches) as training:
            sample = training.until_record(1)
            if start == "first":
                training.until_checkpoint()
            elif start == "second":
                after = training.until_record(2)
                sample["step"] = {clock: after[clock] - sample[clock] for clock in ("wall", "cpu")}
        others = (others_cpu() - busy) / (time.monotonic() - begun)
        console.print(
            f"  {start}: first step after {sample['wall']:.1f} s, other processes used {others:.2f} cores", style="dim"
        )
        samples.append(sample | {"start": start, "others": others})
    return samples


class Training:
    """A training process, which is killed on exit."""

    def __init__(self, run: Path, model: list[str], caches: Path) -> None:
        command = [sys.executable, "-m", "flaxen.cli.main", "train", "denoise", "--out", str(run), *model]
        # More steps than will ever be run. Each is logged and saved, to see the first one and to resume after it.
        command += ["--training.batch-size", "8", "--training.steps", "1000"]
        command += ["--training.log-every", "1", "--training.save-every", "1", "--training.eval-every", "0"]
        environment = os.environ | {
            "XDG_CACHE_HOME": str(caches / "xdg"),
            "JAX_COMPILATION_CACHE_DIR": str(caches / "xla"),
            "JAX_PLATFORMS": "cpu",
        }
        self.run, self._errors = run, (caches / "stderr.txt").open("w+")
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=self._errors, text=True
        )

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def until_record(self, number: int) -> dict[str, Any]:
        """Wait for `number` records; return the seconds since the process started, and the step of the last record."""
        metrics = self.run / "metrics.jsonl"
        lines: list[str] = []
        while len(lines) < number:
            self._wait()
            lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
        seconds = {"wall": time.monotonic() - self._started, "cpu": self._cpu()}
        return seconds | {"number": json.loads(lines[number - 1])["step"]}

    def until_checkpoint(self) -> None:
        while not (
            self.run / "checkpoints" / "1"
        ).exists():  # orbax renames a checkpoint to its step when it is complete
            self._wait()

    def _wait(self) -> None:
        if (code := self._process.poll()) is not None:
            self._errors.seek(0)
            raise SystemExit(f"flaxen train ended (exit {code}): {self._errors.read().strip()}")
        time.sleep(POLL)

    def _cpu(self) -> float:
        """CPU seconds of the process and its finished children (Linux)."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def table(samples: list[Record], cores: int) -> Table:
    clock = report.clock(cores)
    result = Table(title="start: seconds from process start to the first step", title_justify="left")
    for header in ("start", "", "first step", "wall s", "CPU s", f"{clock} / first"):
        result.add_column(header, justify="left" if header in ("start", "") else "right")
    of = {start: [sample for sample in samples if sample["start"] == start] for start in STARTS}
    first = report.median(sample[clock] for sample in of["first"])
    for start, mine in of.items():
        seconds = {kind: report.median(sample[kind] for sample in mine) for kind in ("wall", "cpu")}
        cells = [f"{seconds['wall']:.1f}", f"{seconds['cpu']:.1f}", f"{seconds[clock] / first:.2f}"]
        result.add_row(start, STARTS[start], str(mine[-1]["number"]), *cells)
    step = {kind: report.median(sample["step"][kind] for sample in of["second"]) for kind in ("wall", "cpu")}
    result.caption = f"The next step and its checkpoint took {step['wall']:.1f} s, {step['cpu']:.1f} CPU s."
    result.caption_justify = "left"
    return result


if __name__ == "__main__":
    main()
