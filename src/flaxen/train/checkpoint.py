"""Checkpoints of a run: orbax writes them in the background, and each one is complete or absent.

Every checkpoint contains digests of its arrays and of the loop state, which are verified when it is restored.
"""

import json
import os
import shutil
import stat
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as policy

from flaxen.atomic import sync
from flaxen.errors import InputError
from flaxen.inputs import not_regular, read_text
from flaxen.tree import leaves, map_leaves

T = TypeVar("T")
# What orbax, tensorstore and the JSON parser raise for damaged files: each kind of damage raises a different error.
DAMAGE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, AssertionError, ArithmeticError,
    EOFError, BufferError, MemoryError,
)  # fmt: skip
# The parts of the JSON item. Versions before 0.3 stored the loop state alone, without digests.
PARTS = {"loop_state", "arrays", "digest"}


class DamagedCheckpoint(InputError):
    """A checkpoint that cannot be read, or whose contents differ from what was saved."""


class OtherModel(InputError):
    """A checkpoint whose arrays have other names or shapes."""


class ModelOnly(NamedTuple):
    """The part of a training state that `restore_model` loads, under the name that it has there."""

    model: Any


class NewestAndBest(policy.PreservationPolicy):
    """Keep the newest checkpoints and the best one.

    The training loop decides which one is best, because orbax does not keep metrics between processes.
    """

    def __init__(self, newest: int):
        self.newest, self.best = newest, -1

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        old = len(checkpoints) - self.newest
        return [i >= old or checkpoint.step == self.best for i, checkpoint in enumerate(checkpoints)]


class Checkpoints:
    """The numbered checkpoints in a directory. Each stores the training state and, as JSON, the state of the loop."""

    def __init__(self, directory: Path, keep: int = 1, read_only: bool = False):
        self._kept, self._read_only = NewestAndBest(keep), read_only
        # orbax refuses relative paths.
        self._directory = directory.absolute()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._kept,
            cleanup_tmp_directories=not read_only,  # left over when a process is killed during a save
            read_only=read_only,
            lightweight_initialize=True,  # read no metadata yet: that of a damaged checkpoint would fail
        )
        # Not compressed: compression makes float32 weights about 12 % smaller, and takes more time than the digests.
        handlers = {
            "state": ocp.PyTreeCheckpointHandler(use_compression=False),
            "memory": ocp.JsonCheckpointHandler(),
        }
        try:
            self._manager = ocp.CheckpointManager(self._directory, options=options, item_handlers=handlers)
        except OSError as error:
            raise InputError(f"cannot open the checkpoints in {directory}: {error}") from error

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in ascending order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, loop_state: dict[str, Any], best: int | None = None) -> None:
        """Save a checkpoint, and keep the checkpoint of step `best`.

        Returns when the arrays are copied; they are written in the background during the next steps.
        """
        arrays = leaves(state)
        contents = {"loop_state": loop_state, "arrays": _describe(arrays)}
        # The item of the loop state is called "memory" on disk, as it always was.
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(arrays), memory=ocp.args.JsonSave(contents | {"digest": _json_digest(contents)})
        )
        with self._writing():
            # Set before saving: during a save orbax asks which checkpoints to delete. -1 stands for "no step". `force`
            # is needed because orbax's own policy could otherwise skip the step.
            self._kept.best = -1 if best is None else best
            self._manager.save(step, args=items, force=True)

    def restore(self, step: int, like: T) -> tuple[T, dict[str, Any]]:
        """Load the training state and loop state of a step; raise DamagedCheckpoint if they are not as saved.

        `like` is a training state of the same model, abstract or concrete.
        """
        if step not in self.steps:
            raise InputError(f"{self._directory} has no checkpoint of step {step}; available: {self._listed(step)}")
        try:
            return self._restore(step, like)
        except DAMAGE as error:
            # A checkpoint of another model is not damaged.
            if isinstance(error, OtherModel):
                raise
            reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
            raise DamagedCheckpoint(
                f"checkpoint {self._directory / str(step)} is damaged: {reason}\n"
                f"Other checkpoints: {self._listed(step)}"
            ) from error

    def restore_model(self, step: int, like: T) -> T:
        """Load only the trained parameters of a step; `like` has their shapes."""
        return jax.tree.map(jnp.asarray, self.restore(step, ModelOnly(like))[0].model)

    def restore_newest(
        self, like: T, before: int | None = None, on_damage: str = "fallback"
    ) -> tuple[T, dict[str, Any]] | None:
        """Load the newest intact checkpoint, of a step less than `before`; None if there is no checkpoint.

        Damaged checkpoints are reported on standard error and, unless read-only, renamed to damaged-STEP.
        """
        damaged: list[int] = []
        for step in [step for step in reversed(self.steps) if before is None or step < before]:
            try:
                restored = self.restore(step, like)
            except DamagedCheckpoint as error:
                if on_damage == "stop":
                    raise DamagedCheckpoint(
                        f"{error}. To resume from the newest intact one: --training.on-damage fallback"
                    ) from error
                print(f"flaxen: {str(error).splitlines()[0]}", file=sys.stderr)
                damaged.append(step)
                continue
            for other in damaged:
                self._report_skipped(other, step)
            return restored
        if damaged:
            raise DamagedCheckpoint(
                f"no intact checkpoint in {self._directory}: {', '.join(map(str, damaged))} are damaged. "
                "Restore the directory from a backup, or start again with another --out"
            )
        return None

    def _report_skipped(self, damaged: int, used: int) -> None:
        """Say that a damaged checkpoint is skipped, and move it out of the way so that its step can be saved again."""
        kept = ""
        if not self._read_only:
            path, aside = self._directory / str(damaged), self._directory / f"damaged-{damaged}"
            # From an earlier fallback at the same step.
            shutil.rmtree(aside, ignore_errors=True)
            try:
                path.rename(aside)
                sync(self._directory)
            except OSError as error:
                raise InputError(f"cannot rename the damaged checkpoint {path} to {aside.name}: {error}") from error
            self._manager.reload()
            kept = f"; kept as {aside}"
        print(f"flaxen: using checkpoint {used} instead of {damaged}{kept}", file=sys.stderr)

    def _listed(self, besides: int) -> str:
        return ", ".join(str(step) for step in self.steps if step != besides) or "none"

    def _restore(self, step: int, like: T) -> tuple[T, dict[str, Any]]:
        directory = self._directory / str(step)
        _check_files(directory)
        memory = json.loads(read_text(directory / "memory" / "metadata"))
        if not isinstance(memory, dict):
            raise ValueError("memory/metadata is not a JSON object")
        saved: dict[str, Any] | None = None
        # One of the names may itself be damaged.
        if PARTS & memory.keys():
            contents = {name: memory[name] for name in ("loop_state", "arrays")}
            if memory.keys() != PARTS or memory["digest"] != _json_digest(contents):
                raise ValueError("memory/metadata (the loop state) does not match its digest")
            saved, memory = memory["arrays"], memory["loop_state"]
            shapes = {path: tuple(array["shape"]) for path, array in saved.items()}
        else:
            shapes = {path: tuple(leaf.shape) for path, leaf in self._manager.item_metadata(step)["state"].items()}
        self._check_model(step, shapes, like)
        abstract = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves(like).items()}
        restore = ocp.args.PyTreeRestore(
            item=abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=isinstance(like, ModelOnly),
        )
        arrays = self._manager.restore(step, args=ocp.args.Composite(state=restore))["state"]
        if saved is not None:
            for path, found in _describe(arrays).items():
                if saved[path] != found:
                    raise ValueError(
                        f"array {path} does not match its digest: expected {saved[path]['digest']}, "
                        f"got {found['digest']}"
                    )
        return map_leaves(lambda path, _: arrays[path], like), memory

    def _check_model(self, step: int, saved: dict[str, tuple[int, ...]], like: Any) -> None:
        """Raise an InputError that lists differing arrays if the checkpoint belongs to another model or optimizer."""
        expected = {path: tuple(leaf.shape) for path, leaf in leaves(like).items()}
        if isinstance(like, ModelOnly):
            saved = {path: shape for path, shape in saved.items() if path.startswith("model.")}
        differences = [
            f"{path}: {saved.get(path, 'missing')} in the checkpoint, {expected.get(path, 'none')} expected"
            for path in sorted({*saved, *expected})
            if saved.get(path) != expected.get(path)
        ]
        if differences:
            more = f"; and {len(differences) - 4} more" if len(differences) > 4 else ""
            raise OtherModel(
                f"checkpoint {step} in {self._directory} belongs to another model or optimizer: "
                f"{'; '.join(differences[:4])}{more}"
            )

    def wait(self) -> None:
        """Block until all saved checkpoints are on disk. Errors of background writes are raised here."""
        with self._writing():
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def close(self) -> None:
        with self._writing():
            self._manager.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn a failed write (a full disk) into an InputError: keep earlier checkpoints, delete the incomplete one."""
        try:
            yield
        except (OSError, ValueError) as error:  # tensorstore's errors are ValueErrors
            directory = self._directory
            _remove_incomplete(directory)
            raise InputError(
                f"cannot write a checkpoint to {directory}: {error}\nComplete checkpoints: "
                f"{', '.join(map(str, self.steps)) or 'none'}. If the disk is full, free space and "
                "rerun the same command to resume"
            ) from error


def _remove_incomplete(directory: Path) -> None:
    """Delete what an interrupted save left behind.

    Background writes still in progress may recreate the files, so repeat until none has reappeared for 0.5 seconds.
    """
    clean_checks = 0
    # At most 10 seconds: the error message must not be delayed for ever.
    for _ in range(100):
        incomplete = list(directory.glob("*.orbax-checkpoint-tmp*"))
        for path in incomplete:
            shutil.rmtree(path, ignore_errors=True)
        clean_checks = 0 if incomplete else clean_checks + 1
        if clean_checks == 5:
            return
        time.sleep(0.1)


def _describe(arrays: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the shape, dtype and digest of each array."""
    # zlib releases the GIL. CRC-32 detects every burst of up to 32 bits, and misses other damage once in 4 billion
    # times; cryptographic digests take two to five times as long.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(_digest, arrays.values()))
    return {
        path: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "digest": digest}
        for (path, leaf), digest in zip(arrays.items(), digests)
    }


def _digest(array: Any) -> str:
    # As bytes: the buffer protocol does not know bfloat16.
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return f"crc32:{zlib.crc32(data):08x}"


def _json_digest(contents: dict[str, Any]) -> str:
    return f"crc32:{zlib.crc32(json.dumps(contents, sort_keys=True).encode()):08x}"


def _check_files(directory: Path) -> None:
    """Raise if there is anything but regular files and directories: tensorstore would wait for a named pipe."""
    for path in directory.rglob("*"):
        kind = stat.S_IFMT(path.stat().st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR):
            raise not_regular(path, kind)
