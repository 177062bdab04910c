"""Checkpoints of a run: orbax writes them in the background, and each one is complete or absent."""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as policy

from flaxen.errors import InputError
from flaxen.tree import leaves, map_leaves

T = TypeVar("T")


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
        self._kept = NewestAndBest(keep)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._kept,
            cleanup_tmp_directories=not read_only,  # left over when a process is killed during a save
            read_only=read_only,
        )
        handlers = {"state": ocp.StandardCheckpointHandler(), "memory": ocp.JsonCheckpointHandler()}
        # orbax refuses relative paths.
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options, item_handlers=handlers)

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in ascending order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, loop_state: dict[str, Any], best: int | None = None) -> None:
        """Save a checkpoint, and keep the checkpoint of step `best`.

        Returns when the arrays are copied; they are written in the background during the next steps.
        """
        # The item of the loop state is called "memory" on disk, as it always was.
        items = ocp.args.Composite(state=ocp.args.StandardSave(leaves(state)), memory=ocp.args.JsonSave(loop_state))
        with self._writing():
            # Set before saving: during a save orbax asks which checkpoints to delete. -1 stands for "no step". `force`
            # is needed because orbax's own policy could otherwise skip the step.
            self._kept.best = -1 if best is None else best
            self._manager.save(step, args=items, force=True)

    def restore(self, step: int, like: T) -> tuple[T, dict[str, Any]]:
        """Load the training state and loop state of a step.

        `like` is a training state of the same model, abstract or concrete.
        """
        abstract = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves(like).items()}
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), memory=ocp.args.JsonRestore())
        try:
            # Also inside the try: reading the metadata of a damaged checkpoint fails as well.
            self._check(step, like)
            restored = self._manager.restore(step, args=items)
        # A checkpoint that belongs to another model is not damaged.
        except InputError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:  # each kind of damage raises a different error
            earlier = ", ".join(str(saved) for saved in self.steps if saved < step)
            remedy = (
                f"Delete it to resume from an earlier one ({earlier})" if earlier else "There is no earlier checkpoint"
            )
            reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
            where = Path(self._manager.directory) / str(step)
            raise InputError(f"checkpoint {where} is damaged and cannot be read: {reason}\n{remedy}") from error
        return map_leaves(lambda path, _: restored["state"][path], like), restored["memory"]

    def _check(self, step: int, like: Any) -> None:
        """Raise an InputError that lists differing arrays if the checkpoint belongs to another model or optimizer."""
        stored = self._manager.item_metadata(step)["state"]
        saved = {path: tuple(leaf.shape) for path, leaf in stored.items()}
        expected = {path: tuple(leaf.shape) for path, leaf in leaves(like).items()}
        differences = [
            f"{path}: {saved.get(path, 'missing')} in the checkpoint, {expected.get(path, 'none')} expected"
            for path in sorted({*saved, *expected})
            if saved.get(path) != expected.get(path)
        ]
        if differences:
            more = f"; and {len(differences) - 4} more" if len(differences) > 4 else ""
            raise InputError(
                f"checkpoint {step} in {self._manager.directory} belongs to another model or optimizer: "
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
            directory = Path(self._manager.directory)
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
