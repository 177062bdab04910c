"""flaxen export RUN DIR"""

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Export:
    """Write a checkpoint of a run in Hugging Face's form, while it goes on or after it was stopped."""

    run_directory: tyro.conf.Positional[Path]
    """Directory of the run."""
    out: tyro.conf.Positional[Path]
    """Directory to write."""
    step: int | None = None
    """Which checkpoint. Default: the newest."""

    def run(self, given: set[str]) -> None:
        import jax

        from flaxen.cli import process
        from flaxen.cli.build import build
        from flaxen.cli.tasks import of_run
        from flaxen.errors import InputError
        from flaxen.train.checkpoint import Checkpoints
        from flaxen.train.run import RunFiles

        process.quiet_checkpoints()
        path = self.run_directory
        settings = of_run(path)
        checkpoints = Checkpoints(RunFiles(path).checkpoints, read_only=True)
        if not checkpoints.steps:
            raise InputError(f"{path} has no checkpoint yet")
        step = checkpoints.steps[-1] if self.step is None else self.step
        if step not in checkpoints.steps:
            raise InputError(f"{path} has no checkpoint {step}; it has {', '.join(map(str, checkpoints.steps))}")
        built = build(settings)
        state, _ = checkpoints.restore(step, jax.eval_shape(built.stepper.start, built.abstract))
        built.export(state.model, self.out)
        print(f"step {step} of {path} is in {self.out}")
