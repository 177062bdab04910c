"""flaxen train TASK --out RUN --model.preset … --data.train …: train a model, or continue an interrupted run."""

import dataclasses
import os
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
FILES = ("train", "validation", "test")  # names of settings that are file names or glob patterns
FILES_OR_IDS = ("init", "tokenizer", "dataset")  # names of settings that are directories or hub ids


@dataclass(frozen=True)
class Train(Generic[S]):
    """Train a model, or resume a run that was interrupted.

    Example: flaxen train denoise --out run --model.preset byt5-small --data.train 'texts/*.txt'
    """

    settings: Annotated[S, tyro.conf.arg(name="")]
    recipe: Path | None = None
    """TOML file with settings; flags override it. Examples are in recipes/ in the Flaxen repository. Default: none."""
    print_config: bool = False
    """Print all settings as a TOML recipe and exit."""
    quiet: bool = False
    """Do not print progress to standard error."""

    def run(self, given_flags: set[str]) -> None:
        settings = self.settings
        if CODEBOOKS[0] in TASKS[settings.task].not_in_training:
            check_unused(settings, CODEBOOKS, f"in the task {settings.task}")
        if self.print_config:
            import tomli_w

            print(tomli_w.dumps(record(settings)), end="")
            return
        recorded = record(absolute(settings))
        from flaxen.cli import process
        from flaxen.cli.build import build
        from flaxen.train import tracking
        from flaxen.train.loop import train
        from flaxen.train.run import Run, RunFiles, check_directory

        process.quiet_checkpoints()
        check_directory(settings.out, recorded, completed)  # fail before spending time on the data
        tracking.check_installed(settings.tracking)
        components = build(settings)
        # Load the weights of a new run before creating its directory, so that an error leaves nothing behind. A
        # resumed run restores its own checkpoint instead.
        model = None if RunFiles(settings.out).config.exists() else components.initial()
        with (
            closing(Run(settings.out, recorded, components.fingerprint, completed, components.write_setup)) as run,
            process.stop_signals() as received,
        ):
            initial = components.initial if model is None else lambda: model
            if model is not None and not self.quiet:  # a resumed run printed them when it was first started
                print(*components.task.notes(settings.training.batch_size), sep="\n", file=sys.stderr)
            tracked = tracking.trackers(settings.tracking, settings.out, recorded)
            train(
                run, components.stepper, components.abstract, initial, tracked, components.export, self.quiet, received
            )
            components.finish(run)


def record(settings: Settings) -> dict[str, Any]:
    """Convert settings to the form stored in the config.toml of a run directory."""
    return to_dict(dataclasses.replace(settings, optimizer=settings.optimizer.resolved()))


def absolute(settings: Any) -> Any:
    """Return the settings with absolute paths, so that a run can be used from any directory."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = absolute(value)
        elif isinstance(value, Path):
            changes[field.name] = value.expanduser().absolute()
        elif field.name in FILES:
            changes[field.name] = tuple(os.path.abspath(os.path.expanduser(pattern)) for pattern in value)
        # The names of local directories look like hub ids.
        elif field.name in FILES_OR_IDS and value and Path(value).expanduser().exists():
            changes[field.name] = os.path.abspath(os.path.expanduser(value))
    return dataclasses.replace(settings, **changes)


def completed(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the recorded settings of a run, with defaults for settings that did not exist when it was started."""
    row, where = TASKS.get(recorded.get("task", "denoise")), "config.toml of the run"
    if row is None:
        return recorded
    return record(absolute(from_dict(row.settings, current_settings(recorded, where), where)))
