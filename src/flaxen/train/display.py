"""What a person sees of a run: a bar on a terminal, lines elsewhere."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Writes to standard error. Lines are kept; the bar is not."""

    def __init__(self, steps: int, start: int, quiet: bool = False):
        self._console = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False, quiet=quiet)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=quiet or not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._bar.add_task("training", total=steps, completed=start, numbers="compiling …")
        self._started = time.monotonic()

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, step: int, loss: float, speed: str) -> None:
        self._bar.update(self._task, completed=step, numbers=f"loss {loss:.3f}  {speed}")

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)


def numbers(values: dict[str, float]) -> str:
    """'loss 3.214  accuracy 0.412'"""
    return "  ".join(f"{name.replace('_', ' ')} {_short(value)}" for name, value in values.items())


def _short(value: float) -> str:
    if value and not 1e-2 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def seconds(value: float) -> str:
    minutes, rest = divmod(round(value), 60)
    return (
        f"{minutes // 60} h {minutes % 60} min"
        if minutes >= 60
        else f"{minutes} min {rest} s"
        if minutes
        else f"{value:.1f} s"
    )
