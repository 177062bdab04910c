"""Experiment tracking: send metrics to TensorBoard, Weights & Biases or Trackio."""

import importlib
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flaxen.errors import InputError
from flaxen.train.settings import Tracking

# Setting -> (module it requires, package to install).
PACKAGES = {
    "tensorboard": ("tensorboardX", "flaxen[tensorboard]"),
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "trackio"),
}


@runtime_checkable
class Tracker(Protocol):
    """A destination for metrics."""

    def log(self, values: dict[str, float], step: int) -> None: ...
    def close(self) -> None: ...


def check_installed(tracking: Tracking) -> None:
    """Raise an InputError if a requested tracker is not installed, before anything is written."""
    for name in PACKAGES:
        if getattr(tracking, name):
            _module(name)


def trackers(tracking: Tracking, directory: Path, config: dict[str, Any]) -> list[Tracker]:
    """Start the requested trackers for the run in `directory`."""
    name = tracking.name or directory.absolute().name
    started: list[Tracker] = [TensorBoard(directory)] if tracking.tensorboard else []
    if tracking.wandb is not None:
        options = {"id": name, "resume": "allow", "dir": str(directory.parent)}
        started.append(Service("wandb", tracking.wandb, name, config, options))
    if tracking.trackio is not None:
        # "allow" rather than "must", even for a resumed run: it may have started without this tracker.
        started.append(Service("trackio", tracking.trackio, name, config, {"resume": "allow"}))
    return started


class TensorBoard:
    """TensorBoard event files, written without TensorFlow."""

    def __init__(self, directory: Path) -> None:
        self._writer = _module("tensorboard").SummaryWriter(str(directory))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Service:
    """Weights & Biases or Trackio, which have the same API."""

    def __init__(self, module: str, project: str, name: str, config: dict[str, Any], options: dict[str, Any]) -> None:
        self._service = _module(module)
        self._service.init(project=project, name=name, config=config, **options)

    def log(self, values: dict[str, float], step: int) -> None:
        self._service.log(values, step=step)

    def close(self) -> None:
        self._service.finish()


def _module(name: str) -> Any:
    """Import the module of a tracking setting."""
    module, package = PACKAGES[name]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(
            f"--tracking.{name} requires {module}; install it with: pip install '{package}', or remove the flag"
        ) from None
