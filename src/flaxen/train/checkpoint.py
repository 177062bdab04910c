"""Checkpoints of a run: written beside the training by orbax, complete or not there at all."""

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
    """The newest, and the best. Which one is the best is known to the loop: orbax forgets metrics between processes."""

    def __init__(self, newest: int):
        self.newest, self.best = newest, -1

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        old = len(checkpoints) - self.newest
        return [i >= old or one.step == self.best for i, one in enumerate(checkpoints)]


class Checkpoints:
    """The numbered checkpoints of a directory. Each holds the state and, as JSON, what the loop remembers."""

    def __init__(self, directory: Path, keep: int = 1, read_only: bool = False):
        self._kept = NewestAndBest(keep)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._kept,
            cleanup_tmp_directories=not read_only,  # what a kill in the middle of a save has left
            read_only=read_only,
        )
        handlers = {"state": ocp.StandardCheckpointHandler(), "memory": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options, item_handlers=handlers)

    @property
    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, memory: dict[str, Any], best: int | None = None) -> None:
        """Returns when the numbers are copied; the writing goes on beside the next steps. Step `best` is kept."""
        items = ocp.args.Composite(state=ocp.args.StandardSave(leaves(state)), memory=ocp.args.JsonSave(memory))
        with self._writing():
            self._kept.best = -1 if best is None else best
            self._manager.save(step, args=items, force=True)

    def restore(self, step: int, like: T) -> tuple[T, dict[str, Any]]:
        """The state and the memory of a step. `like` is a state, abstract or not, of the model that is asked for."""
        abstract = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves(like).items()}
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), memory=ocp.args.JsonRestore())
        try:
            self._check(step, like)
            found = self._manager.restore(step, args=items)
        except InputError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:  # damage shows in as many ways as there are files
            earlier = ", ".join(str(one) for one in self.steps if one < step)
            go_on = f"remove it to go on from {earlier}" if earlier else "there is no earlier one"
            reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
            where = Path(self._manager.directory) / str(step)
            raise InputError(f"checkpoint {where} is damaged: {reason}\nIt cannot be read; {go_on}") from error
        return map_leaves(lambda path, _: found["state"][path], like), found["memory"]

    def _check(self, step: int, like: Any) -> None:
        """A checkpoint of another model is refused with the names of what differs."""
        stored = self._manager.item_metadata(step)["state"]
        there = {path: tuple(leaf.shape) for path, leaf in stored.items()}
        here = {path: tuple(leaf.shape) for path, leaf in leaves(like).items()}
        wrong = [
            f"{path} {there.get(path, 'absent')} there, {here.get(path, 'absent')} here"
            for path in sorted({*there, *here})
            if there.get(path) != here.get(path)
        ]
        if wrong:
            more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            raise InputError(
                f"checkpoint {step} in {self._manager.directory} is of another model or optimizer: "
                f"{'; '.join(wrong[:4])}{more}"
            )

    def wait(self) -> None:
        """Until what was saved is on the disk. An error of the writing is raised here."""
        with self._writing():
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def close(self) -> None:
        with self._writing():
            self._manager.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A full disk leaves the earlier checkpoints, and nothing of the one that was being written."""
        try:
            yield
        except (OSError, ValueError) as error:  # tensorstore's errors are ValueErrors
            directory = Path(self._manager.directory)
            _remove_for_good(directory)
            raise InputError(
                f"a checkpoint cannot be written to {directory}: {error}\nCheckpoints there: "
                f"{', '.join(map(str, self.steps)) or 'none'}. Is the disk full? With room, the same command goes on"
            ) from error


def _remove_for_good(directory: Path) -> None:
    """What an interrupted save has left. Writes that were under way may put it there again: it must stay away."""
    away = 0
    for _ in range(100):
        left = list(directory.glob("*.orbax-checkpoint-tmp*"))
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        away = 0 if left else away + 1
        if away == 5:
            return
        time.sleep(0.1)
