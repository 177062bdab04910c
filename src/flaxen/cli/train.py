"""flaxen train TASK --out RUN --model.preset … --data.train …"""

import dataclasses
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import tyro

from flaxen.cli.recipe import from_dict, to_dict
from flaxen.cli.renamed import current_settings
from flaxen.cli.settings import Settings
from flaxen.cli.tasks import CODEBOOKS, TASKS, check_unused

S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Train(Generic[S]):
    """Train, or resume a run that was stopped."""

    settings: Annotated[S, tyro.conf.arg(name="")]
    recipe: Path | None = None
    """TOML file with settings; flags override it. See recipes/."""
    print_config: bool = False
    """Print the resolved settings as TOML, which is a recipe, and stop."""
    quiet: bool = False
    """No progress on standard error."""

    def run(self, given: set[str]) -> None:
        settings = self.settings
        if CODEBOOKS[0] in TASKS[settings.task].not_in_training:
            check_unused(settings, CODEBOOKS, f"in the task {settings.task}")
        recorded = record(settings)
        if self.print_config:
            import tomli_w

            print(tomli_w.dumps(recorded), end="")
            return
        from flaxen.cli import process
        from flaxen.cli.build import build
        from flaxen.train import tracking
        from flaxen.train.loop import train
        from flaxen.train.run import Run, RunFiles, check

        process.quiet_checkpoints()
        check(settings.out, recorded, completed)  # before the work of reading the data
        tracking.check(settings.tracking)
        built = build(settings)
        # Weights that cannot be read must not leave a new directory behind; a run that is resumed may not need them.
        model = None if RunFiles(settings.out).config.exists() else built.initial()
        with (
            closing(Run(settings.out, recorded, built.fingerprint, completed)) as run,
            process.stop_signals() as received,
        ):
            initial = built.initial if model is None else lambda: model
            if model is not None and not self.quiet:  # a run that is resumed has said it before
                print(*built.task.notes(settings.training.batch_size), sep="\n", file=sys.stderr)
            tracked = tracking.trackers(settings.tracking, settings.out, recorded)
            train(run, built.stepper, built.abstract, initial, tracked, built.export, self.quiet, received)
            built.finish(run)


def record(settings: Settings) -> dict[str, Any]:
    """The settings as a run directory records them."""
    return to_dict(dataclasses.replace(settings, optimizer=settings.optimizer.resolved()))


def completed(recorded: dict[str, Any]) -> dict[str, Any]:
    """Recorded settings with the defaults of those that there were not yet."""
    row, where = TASKS.get(recorded.get("task", "denoise")), "config.toml of the run"
    return record(from_dict(row.settings, current_settings(recorded, where), where)) if row else recorded
