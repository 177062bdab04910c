"""The directory of a run: its settings, metrics, checkpoints and models, and the checks before a run is resumed.

config.toml    all settings, resolved           checkpoints/   to resume from
run.json       model, data, versions, machine   model/  best/  in Hugging Face format
metrics.jsonl  one record per line              predictions/   text generated at each evaluation
setup/         the model without its weights: configuration, tokenizer, …; `flaxen export` needs it
codebooks.png  for a Transformer-VQ: how often each code is used, and how similar codes are
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

from flaxen import strict_json
from flaxen.atomic import atomic_file, sync, write_bytes
from flaxen.errors import InputError
from flaxen.inputs import open_input, read_text

# Left behind by a killed process; deleted when the same file or directory is written again.
LEFTOVERS = (".*.partial", ".*.ready", ".*.old")
# File names, as glob patterns, that may exist in a run directory.
CONTENTS = (
    "config.toml",
    "run.json",
    "metrics.jsonl",
    "lock",
    "checkpoints",
    "setup",
    "model",
    "best",
    "predictions",
    "codebooks.png",
    "events.*",
    *LEFTOVERS,
)
# File names that may exist before config.toml is written.
BEGUN = ("run.json", "lock", "setup", *LEFTOVERS)
# Settings that may change when a run is resumed, because they do not affect training. Data is compared by its digest.
FREE = (
    "out",
    "data.*",
    "tracking.*",
    "training.log_every",
    "training.eval_*",
    "training.save_every",
    "training.keep*",
    "training.on_damage",
)
# Packages whose versions are recorded in run.json.
PACKAGES = ("flaxen", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


Complete = Callable[[dict[str, Any]], dict[str, Any]]  # adds defaults to a saved configuration


class RunFiles:
    """Paths of the files in a run directory."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.config = directory / "config.toml"
        self.fingerprint = directory / "run.json"
        self.metrics = directory / "metrics.jsonl"
        self.lock = directory / "lock"
        self.checkpoints = directory / "checkpoints"
        self.setup = directory / "setup"
        self.model = directory / "model"
        self.best = directory / "best"
        self.predictions = directory / "predictions"
        self.codebooks = directory / "codebooks.png"

    def new_predictions(self, step: int) -> Path:
        """Path for the predictions of the evaluation at this step; creates its directory."""
        self.predictions.mkdir(exist_ok=True)
        return self.predictions / f"step-{step}.jsonl"

    def records(self) -> list[dict[str, Any]]:
        """Read all records of metrics.jsonl; lines that are not records are skipped."""
        return [record for _, record in self._lines() if isinstance(record, dict)]

    def _lines(self) -> list[tuple[bytes, dict[str, Any] | str]]:
        """Return the lines of metrics.jsonl, each with its record or with what is wrong with it."""
        with open_input(self.metrics) as file:
            return [(line, _record(line)) for line in file]


class Run(RunFiles):
    """A run directory locked by this process, so that no other process can train in it."""

    def __init__(
        self,
        directory: Path,
        config: dict[str, Any],
        fingerprint: dict[str, Any],
        complete: Complete = dict,
        write_setup: Callable[[Path], None] | None = None,
    ):
        """Create the run directory, or open an existing one to resume the same run.

        `write_setup` saves the model without its weights in a directory.
        """
        # Before the directory is created, so that a refused command leaves nothing behind.
        check_directory(directory, config, complete)
        super().__init__(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._lock_file = _acquire_lock(self.lock)
        try:
            if self.config.exists():
                check_fingerprint(directory, fingerprint)
            else:
                _write(self.fingerprint, strict_json.dumps(_environment() | {"resolved": fingerprint}, indent=2) + "\n")
            # A run of a version before 0.3 has no setup yet.
            if write_setup is not None and not self.setup.exists():
                write_setup(self.setup)
            # config.toml marks a directory as a run, so it is written last. BEGUN lists what a process that was killed
            # before that may leave behind.
            # It is rewritten when the run is resumed: settings in FREE, such as the path of the data, may have changed.
            _write(self.config, tomli_w.dumps(config))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock."""
        self._lock_file.close()

    def forget_after(self, step: int) -> None:
        """Delete metrics of steps after the checkpoint, which will be repeated, and a last line that is incomplete.

        Other lines that are not records are reported on standard error and kept.
        """
        if not self.metrics.exists():
            return
        lines, kept = self._lines(), list[bytes]()
        for number, (line, record) in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                # Only the last line can be incomplete; its step may be complete and not repeated, so its record stays.
                if isinstance(record, dict) and record["step"] <= step:
                    kept.append(line + b"\n")
            elif isinstance(record, str):
                print(f"flaxen: {self.metrics}, line {number}: {record}; the line is ignored", file=sys.stderr)
                kept.append(line)
            elif record["step"] <= step:
                kept.append(line)
        if kept != [line for line, _ in lines]:
            write_bytes(self.metrics, b"".join(kept))

    def record(self, values: dict[str, Any]) -> None:
        """Append a record to metrics.jsonl."""
        # Not atomic: a killed process may leave half a line, which `forget_after` deletes.
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(strict_json.dumps(values) + "\n")

    def sync_metrics(self) -> None:
        """Flush metrics.jsonl to disk."""
        if self.metrics.exists():
            sync(self.metrics)


def _record(line: bytes) -> dict[str, Any] | str:
    """Parse a line of metrics.jsonl; if it is not a record, return what is wrong with it."""
    try:
        # NaN is accepted: versions before 0.3 wrote it.
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "it is not UTF-8 text"
    except (ValueError, RecursionError):
        return "it is not valid JSON"
    if not isinstance(record, dict):
        return "it is not a JSON object"
    step = record.get("step")
    return record if isinstance(step, int) and not isinstance(step, bool) else "it has no step"


def check_directory(directory: Path, config: dict[str, Any], complete: Complete = dict) -> None:
    """Raise an InputError if the directory is not a run directory, or its run cannot be resumed with these settings.

    `complete` adds the defaults of settings that did not exist yet when the run was started.
    """
    if directory.exists() and not directory.is_dir():
        raise InputError(f"--out {directory} is a file; expected a directory")
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    # Without config.toml, accept only what a process killed at the very start leaves behind: checkpoints without their
    # settings could belong to any run.
    allowed = CONTENTS if "config.toml" in names else BEGUN
    unexpected = [name for name in names if not any(fnmatchcase(name, glob) for glob in allowed)]
    if unexpected:
        raise InputError(
            f"{directory} already exists and is not a Flaxen run directory (it contains {', '.join(unexpected[:5])}); "
            "choose another --out"
        )
    if "config.toml" in names:
        before, now = flat(complete(read_config(directory))), flat(config)
        fixed = [name for name in sorted({*before, *now}) if not any(fnmatchcase(name, free) for free in FREE)]
        pairs = {name: (before.get(name), now.get(name)) for name in fixed}
        _refuse_changes(directory, {name: pair for name, pair in pairs.items() if not _moved(*pair)})


def _moved(old: Any, new: Any) -> bool:
    """Return whether a setting names a file that was moved, with everything around it, to another directory."""
    return (
        isinstance(old, str)
        and isinstance(new, str)
        and os.path.isabs(old)
        and not os.path.exists(old)
        and os.path.isabs(new)
        and os.path.basename(old) == os.path.basename(new)
    )


def check_fingerprint(directory: Path, fingerprint: dict[str, Any]) -> None:
    """Raise an InputError if the model or the data differ from those the run was started with.

    `fingerprint` contains the sizes of the model and the digests of the data.
    """
    path = RunFiles(directory).fingerprint
    remedy = "Restore the file from a backup, or start again with another --out"
    try:
        stored = strict_json.read(path)
    except OSError as error:
        raise InputError(
            f"cannot read {path}, which says what data the run was started with: {error.strerror}. {remedy}"
        ) from None
    except InputError as error:
        raise InputError(f"{error}. {remedy}") from None
    if not isinstance(stored, dict) or not isinstance(stored.get("resolved"), dict):
        raise InputError(f"{path} has no object 'resolved', which describes the data of the run. {remedy}")
    before = flat(stored["resolved"])
    # Through JSON like the stored values, so that tuples compare equal to lists.
    now = flat(json.loads(json.dumps(fingerprint)))
    # A model field that did not exist when the run was started has its default value, which changes nothing.
    new = {name for name in now if name not in before and name.startswith("model.")}
    names = sorted({*before, *now} - new)
    _refuse_changes(directory, {name: (before.get(name), now.get(name)) for name in names})


def _refuse_changes(directory: Path, pairs: dict[str, tuple[Any, Any]]) -> None:
    """Raise an InputError that lists all values that differ; `pairs` maps names to (old, new)."""
    changed = [
        f"  {name}: was {_format_value(old)}, is {_format_value(new)}"
        for name, (old, new) in pairs.items()
        if old != new
    ]
    if changed:
        raise InputError(
            f"cannot resume the run in {directory} with changed settings or data:\n" + "\n".join(changed) + "\n"
            f"Restore the old values, or choose another --out (to start from the weights of this run: --model.init "
            f"{RunFiles(directory).model})"
        )


def _format_value(value: Any) -> str:
    return "not set" if value is None else repr(value)


def read_config(directory: Path) -> dict[str, Any]:
    """Read the settings of an existing run."""
    path = RunFiles(directory).config
    try:
        return tomllib.loads(read_text(path))
    except FileNotFoundError:
        raise InputError(f"{directory} is not a run directory: it has no config.toml") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not valid TOML: {error}; restore it from a backup or fix the line") from None


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings into {'training.steps': 100, …}."""
    items: dict[str, Any] = {}
    for name, value in config.items():
        items |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return items


def _acquire_lock(lock: Path) -> TextIO:
    """Lock a file. The lock is released when the file is closed or the process ends, even if it is killed."""
    file = lock.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InputError(
            f"another process is training in {lock.parent}; wait for it to finish or choose another --out"
        ) from None
    return file


def _environment() -> dict[str, Any]:
    """Describe how the run was started: command line, time, Python, machine and package versions."""

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
