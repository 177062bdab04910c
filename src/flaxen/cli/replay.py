"""flaxen replay RUN --step N: recompute one training step of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro


@dataclass(frozen=True)
class Replay:
    """Recompute one training step of a run and show its batch, loss and gradients, without changing the run.

    Example: flaxen replay run --step 400
    """

    run_directory: tyro.conf.Positional[Path]
    """Directory of the run."""
    step: int
    """Training step to recompute, counted from 1 as in metrics.jsonl."""
    examples: int = 2
    """Number of examples to show from the batch."""
    weights: int = 12
    """Number of weight tensors to list, those with non-finite gradients first, then by decreasing gradient norm."""

    def run(self, given_flags: set[str]) -> None:
        import jax
        import numpy as np
        from rich.console import Console
        from rich.table import Table

        from flaxen.cli import process
        from flaxen.cli.build import build
        from flaxen.cli.tasks import of_run
        from flaxen.errors import InputError
        from flaxen.tasks.task import report_skipped
        from flaxen.train.checkpoint import Checkpoints
        from flaxen.train.run import RunFiles, check_fingerprint
        from flaxen.tree import leaves

        process.quiet_checkpoints()
        settings = of_run(self.run_directory)
        components = build(settings)
        check_fingerprint(self.run_directory, components.fingerprint)
        stepper, size = components.stepper, settings.training.batch_size
        if not 1 <= self.step <= stepper.steps:
            raise InputError(f"--step must be between 1 and {stepper.steps}, got {self.step}")

        checkpoints = Checkpoints(RunFiles(self.run_directory).checkpoints, read_only=True)
        like = jax.eval_shape(stepper.init_state, components.abstract)
        restored = checkpoints.restore_newest(like, before=self.step, on_damage=settings.training.on_damage)
        state = restored[0] if restored else stepper.init_state(components.initial())
        first = int(state.step)
        console = Console(soft_wrap=True, highlight=False, emoji=False)
        console.print(
            f"starting from {f'checkpoint {first}' if first else 'step 0'}, steps to compute: {self.step - first}"
        )
        for step in range(first, self.step - 1):
            state, _ = stepper.update(state, components.task.batch(step, size))
        batch = components.task.batch(self.step - 1, size)
        report_skipped(components.task.skipped_examples(batch), set())
        before = {path: np.asarray(leaf, np.float64) for path, leaf in leaves(state.model).items()}
        _, gradient = stepper.gradient(state, batch)
        state, metrics = stepper.update(state, batch)

        loss = float(metrics.sums.loss) / max(float(metrics.sums.weight), 1.0)
        norm, rate = float(metrics.norm), float(metrics.rate)
        console.print(f"step {self.step}: loss {loss!r}, gradient norm {norm!r}, learning rate {rate!r}")
        for row in range(min(self.examples, size)):
            for title, text in components.task.format_example(batch, row).items():
                console.print(f"[bold]{title:>7}[/bold]  ", end="")
                console.print(text.replace("\n", "⏎ "), markup=False)
        rows = []
        for path, leaf in leaves(gradient).items():
            change = np.asarray(leaves(state.model)[path], np.float64) - before[path]
            non_finite = int(np.size(leaf) - np.isfinite(np.asarray(leaf)).sum())
            rows.append((path, _norm(before[path]), _norm(leaf), _norm(change), non_finite))
        rows.sort(key=lambda row: (-row[4], -np.nan_to_num(row[2], nan=np.inf)))
        table = Table("weight", "norm", "gradient", "update", "non-finite")
        for path, weight_norm, gradient_norm, update_norm, non_finite in rows[: self.weights]:
            table.add_row(
                path, f"{weight_norm:.4g}", f"{gradient_norm:.4g}", f"{update_norm:.4g}", str(non_finite or "")
            )
        console.print(table)
        bad = sum(row[4] > 0 for row in rows)
        verdict = f"{bad} of {len(rows)} gradients have non-finite entries" if bad else "all gradients are finite"
        console.print(verdict)


def _norm(a: Any) -> float:
    """Euclidean norm, in float64."""
    import numpy as np

    return float(np.sqrt(np.square(np.asarray(a, np.float64)).sum()))
