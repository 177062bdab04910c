"""The directory of a run: what it was told, what it measured, what it made.

config.toml    every setting, resolved          checkpoints/   to go on from
run.json       model, data, versions, machine   model/  best/  in Hugging Face form
metrics.jsonl  one record per line              predictions/   what it wrote at each evaluation
codebooks.png  of a Transformer-VQ: which codes are used, and how alike they are
"""

import fcntl
import json
import os
import platform
import sys
import time
import tomllib
from collections.abc import Callable
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import tomli_w

from flaxen.atomic import atomic_file
from flaxen.errors import InputError

CONTENTS = (
    "config.toml",
    "run.json",
    "metrics.jsonl",
    "lock",
    "checkpoints",
    "model",
    "best",
    "predictions",
    "codebooks.png",
    "events.*",
    ".*.partial",
)
BEGUN = ("run.json", "lock", ".*.partial")
# What may change when a run goes on, because no number of the training depends on it. Data is known by its digest.
FREE = ("out", "data.*", "tracking.*", "training.log_every", "training.eval_*", "training.save_every", "training.keep*")
PACKAGES = ("flaxen", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


Complete = Callable[[dict[str, Any]], dict[str, Any]]


class RunFiles:
    """Every name inside a run directory."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.config = directory / "config.toml"
        self.fingerprint = directory / "run.json"
        self.metrics = directory / "metrics.jsonl"
        self.lock = directory / "lock"
        self.checkpoints = directory / "checkpoints"
        self.model = directory / "model"
        self.best = directory / "best"
        self.predictions = directory / "predictions"
        self.codebooks = directory / "codebooks.png"

    def new_predictions(self, step: int) -> Path:
        """Where the predictions of an evaluation go."""
        self.predictions.mkdir(exist_ok=True)
        return self.predictions / f"step-{step}.jsonl"

    def records(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl, line by line."""
        return [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]


class Run(RunFiles):
    """A run directory that this process holds: no other can train in it meanwhile."""

    def __init__(self, directory: Path, config: dict[str, Any], fingerprint: dict[str, Any], complete: Complete = dict):
        """Open a new directory, or one of the same run."""
        check(directory, config, complete)
        super().__init__(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._held = _hold(self.lock)
        try:
            if self.config.exists():
                check_fingerprint(directory, fingerprint)
            else:
                _write(self.fingerprint, json.dumps(_circumstances() | {"resolved": fingerprint}, indent=2) + "\n")
            # Also when the run is resumed: what may change has changed, such as where the data lies.
            _write(self.config, tomli_w.dumps(config))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process have it."""
        self._held.close()

    def forget_after(self, step: int) -> None:
        """Drop the records of steps that are about to be made again, and half a line that a kill may have left."""
        if not self.metrics.exists():
            return
        lines = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        if kept != lines:
            _write(self.metrics, "".join(kept))

    def record(self, values: dict[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def check(directory: Path, config: dict[str, Any], complete: Complete = dict) -> None:
    """Refuse a directory that holds something else, or a run with other settings. `complete` adds the defaults of
    settings that there were not yet when the run began."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file; --out must be a directory for the run")
    here = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    # Without config.toml, only what a kill at the very start leaves: checkpoints would be those of who knows which run.
    known = CONTENTS if "config.toml" in here else BEGUN
    strange = [name for name in here if not any(fnmatchcase(name, one) for one in known)]
    if strange:
        raise InputError(
            f"{directory} holds something else than a run of Flaxen ({', '.join(strange[:5])}); choose another --out"
        )
    if "config.toml" in here:
        before, now = flat(complete(read_config(directory))), flat(config)
        fixed = [name for name in sorted({*before, *now}) if not any(fnmatchcase(name, free) for free in FREE)]
        _refuse_changes(directory, {name: (before.get(name), now.get(name)) for name in fixed})


def check_fingerprint(directory: Path, fingerprint: dict[str, Any]) -> None:
    """Refuse to go on with another model or other data than the run began with: `fingerprint` has sizes and digests."""
    before = flat(json.loads(RunFiles(directory).fingerprint.read_text(encoding="utf-8"))["resolved"])
    now = flat(json.loads(json.dumps(fingerprint)))
    # A field that configurations did not have when the run began is at its default, which changes nothing.
    new = {name for name in now if name not in before and name.startswith("model.")}
    names = sorted({*before, *now} - new)
    _refuse_changes(directory, {name: (before.get(name), now.get(name)) for name in names})


def _refuse_changes(directory: Path, pairs: dict[str, tuple[Any, Any]]) -> None:
    changed = [f"  {name}: was {_shown(old)}, is {_shown(new)}" for name, (old, new) in pairs.items() if old != new]
    if changed:
        raise InputError(
            f"{directory} holds another run, which cannot go on with something changed:\n" + "\n".join(changed) + "\n"
            f"Set it back, or choose another --out (to start from its weights: --model.init "
            f"{RunFiles(directory).model})"
        )


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)


def read_config(directory: Path) -> dict[str, Any]:
    """The settings of a run that exists."""
    path = RunFiles(directory).config
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{directory} is no run directory: it has no config.toml") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not valid TOML: {error}") from None


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'training.steps': 100, …}"""
    items: dict[str, Any] = {}
    for name, value in config.items():
        items |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return items


def _hold(lock: Path) -> TextIO:
    """Held until it is closed or the process ends, however it ends."""
    file = lock.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InputError(
            f"another process is training in {lock.parent}; wait for it, or choose another --out"
        ) from None
    return file


def _circumstances() -> dict[str, Any]:
    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "versions": {name: installed(name) for name in PACKAGES},
    }


def _write(path: Path, text: str) -> None:
    with atomic_file(path) as file:
        file.write(text)
