"""flaxen export RUN DIR: save a checkpoint of a run in Hugging Face format."""

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Export:
    """Export a checkpoint of a training run in Hugging Face format, even while the run is still training.

    Example: flaxen export run exported --step 400
    """

    run_directory: tyro.conf.Positional[Path]
    """Directory of the run."""
    out: tyro.conf.Positional[Path]
    """Directory to write the model to."""
    step: int | None = None
    """Step of the checkpoint to export. Default: the latest."""
    overwrite: bool = False
    """Replace the directory even if it contains files that Flaxen did not write; they are deleted."""

    def run(self, given_flags: set[str]) -> None:
        from flaxen.atomic_directory import check_directory
        from flaxen.cli import process
        from flaxen.cli.build import open_run_export
        from flaxen.cli.tasks import of_run
        from flaxen.errors import InputError
        from flaxen.train.checkpoint import Checkpoints
        from flaxen.train.run import RunFiles

        process.quiet_checkpoints()
        path = self.run_directory
        settings = of_run(path)
        check_directory(self.out, self.overwrite, inputs=[path])
        checkpoints = Checkpoints(RunFiles(path).checkpoints, read_only=True)
        if not checkpoints.steps:
            raise InputError(f"{path} has no checkpoint yet; wait for training to save one")
        step = checkpoints.steps[-1] if self.step is None else self.step
        if step not in checkpoints.steps:
            raise InputError(
                f"{path} has no checkpoint for step {step}; available: {', '.join(map(str, checkpoints.steps))}"
            )
        abstract, export = open_run_export(path, settings)
        export(checkpoints.restore_model(step, abstract), self.out, self.overwrite)
        print(f"exported step {step} of {path} to {self.out}")
