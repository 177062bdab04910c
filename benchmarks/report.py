"""From samples to tables: medians, ratios to the peers, and how close to the machine's GEMM peak."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.table import Table
from workers.workloads import Sizes, Work, flops

PEERS = ("torch", "flax")
PHASES = ("import", "load", "generate", "loss")
Record = dict[str, Any]
Samples = dict[str, dict[str, list[Record]]]  # workload -> system -> what its workers printed


def clock(cores: int) -> str:
    """CPU time on one core; wall time on more, where torch's waiting threads burn CPU time for nothing."""
    return "cpu" if cores == 1 else "wall"


def gemm_peaks(samples: Samples, cores: int) -> dict[str, float]:
    """The best GFLOP/s that any library reached in this run, for each precision."""
    peaks: dict[str, float] = {}
    for record in samples["gemm"]["gemm"]:
        if "flops" in record:
            speed = record["flops"] / record[clock(cores)] / 1e9
            peaks[record["precision"]] = max(speed, peaks.get(record["precision"], 0.0))
    return peaks


def work_table(workload: str, samples: Samples, cores: int, sizes: Sizes, work: Work) -> Table:
    """One row per system, for a workload that is repeated in a warm process."""
    repeats = {name: [r for r in records if "wall" in r] for name, records in samples[workload].items()}
    seconds = {name: median(r[clock(cores)] for r in records) for name, records in repeats.items()}
    memory = {name: max(r["peak_gb"] for r in records) for name, records in repeats.items()}
    results = {name: records[-1]["result"] for name, records in repeats.items()}
    peaks = gemm_peaks(samples, cores)
    # Time is compared where less is better (a loss), speed where tokens are counted.
    ratio = "speed" if work.beams else "time"

    result = Table(title=f"{workload}: {_describe(work, sizes)}", title_justify="left")
    headers = ["system", "wall s (min)", "CPU s (min)", "peak GB"]
    headers += [f"tokens/{clock(cores)} s"] if work.beams else []
    headers += ["GFLOP/s (of GEMM)"]
    headers += [f"{what} / {peer}" for peer in PEERS if peer in seconds for what in (ratio, "peak")]
    headers += [f"tokens = {next(iter(results))}'s" if work.beams else _check(work)]
    for header in headers:
        result.add_column(header, justify="left" if header == "system" else "right")

    for name, records in repeats.items():
        row = [name]
        for kind in ("wall", "cpu"):
            times = [r[kind] for r in records]
            row.append(f"{median(times):.3g} ({min(times):.3g})")
        row.append(f"{memory[name]:.2f}")
        if work.beams:
            row.append(f"{work.new_tokens / seconds[name]:.1f}")
        # bf16 is only faster where the processor has it, so its ceiling is the better of the two.
        peak = max(peaks.values()) if name.endswith("bf16") else peaks["f32"]
        speed = flops(work, sizes) / seconds[name] / 1e9
        row.append(f"{speed:.3g} ({speed / peak:.0%})")
        for peer in PEERS:
            if peer in seconds:
                times = (seconds[peer], seconds[name]) if work.beams else (seconds[name], seconds[peer])
                row += [f"{times[0] / times[1]:.2f}", f"{memory[name] / memory[peer]:.2f}"]
        if work.beams:
            row.append(f"{agreement(results[name], next(iter(results.values()))):.0%}")
        else:
            row.append(loss_cell(results[name]))
        result.add_row(*row)
    return result


def cold_table(samples: Samples, cores: int) -> Table:
    """Two rows per system: a start with an empty compilation cache, and the next one."""
    totals: dict[tuple[str, str], float] = {}
    cells: dict[tuple[str, str], list[str]] = {}
    for name, records in samples["cold"].items():
        for start in ("first", "second"):
            phases = [r["phases"] for r in records if r["start"] == start and "phases" in r]
            if not phases:
                continue
            time = {kind: [median(p[phase][kind] for p in phases) for phase in PHASES] for kind in ("wall", "cpu")}
            totals[name, start] = sum(time[clock(cores)])
            cells[name, start] = [
                f"{wall:.2f} ({cpu:.2f})"
                for wall, cpu in [*zip(time["wall"], time["cpu"]), (sum(time["wall"]), sum(time["cpu"]))]
            ]

    peers = [peer for peer in PEERS if (peer, "first") in totals]
    result = Table(title="cold: seconds from process start, wall (CPU)", title_justify="left")
    for header in ["system", "start", *PHASES, "total", *[f"total / {peer}" for peer in peers]]:
        result.add_column(header, justify="left" if header in ("system", "start") else "right")
    for (name, start), row in cells.items():
        ratios = [totals[name, start] / totals[peer, start] for peer in peers if (peer, start) in totals]
        result.add_row(name, start, *row, *[f"{ratio:.2f}" for ratio in ratios])
    return result


def disturbed(workload: str, samples: Samples, limit: float = 0.1) -> str:
    """The systems that had to share the machine, and with how many cores' worth of other processes."""
    systems = samples.get(workload, {})
    worst = {name: max(record["others"] for record in records) for name, records in systems.items()}
    # The GEMM peak is the best of its processes, so one that ran alone is enough.
    worst["gemm"] = min(record["others"] for record in samples["gemm"]["gemm"])
    return ", ".join(f"{name} ran beside {cores:.2f} busy cores" for name, cores in worst.items() if cores > limit)


def disagreement(systems: dict[str, list[Record]]) -> str:
    """Systems whose loss went another way than the first one's: they did other work, and their times mean nothing."""
    losses = {
        name: [record["result"]["loss"] for record in records if "result" in record][-1]
        for name, records in systems.items()
    }
    first, expected = next(iter(losses.items()))
    # The first updates of AdamW are near the signs of the gradients, some of which are rounding.
    limits = {name: 2e-2 if "bf16" in (name[-4:], first[-4:]) else 1e-3 for name in losses}
    wrong = {name: loss for name, loss in losses.items() if not abs(loss - expected) <= limits[name]}
    return ", ".join(f"{name}'s last loss is {loss:.5f}, {first}'s {expected:.5f}" for name, loss in wrong.items())


def footer(samples: Samples, cores: int) -> str:
    """The ceiling that the tables refer to, the clock of the ratios, and the versions measured."""
    peaks = ", ".join(f"{speed:.0f} GFLOP/s {name}" for name, speed in gemm_peaks(samples, cores).items())
    lines = [f"GEMM peak: {peaks}. Ratios are of {clock(cores)} time, medians; {cores} core(s)."]
    named = [(name, record) for systems in samples.values() for name in systems for record in systems[name]]
    return "\n".join([*lines, *versions(named)])


def versions(records: list[tuple[str, Record]]) -> list[str]:
    """A line for each system, from what its workers printed."""
    found = {name: record["versions"] for name, record in records if "versions" in record}
    return [f"{name}: " + " ".join(map(" ".join, used.items())) for name, used in found.items()]


def _describe(work: Work, sizes: Sizes) -> str:
    given = f"batch {work.batch}, " + (f"pictures of {sizes.image} px" if sizes.image else f"{work.source} in")
    if work.beams == 0:
        what = "forward + backward + AdamW" if work.update else "forward + backward"
        return f"{what}, {given}, {work.target} out"
    how = "greedy" if work.beams == 1 else f"{work.beams} beams"
    return f"{how}, {given}, {work.target} new tokens"


def _check(work: Work) -> str:
    return "first loss, last loss" if work.update else "loss, |gradient|"


def loss_cell(result: Record) -> str:
    values = ("first_loss", "loss") if "first_loss" in result else ("loss", "gradient_norm")
    return ", ".join(f"{result[name]:.5f}" for name in values)


def agreement(tokens: list[list[int]], reference: list[list[int]]) -> float:
    """The share of positions at which two systems chose the same token."""
    pairs = [pair for row, other in zip(tokens, reference) for pair in zip(row, other)]
    return sum(a == b for a, b in pairs) / len(pairs)
