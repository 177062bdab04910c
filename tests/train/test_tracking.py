"""Metrics reach TensorBoard, Weights & Biases and Trackio."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flaxen.errors import InputError
from flaxen.train.settings import Tracking
from flaxen.train.tracking import check_installed, trackers

CONFIG = {"training": {"steps": 3}}


def events(directory: Path) -> list[tuple[int, str, float]]:
    """Read the scalars of event files, whose records are (length, its checksum, data, its checksum)."""
    from tensorboardX.proto.event_pb2 import Event

    scalars = []
    for path in sorted(directory.glob("events.*")):
        rest = path.read_bytes()
        while rest:
            length = int.from_bytes(rest[:8], "little")
            event = Event.FromString(rest[12 : 12 + length])
            scalars += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            rest = rest[12 + length + 4 :]
    return scalars


def test_tensorboard_event_files_hold_all_metrics(tmp_path: Path) -> None:
    sent = [(step, {"train/loss": 1 / step, "eval/accuracy": 0.5}) for step in (2, 4, 6)]
    (tracker,) = trackers(Tracking(tensorboard=True), tmp_path, CONFIG)
    for step, values in sent:
        tracker.log(values, step)
    tracker.close()
    assert [path.name.split(".")[0] for path in tmp_path.iterdir()] == ["events"]  # a name that run directories allow
    assert events(tmp_path) == [
        (step, tag, np.float32(value)) for step, values in sent for tag, value in values.items()
    ]


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_services_are_called_with_project_and_run_name(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any, dict[str, Any]]] = []
    names = ("init", "log", "finish")
    stub = SimpleNamespace(**{name: lambda *a, _name=name, **k: calls.append((_name, a, k)) for name in names})
    monkeypatch.setitem(sys.modules, service, stub)  # type: ignore[arg-type]
    tracking = Tracking(**{service: "a project"})
    check_installed(tracking)
    (tracker,) = trackers(tracking, tmp_path / "run 7", CONFIG)
    tracker.log({"train/loss": 2.0}, 5)
    tracker.close()
    assert [name for name, *_ in calls] == ["init", "log", "finish"]
    started = calls[0][2]
    assert started | {"project": "a project", "name": "run 7", "config": CONFIG, "resume": "allow"} == started
    if service == "wandb":  # by default it would start a new run of the same name, and write to the working directory
        assert (started["id"], started["dir"]) == ("run 7", str(tmp_path))
    assert calls[1:] == [("log", ({"train/loss": 2.0},), {"step": 5}), ("finish", (), {})]


def test_run_name_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda **k: started.append(k)))  # type: ignore[arg-type]
    trackers(Tracking(trackio="p", name="custom"), tmp_path, CONFIG)
    assert started[0]["name"] == "custom"


@pytest.mark.parametrize(
    ("tracking", "message"),
    [
        (Tracking(tensorboard=True), r"requires tensorboardX; install it with: pip install 'flaxen\[tensorboard\]'"),
        (Tracking(wandb="p"), "wandb requires wandb; install it with: pip install 'wandb', or remove the flag"),
        (Tracking(trackio="p"), "trackio requires trackio; install it with: pip install 'trackio'"),
    ],
    ids=["tensorboard", "wandb", "trackio"],
)
def test_missing_package_is_an_input_error(
    tracking: Tracking, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    for attempt in (lambda: check_installed(tracking), lambda: trackers(tracking, tmp_path, CONFIG)):
        with pytest.raises(InputError, match=message):
            attempt()
    assert list(tmp_path.iterdir()) == []


def test_no_trackers_by_default(tmp_path: Path) -> None:
    check_installed(Tracking())
    assert trackers(Tracking(), tmp_path, CONFIG) == []
