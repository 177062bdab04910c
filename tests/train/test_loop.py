"""The loop on a model of one number, whose every loss is known beforehand."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.errors import InputError
from flaxen.nn.loss import Sums
from flaxen.tasks.task import Batch, Task
from flaxen.train.loop import Diverged, evaluate, train
from flaxen.train.run import Run
from flaxen.train.settings import Optimizer, Schedule, Training
from flaxen.train.step import Stepper, scorer

START, BEST = 3.0, 1.0  # where the number begins, and where the validation loss is least


class Falling(Task):
    """Training loss: value + w, so that w falls by the learning rate in each step. Validation loss: (w - 1)²."""

    examples, tokens, flops = 64, 4, 8.0

    def __init__(self, validation: int = 7, generation_metrics: tuple[str, ...] = ()):
        self.validation, self.generation_metrics = validation, generation_metrics

    def batch(self, step: int, size: int, rows: slice = slice(None)) -> Batch:
        """Weights that differ from step to step and from row to row."""
        draw = np.random.default_rng(step)
        numbers = {"value": draw.integers(0, 9, size), "weight": draw.integers(0, 5, size) + (np.arange(size) == 0)}
        return {name: array[rows].astype(np.float32)[:, None] for name, array in numbers.items()}

    def evaluation(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        n = min(self.validation, limit or self.validation)
        for first in range(0, n, size):
            rows = np.arange(first, first + size)
            yield {"value": rows[:, None].astype(np.float32), "weight": (rows < n)[:, None].astype(np.float32)}

    def loss(self, model: Any, batch: dict[str, jax.Array], carry: None, key: jax.Array | None) -> tuple[Sums, None]:
        w, weight = model["w"][0], batch["weight"]
        each = batch["value"] + w if key is not None else jnp.square(w - BEST) + 0 * batch["value"]
        return Sums((weight * each).sum(), (weight * (batch["value"] > 4)).sum(), weight.sum()), None

    def generate_and_score_sample(self, model: Any, path: Path, skipped: set[str] | None = None) -> dict[str, float]:
        """The better, the further w is from where the loss wants it."""
        if not self.generation_metrics:
            return {}
        path.write_text("written\n")
        return {"rougeL": float(jnp.square(model["w"][0] - BEST))}

    def metrics(self, sums: Sums) -> dict[str, float]:
        return {"loss": float(sums.loss / sums.weight), "accuracy": float(sums.correct / sums.weight)}


class Interrupt:
    """A tracker that ends the process, as it were, when a step is recorded."""

    def __init__(self, step: int):
        self.step, self.closed, self.seen = step, False, list[tuple[int, dict[str, float]]]()

    def log(self, values: dict[str, float], step: int) -> None:
        self.seen.append((step, values))
        if step == self.step:
            raise KeyboardInterrupt

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine's peak, which takes longer than the training."""
    monkeypatch.setattr("flaxen.train.loop.peak", lambda: 1e12)


def save(model: Any, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    np.save(directory / "w.npy", np.asarray(model["w"]))


def go(out: Path, trackers: Any = (), task: Any = None, rate: float = 1.0, **training: Any) -> dict[str, float]:
    settings = Training(**{"steps": 6, "batch_size": 4, "log_every": 1, "eval_every": 1, "save_every": 1, **training})
    optimizer = Optimizer("lion", learning_rate=rate, clip=0.0)  # whose steps are as long as its rate
    stepper = Stepper(task or Falling(), optimizer, Schedule("constant"), settings)
    start: Callable[[], Any] = lambda: {"w": jnp.full(1, START)}  # noqa: E731
    with closing(Run(out, {"training": {"steps": settings.steps}}, {})) as run:
        return train(run, stepper, jax.eval_shape(start), start, list(trackers), save, quiet=True)


def records(out: Path, kind: str) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [one for one in found if one["kind"] == kind]


def steps_in(out: Path) -> list[int]:
    return sorted(int(path.name) for path in (out / "checkpoints").iterdir())


def weight(out: Path, name: str) -> float:
    return float(np.load(out / name / "w.npy")[0])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_window_means_are_exact(accumulate: int, tmp_path: Path) -> None:
    """Over the labels of all steps since the last record: a mean of the steps' means would be another number."""
    go(tmp_path, steps=7, log_every=3, eval_every=0, save_every=0, accumulate=accumulate)
    found = records(tmp_path, "train")
    assert [one["step"] for one in found] == [3, 6, 7]
    naive = []
    for one, steps in zip(found, ((0, 1, 2), (3, 4, 5), (6,))):
        batches = [Falling().batch(step, 4) for step in steps]
        sums = [(b["weight"] * (b["value"] + START - step)).sum() for b, step in zip(batches, steps)]
        weights = [b["weight"].sum() for b in batches]
        assert one["loss"] == sum(sums) / sum(weights)
        assert one["accuracy"] == sum((b["weight"] * (b["value"] > 4)).sum() for b in batches) / sum(weights)
        naive.append(np.mean(np.divide(sums, weights)))
    assert [one["loss"] for one in found][:2] != naive[:2]


def test_windows_survive_an_interruption(tmp_path: Path) -> None:
    """A checkpoint in the middle of a window remembers the part that it has."""
    whole, pieces, stop = tmp_path / "whole", tmp_path / "pieces", Interrupt(4)
    settings = {"steps": 8, "log_every": 4, "save_every": 3, "eval_every": 0}
    go(whole, **settings)
    with pytest.raises(KeyboardInterrupt):
        go(pieces, [stop], **settings)
    assert stop.closed
    assert steps_in(pieces) == [3]
    go(pieces, **settings)
    assert [one["loss"] for one in records(pieces, "train")] == [one["loss"] for one in records(whole, "train")]
    assert [one["step"] for one in records(pieces, "train")] == [4, 8]


@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_evaluation_is_exact_for_any_batch_size(size: int) -> None:
    task, model = Falling(), {"w": jnp.full(1, 4.0)}
    assert evaluate(task, scorer(task), model, size) == {"loss": 9.0, "accuracy": 2 / 7}
    assert evaluate(task, scorer(task), model, size, 6) == {"loss": 9.0, "accuracy": 1 / 6}


def test_an_evaluation_of_nothing_is_empty(tmp_path: Path) -> None:
    task = Falling(validation=0)
    assert evaluate(task, scorer(task), {"w": jnp.full(1, 4.0)}, 4) == {}
    with pytest.raises(InputError, match="requires validation data"):
        go(tmp_path, task=task, keep_best="loss")
    assert go(tmp_path, task=task) == {}
    assert records(tmp_path, "eval") == []
    assert not (tmp_path / "best").exists()
    assert weight(tmp_path, "model") == START - 6


def test_the_best_outlives_what_comes_after_it(tmp_path: Path) -> None:
    """w is 2, 1, 0, -1, …: the second is the best, and the first and the third are equal."""
    assert go(tmp_path, keep=1, keep_best="loss") == {"loss": 16.0, "accuracy": 2 / 7}
    assert [one["loss"] for one in records(tmp_path, "eval")] == [1, 0, 1, 4, 9, 16]
    assert steps_in(tmp_path) == [2, 6]
    assert (weight(tmp_path, "best"), weight(tmp_path, "model")) == (BEST, START - 6)


def test_a_score_of_what_is_written_can_be_the_measure(tmp_path: Path) -> None:
    """Of scores, more is better: here the last. What was written is kept, step by step."""
    task = Falling(generation_metrics=("rougeL",))
    go(tmp_path, task=task, keep=1, keep_best="rougeL")
    assert [one["rougeL"] for one in records(tmp_path, "eval")] == [1, 0, 1, 4, 9, 16]
    assert weight(tmp_path, "best") == START - 6
    assert len(list((tmp_path / "predictions").iterdir())) == 6


def test_the_best_outlives_an_interruption(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, [Interrupt(5)], keep=1, keep_best="loss")
    assert steps_in(tmp_path) == [2, 4]
    go(tmp_path, keep=1, keep_best="loss")
    assert steps_in(tmp_path) == [2, 6]
    assert weight(tmp_path, "best") == BEST


def test_of_equals_the_first_is_best(tmp_path: Path) -> None:
    """An accuracy that never moves; higher would be better."""
    go(tmp_path, keep=1, keep_best="accuracy")
    assert steps_in(tmp_path) == [1, 6]
    assert weight(tmp_path, "best") == START - 1


@pytest.mark.parametrize("later", ["accuracy", None])
def test_another_idea_of_the_best(later: str | None, tmp_path: Path) -> None:
    """What was best by the loss is no measure for an accuracy."""
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, [Interrupt(4)], keep=1, keep_best="loss")
    go(tmp_path, keep=1, keep_best=later)
    assert (tmp_path / "best").exists() == (later is not None)
    if later:
        assert weight(tmp_path, "best") == START - 4  # the first that was compared by it


def test_a_metric_that_is_not_measured(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"keep_best: unknown metric 'los'; did you mean 'loss'\?; available: loss, "):
        go(tmp_path / "run", keep_best="los")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("eval_every", [0, 1])
def test_numbers_that_are_not_finite_stop_it(eval_every: int, tmp_path: Path) -> None:
    """Where the update overflows: seen at once by an evaluation, else by the next step."""
    step = 1 if eval_every else 2
    with pytest.raises(Diverged, match=rf"step {step}: .*(?s:.*)flaxen replay {tmp_path} --step {step}"):
        go(tmp_path, rate=3e38, eval_every=eval_every, log_every=5)
    assert steps_in(tmp_path) == list(range(1, step))
    assert not (tmp_path / "model").exists()


def test_a_complete_run_is_left_alone(tmp_path: Path) -> None:
    go(tmp_path, keep_best="loss")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    tracker = Interrupt(-1)
    assert go(tmp_path, [tracker], keep_best="loss") == {"loss": 16.0, "accuracy": 2 / 7}
    assert tracker.seen == []
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for name in ("model", "best"):  # but a kill before the export is made good
        (tmp_path / name / "w.npy").unlink()
        (tmp_path / name).rmdir()
    go(tmp_path, keep_best="loss")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_speed_does_not_count_the_step_that_compiles(tmp_path: Path) -> None:
    go(tmp_path)
    first, *others = records(tmp_path, "train")
    assert "tokens_per_second" not in first
    assert all(one["tokens_per_second"] > 0 for one in others)


def test_trackers_get_what_is_recorded(tmp_path: Path) -> None:
    tracker = Interrupt(-1)
    go(tmp_path, [tracker], steps=2)
    assert [(step, next(iter(values)).split("/")[0]) for step, values in tracker.seen] == [
        (1, "train"), (1, "eval"), (2, "train"), (2, "eval")
    ]  # fmt: skip
    assert tracker.seen[1][1] == {"eval/loss": 1.0, "eval/accuracy": 2 / 7}
    assert tracker.closed
