"""Console output of a training run: a progress bar on a terminal, and log lines."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Log lines and a progress bar on standard error. The bar disappears at the end; the lines stay."""

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
        """Advance the progress bar to `step`."""
        self._bar.update(self._task, completed=step, numbers=f"loss {loss:.3f}  {speed}")

    def line(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._console.print(text, markup=False)


def numbers(values: dict[str, float]) -> str:
    """Format metrics for the console, e.g. 'loss 3.214  accuracy 0.412'."""
    return "  ".join(f"{name.replace('_', ' ')} {_short(value)}" for name, value in values.items())


def _short(value: float) -> str:
    """Format a number with four significant digits, in scientific notation if very small or large."""
    if value and not 1e-2 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def seconds(value: float) -> str:
    """Format a duration given in seconds, e.g. '2 h 5 min', '3 min 20 s' or '4.2 s'."""
    minutes, rest = divmod(round(value), 60)
    return (
        f"{minutes // 60} h {minutes % 60} min"
        if minutes >= 60
        else f"{minutes} min {rest} s"
        if minutes
        else f"{value:.1f} s"
    )
