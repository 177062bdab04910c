"""Checkpoints of a run: written beside the training by orbax, complete or not there at all."""

import logging
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as policy

from flaxen.errors import InputError
from flaxen.tree import leaves, map_leaves

HIGHER_IS_BETTER = ("accuracy",)
T = TypeVar("T")


def rank(metric: str, value: float) -> float:
    """More is better."""
    return value if metric in HIGHER_IS_BETTER else -value


class Checkpoints:
    """The numbered checkpoints of a directory. Each holds the state and, as JSON, what the loop remembers."""

    def __init__(self, directory: Path, keep: int = 1, best: str | None = None, read_only: bool = False):
        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax tells every file it writes
        kept: list[Any] = [policy.LatestN(keep)]
        if best is not None:
            one = lambda metrics: rank(best, metrics[best])  # noqa: E731
            kept.append(policy.BestN(get_metric_fn=one, n=1, keep_checkpoints_without_metrics=False))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy.AnyPreservationPolicy(kept),
            cleanup_tmp_directories=not read_only,  # what a kill in the middle of a save has left
            read_only=read_only,
        )
        handlers = {"state": ocp.StandardCheckpointHandler(), "memory": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options, item_handlers=handlers)

    @property
    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, memory: dict[str, Any], metrics: dict[str, float] | None) -> None:
        """Returns when the numbers are copied; the writing goes on beside the next steps."""
        items = ocp.args.Composite(state=ocp.args.StandardSave(leaves(state)), memory=ocp.args.JsonSave(memory))
        self._manager.save(step, args=items, metrics=metrics, force=True)

    def restore(self, step: int, like: T) -> tuple[T, dict[str, Any]]:
        """The state and the memory of a step. `like` is a state, abstract or not, of the model that is asked for."""
        self._check(step, like)
        abstract = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves(like).items()}
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), memory=ocp.args.JsonRestore())
        found = self._manager.restore(step, args=items)
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
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def close(self) -> None:
        self._manager.close()
