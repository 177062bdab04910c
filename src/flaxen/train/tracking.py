"""Metrics to TensorBoard, Weights & Biases or Trackio, for those who ask."""

import importlib
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flaxen.errors import InputError
from flaxen.train.settings import Tracking

# What a setting needs: a module, and how to install it.
PACKAGES = {
    "tensorboard": ("tensorboardX", "flaxen[tensorboard]"),
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "trackio"),
}


@runtime_checkable
class Tracker(Protocol):
    def log(self, values: dict[str, float], step: int) -> None: ...
    def close(self) -> None: ...


def check(tracking: Tracking) -> None:
    """Refuse what is not installed, before anything is written."""
    for name in PACKAGES:
        if getattr(tracking, name):
            _module(name)


def trackers(tracking: Tracking, directory: Path, config: dict[str, Any]) -> list[Tracker]:
    name = tracking.name or directory.absolute().name
    made: list[Tracker] = [TensorBoard(directory)] if tracking.tensorboard else []
    if tracking.wandb is not None:
        options = {"id": name, "resume": "allow", "dir": str(directory.parent)}
        made.append(Service("wandb", tracking.wandb, name, config, options))
    if tracking.trackio is not None:
        # Not "must" for a run that goes on: the tracker may be new to it.
        made.append(Service("trackio", tracking.trackio, name, config, {"resume": "allow"}))
    return made


class TensorBoard:
    """Event files, without TensorFlow."""

    def __init__(self, directory: Path) -> None:
        self._writer = _module("tensorboard").SummaryWriter(str(directory))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Service:
    """wandb or trackio, which share their calls."""

    def __init__(self, module: str, project: str, name: str, config: dict[str, Any], options: dict[str, Any]) -> None:
        self._service = _module(module)
        self._service.init(project=project, name=name, config=config, **options)

    def log(self, values: dict[str, float], step: int) -> None:
        self._service.log(values, step=step)

    def close(self) -> None:
        self._service.finish()


def _module(name: str) -> Any:
    module, package = PACKAGES[name]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(f"{module} is not installed: pip install '{package}', or leave its flag out") from None
