"""Checkpoints are restored exactly, the newest and the best are retained, and incomplete ones are ignored."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.errors import InputError
from flaxen.train.checkpoint import Checkpoints


def state(step: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(step)
    return {
        "step": jnp.asarray(step, jnp.int32),
        "model": {"a": jnp.asarray(draw.normal(size=(3, 4)), jnp.float32), "b": jnp.ones(5, jnp.bfloat16) * step},
        "optimizer": (jnp.asarray(draw.integers(0, 9, 7), jnp.int32), {"mu": jnp.zeros((1, 2))}),
    }


def assert_equal(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    with closing(Checkpoints(tmp_path, keep=2)) as opened:
        yield opened


def test_restored_equals_saved(checkpoints: Checkpoints, tmp_path: Path) -> None:
    memory = {"sums": [0.1, 2.0, 1e-300], "evaluation": {"loss": 1 / 3}, "best_step": None}
    checkpoints.save(7, state(7), memory)
    checkpoints.wait()
    for like in (state(), jax.eval_shape(state)):
        with closing(Checkpoints(tmp_path, read_only=True)) as reader:
            assert reader.steps == [7]
            restored, restored_memory = reader.restore(7, like)
        assert_equal(restored, state(7))
        assert restored_memory == memory


def test_newest_checkpoints_are_retained(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 5, 9):
        checkpoints.save(step, state(step), {})
    checkpoints.wait()
    assert checkpoints.steps == [5, 9]


def test_best_checkpoint_is_retained_by_a_later_process(tmp_path: Path) -> None:
    """orbax's own policy forgets the metrics of checkpoints already on disk, and prefers the later of two equals."""
    for steps in ((1, 2, 3), (4, 5)):
        with closing(Checkpoints(tmp_path, keep=1)) as checkpoints:
            for step in steps:
                checkpoints.save(step, state(step), {}, best=min(step, 2))
            checkpoints.wait()
            assert checkpoints.steps == [2, steps[-1]]
            assert_equal(checkpoints.restore(2, state())[0], state(2))
    with closing(Checkpoints(tmp_path, keep=1)) as checkpoints:
        checkpoints.save(6, state(6), {}, best=6)
        checkpoints.wait()
        assert checkpoints.steps == [6]


def test_donated_buffers_do_not_change_the_checkpoint(checkpoints: Checkpoints) -> None:
    """The next update may overwrite the donated buffers while the checkpoint is still being written."""
    update = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf - 7, tree), donate_argnums=0)
    for step in range(1, 6):
        large = {"a": jnp.full((600, 700), step, jnp.float32), "b": jnp.full(9, step, jnp.float32)}
        checkpoints.save(step, large, {"step": step})
        for _ in range(3):
            large = update(large)
        jax.block_until_ready(large)
        checkpoints.wait()
        restored, memory = checkpoints.restore(step, {"a": jnp.zeros((600, 700)), "b": jnp.zeros(9)})
        np.testing.assert_array_equal(restored["a"], step)
        np.testing.assert_array_equal(restored["b"], step)
        assert memory == {"step": step}


@pytest.mark.parametrize("name", ["8.orbax-checkpoint-tmp", "8.orbax-checkpoint-tmp-123"])
def test_incomplete_checkpoint_is_ignored_and_removed(name: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoints.save(7, state(7), {})
    checkpoints.close()
    (tmp_path / name / "state").mkdir(parents=True)
    (tmp_path / name / "state" / "manifest.ocdbt").write_bytes(b"half")
    with closing(Checkpoints(tmp_path, read_only=True)) as reader:
        assert reader.steps == [7]
    assert (tmp_path / name).exists()  # another process may still be writing it
    with closing(Checkpoints(tmp_path)) as writer:
        assert writer.steps == [7]
        writer.save(8, state(8), {})
        writer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["8"]


def test_checkpoint_of_another_model_is_refused_with_the_names_of_its_weights(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, state(1), {})
    checkpoints.wait()
    other = state(1)
    other["model"] = {"a": jnp.zeros((3, 5)), "c": jnp.zeros(2)}
    with pytest.raises(InputError) as error:
        checkpoints.restore(1, other)
    message = str(error.value)
    assert "checkpoint 1 in" in message
    assert "belongs to another model or optimizer" in message
    assert "model.a: (3, 4) in the checkpoint, (3, 5) expected" in message
    assert "model.b: (5,) in the checkpoint, none expected" in message
    assert "model.c: missing in the checkpoint, (2,) expected" in message
    assert "step" not in message
    many = {f"layer {i}": jnp.zeros(1) for i in range(9)}
    with pytest.raises(InputError, match=r"layer 3: missing in the checkpoint, \(1,\) expected; and 10 more"):
        checkpoints.restore(1, many)


def test_failed_write_is_an_input_error(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier checkpoints stay; nothing of the new one does."""
    checkpoints.save(1, state(1), {})
    checkpoints.wait()

    def full() -> None:
        (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
        raise ValueError("OUT_OF_RANGE: File too large")

    monkeypatch.setattr(checkpoints._manager, "wait_until_finished", full)
    with pytest.raises(
        InputError, match=r"(?s)cannot write a checkpoint to .*File too large.*Complete checkpoints: 1\. If the disk"
    ):
        checkpoints.wait()
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
