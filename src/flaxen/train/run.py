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
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import tomli_w

from flaxen.atomic import whole_file
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


class Run:
    """A run directory that this process holds: no other can train in it meanwhile."""

    def __init__(self, directory: Path, config: dict[str, Any], facts: dict[str, Any]):
        """Open a new directory, or one of the same run."""
        check(directory, config)
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self._lock = directory, _lock(directory)
        try:
            if (directory / "config.toml").exists():
                check_facts(directory, facts)
            else:
                _write(directory / "run.json", json.dumps(_circumstances() | {"resolved": facts}, indent=2) + "\n")
            # Also when the run goes on: what may change has changed, such as where the data lies.
            _write(directory / "config.toml", tomli_w.dumps(config))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process have it."""
        self._lock.close()

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.directory / "metrics.jsonl"

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


def check(directory: Path, config: dict[str, Any]) -> None:
    """Refuse a directory that holds something else, or a run with other settings."""
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
        before, now = flat(read_config(directory)), flat(config)
        fixed = [name for name in sorted({*before, *now}) if not any(fnmatchcase(name, free) for free in FREE)]
        _refuse_changes(directory, {name: (before.get(name), now.get(name)) for name in fixed})


def check_facts(directory: Path, facts: dict[str, Any]) -> None:
    """Refuse to go on with another model or other data than the run began with: `facts` has sizes and digests."""
    before = flat(json.loads((directory / "run.json").read_text(encoding="utf-8"))["resolved"])
    now = flat(json.loads(json.dumps(facts)))
    _refuse_changes(directory, {name: (before.get(name), now.get(name)) for name in sorted({*before, *now})})


def _refuse_changes(directory: Path, pairs: dict[str, tuple[Any, Any]]) -> None:
    say = lambda value: "not set" if value is None else repr(value)  # noqa: E731
    changed = [f"  {name}: was {say(old)}, is {say(new)}" for name, (old, new) in pairs.items() if old != new]
    if changed:
        raise InputError(
            f"{directory} holds another run, which cannot go on with something changed:\n" + "\n".join(changed) + "\n"
            f"Set it back, or choose another --out (to start from its weights: --model.init {directory / 'model'})"
        )


def read_config(directory: Path) -> dict[str, Any]:
    """The settings of a run that exists."""
    path = directory / "config.toml"
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


def _lock(directory: Path) -> TextIO:
    """Held until it is closed or the process ends, however it ends."""
    file = (directory / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InputError(f"another process is training in {directory}; wait for it, or choose another --out") from None
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
    with whole_file(path) as file:
        file.write(text)
