"""Tables of benchmark results: medians, ratios to the peers, and the fraction of the machine's GEMM peak."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.table import Table
from workers.workloads import Sizes, Work, flops

PEERS = ("torch", "flax")
PHASES = ("import", "load", "generate", "loss")
Record = dict[str, Any]
Samples = dict[str, dict[str, list[Record]]]  # workload -> system -> records of its workers


def clock(cores: int) -> str:
    """Choose CPU time on one core, and wall time on more, because waiting threads of torch consume CPU time."""
    return "cpu" if cores == 1 else "wall"


def gemm_peaks(samples: Samples, cores: int) -> dict[str, float]:
    """Best GFLOP/s that any library reached in this run, by precision."""
    peaks: dict[str, float] = {}
    for record in samples["gemm"]["gemm"]:
        if "flops" in record:
            speed = record["flops"] / record[clock(cores)] / 1e9
            peaks[record["precision"]] = max(speed, peaks.get(record["precision"], 0.0))
    return peaks


def work_table(workload: str, samples: Samples, cores: int, sizes: Sizes, work: Work) -> Table:
    """Table of a workload that is repeated in a warm process: one row per system."""
    repeats = {name: [r for r in records if "wall" in r] for name, records in samples[workload].items()}
    seconds = {name: median(r[clock(cores)] for r in records) for name, records in repeats.items()}
    memory = {name: max(r["peak_gb"] for r in records) for name, records in repeats.items()}
    results = {name: records[-1]["result"] for name, records in repeats.items()}
    peaks = gemm_peaks(samples, cores)
    # Losses are compared by time (lower is better), generation by speed (higher is better).
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
        # bf16 is only faster on processors with bf16 instructions, so its ceiling is the better of the two peaks.
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
    """Table of cold starts, two rows per system: with an empty compilation cache, and with the cache of the first."""
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
    """Describe which systems were disturbed by other processes, and how many cores those used."""
    systems = samples.get(workload, {})
    worst = {name: max(record["others"] for record in records) for name, records in systems.items()}
    # The GEMM peak is the best of several processes, so one undisturbed process is enough.
    worst["gemm"] = min(record["others"] for record in samples["gemm"]["gemm"])
    return ", ".join(
        f"{name} ({cores:.2f} cores used by other processes)" for name, cores in worst.items() if cores > limit
    )


def disagreement(systems: dict[str, list[Record]]) -> str:
    """Describe systems whose loss differs from that of the first: they did different work, and times mean nothing."""
    losses = {
        name: [record["result"]["loss"] for record in records if "result" in record][-1]
        for name, records in systems.items()
    }
    first, expected = next(iter(losses.items()))
    # The first updates of AdamW are close to the sign of the gradient, which for some weights is rounding noise.
    limits = {name: 2e-2 if "bf16" in (name[-4:], first[-4:]) else 1e-3 for name in losses}
    wrong = {name: loss for name, loss in losses.items() if not abs(loss - expected) <= limits[name]}
    return ", ".join(
        f"the last loss of {name} is {loss:.5f}, that of {first} {expected:.5f}" for name, loss in wrong.items()
    )


def footer(samples: Samples, cores: int) -> str:
    """Describe the GEMM peak, the clock that ratios are based on, and the versions of all libraries."""
    peaks = ", ".join(f"{speed:.0f} GFLOP/s {name}" for name, speed in gemm_peaks(samples, cores).items())
    lines = [f"GEMM peak: {peaks}. Ratios are of median {clock(cores)} times on {cores} core(s)."]
    named = [(name, record) for systems in samples.values() for name in systems for record in systems[name]]
    return "\n".join([*lines, *versions(named)])


def versions(records: list[tuple[str, Record]]) -> list[str]:
    """One line of library versions per system."""
    by_system = {name: record["versions"] for name, record in records if "versions" in record}
    return [f"{name}: " + " ".join(map(" ".join, used.items())) for name, used in by_system.items()]


def _describe(work: Work, sizes: Sizes) -> str:
    inputs = f"batch {work.batch}, " + (f"images of {sizes.image} px" if sizes.image else f"{work.source} in")
    if work.beams == 0:
        what = "forward + backward + AdamW" if work.update else "forward + backward"
        return f"{what}, {inputs}, {work.target} out"
    search = "greedy" if work.beams == 1 else f"{work.beams} beams"
    return f"{search}, {inputs}, {work.target} new tokens"


def _check(work: Work) -> str:
    return "first loss, last loss" if work.update else "loss, |gradient|"


def loss_cell(result: Record) -> str:
    values = ("first_loss", "loss") if "first_loss" in result else ("loss", "gradient_norm")
    return ", ".join(f"{result[name]:.5f}" for name in values)


def agreement(tokens: list[list[int]], reference: list[list[int]]) -> float:
    """Fraction of positions at which two systems generated the same token."""
    pairs = [pair for row, other in zip(tokens, reference) for pair in zip(row, other)]
    return sum(a == b for a, b in pairs) / len(pairs)
