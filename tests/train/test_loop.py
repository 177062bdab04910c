"""The training loop on a model with a single weight, whose losses are known in advance."""

import json
from collections.abc import Iterator
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

START, BEST = 3.0, 1.0  # initial weight, and the weight with the lowest validation loss


class Falling(Task):
    """Training loss: value + w, so that w decreases by the learning rate each step. Validation loss: (w - 1)²."""

    examples, tokens, flops = 64, 4, 8.0

    def __init__(self, validation: int = 7, generation_metrics: tuple[str, ...] = ()):
        self.validation, self.generation_metrics = validation, generation_metrics

    def batch(self, step: int, size: int, rows: slice = slice(None)) -> Batch:
        """Weights that differ between steps and rows."""
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
        """A metric that is higher the further w is from the lowest loss."""
        if not self.generation_metrics:
            return {}
        path.write_text("generated\n")
        return {"rougeL": float(jnp.square(model["w"][0] - BEST))}

    def metrics(self, sums: Sums) -> dict[str, float]:
        return {"loss": float(sums.loss / sums.weight), "accuracy": float(sums.correct / sums.weight)}


class Interrupt:
    """A tracker that simulates a kill when a step is recorded."""

    def __init__(self, step: int):
        self.step, self.closed, self.seen = step, False, list[tuple[int, dict[str, float]]]()

    def log(self, values: dict[str, float], step: int) -> None:
        self.seen.append((step, values))
        if step == self.step:
            raise KeyboardInterrupt

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def fixed_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip measuring the machine's peak, which takes longer than the training."""
    monkeypatch.setattr("flaxen.train.loop.peak", lambda: 1e12)


def save(model: Any, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    np.save(directory / "w.npy", np.asarray(model["w"]))


def run_training(
    out: Path, trackers: Any = (), task: Any = None, rate: float = 1.0, **training: Any
) -> dict[str, float]:
    settings = Training(**{"steps": 6, "batch_size": 4, "log_every": 1, "eval_every": 1, "save_every": 1, **training})
    optimizer = Optimizer("lion", learning_rate=rate, clip=0.0)  # each update has the size of the learning rate
    stepper = Stepper(task or Falling(), optimizer, Schedule("constant"), settings)

    def start() -> Any:
        return {"w": jnp.full(1, START)}

    with closing(Run(out, {"training": {"steps": settings.steps}}, {})) as run:
        return train(run, stepper, jax.eval_shape(start), start, list(trackers), save, quiet=True)


def records(out: Path, kind: str) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record for record in lines if record["kind"] == kind]


def steps_in(out: Path) -> list[int]:
    return sorted(int(path.name) for path in (out / "checkpoints").iterdir())


def weight(out: Path, name: str) -> float:
    return float(np.load(out / name / "w.npy")[0])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_window_means_are_exact(accumulate: int, tmp_path: Path) -> None:
    """Means are over the labels of all steps since the last record, not means of the steps' means."""
    run_training(tmp_path, steps=7, log_every=3, eval_every=0, save_every=0, accumulate=accumulate)
    logged = records(tmp_path, "train")
    assert [record["step"] for record in logged] == [3, 6, 7]
    naive = []
    for record, steps in zip(logged, ((0, 1, 2), (3, 4, 5), (6,))):
        batches = [Falling().batch(step, 4) for step in steps]
        sums = [(b["weight"] * (b["value"] + START - step)).sum() for b, step in zip(batches, steps)]
        weights = [b["weight"].sum() for b in batches]
        assert record["loss"] == sum(sums) / sum(weights)
        assert record["accuracy"] == sum((b["weight"] * (b["value"] > 4)).sum() for b in batches) / sum(weights)
        naive.append(np.mean(np.divide(sums, weights)))
    assert [record["loss"] for record in logged][:2] != naive[:2]


def test_log_windows_survive_a_resume(tmp_path: Path) -> None:
    """A checkpoint in the middle of a window stores its partial sums."""
    uninterrupted, resumed, stop = tmp_path / "uninterrupted", tmp_path / "resumed", Interrupt(4)
    settings = {"steps": 8, "log_every": 4, "save_every": 3, "eval_every": 0}
    run_training(uninterrupted, **settings)
    with pytest.raises(KeyboardInterrupt):
        run_training(resumed, [stop], **settings)
    assert stop.closed
    assert steps_in(resumed) == [3]
    run_training(resumed, **settings)
    expected = [record["loss"] for record in records(uninterrupted, "train")]
    assert [record["loss"] for record in records(resumed, "train")] == expected
    assert [record["step"] for record in records(resumed, "train")] == [4, 8]


@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_evaluation_is_exact_for_any_batch_size(size: int) -> None:
    task, model = Falling(), {"w": jnp.full(1, 4.0)}
    assert evaluate(task, scorer(task), model, size) == {"loss": 9.0, "accuracy": 2 / 7}
    assert evaluate(task, scorer(task), model, size, 6) == {"loss": 9.0, "accuracy": 1 / 6}


def test_evaluation_without_examples_is_empty(tmp_path: Path) -> None:
    task = Falling(validation=0)
    assert evaluate(task, scorer(task), {"w": jnp.full(1, 4.0)}, 4) == {}
    with pytest.raises(InputError, match="requires validation data"):
        run_training(tmp_path, task=task, keep_best="loss")
    assert run_training(tmp_path, task=task) == {}
    assert records(tmp_path, "eval") == []
    assert not (tmp_path / "best").exists()
    assert weight(tmp_path, "model") == START - 6


def test_best_checkpoint_is_retained(tmp_path: Path) -> None:
    """w is 2, 1, 0, -1, …: the second is the best, and the first and the third are equal."""
    assert run_training(tmp_path, keep=1, keep_best="loss") == {"loss": 16.0, "accuracy": 2 / 7}
    assert [record["loss"] for record in records(tmp_path, "eval")] == [1, 0, 1, 4, 9, 16]
    assert steps_in(tmp_path) == [2, 6]
    assert (weight(tmp_path, "best"), weight(tmp_path, "model")) == (BEST, START - 6)


def test_generation_metric_can_select_the_best(tmp_path: Path) -> None:
    """Higher generation metrics are better, so the last step is best here. Each evaluation saves its predictions."""
    task = Falling(generation_metrics=("rougeL",))
    run_training(tmp_path, task=task, keep=1, keep_best="rougeL")
    assert [record["rougeL"] for record in records(tmp_path, "eval")] == [1, 0, 1, 4, 9, 16]
    assert weight(tmp_path, "best") == START - 6
    assert len(list((tmp_path / "predictions").iterdir())) == 6


def test_best_checkpoint_survives_a_resume(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_training(tmp_path, [Interrupt(5)], keep=1, keep_best="loss")
    assert steps_in(tmp_path) == [2, 4]
    run_training(tmp_path, keep=1, keep_best="loss")
    assert steps_in(tmp_path) == [2, 6]
    assert weight(tmp_path, "best") == BEST


def test_first_of_equals_is_best(tmp_path: Path) -> None:
    """The accuracy is the same at every step."""
    run_training(tmp_path, keep=1, keep_best="accuracy")
    assert steps_in(tmp_path) == [1, 6]
    assert weight(tmp_path, "best") == START - 1


@pytest.mark.parametrize("later", ["accuracy", None])
def test_changing_the_metric_forgets_the_best(later: str | None, tmp_path: Path) -> None:
    """The best value of the loss cannot be compared with an accuracy."""
    with pytest.raises(KeyboardInterrupt):
        run_training(tmp_path, [Interrupt(4)], keep=1, keep_best="loss")
    run_training(tmp_path, keep=1, keep_best=later)
    assert (tmp_path / "best").exists() == (later is not None)
    if later:
        assert weight(tmp_path, "best") == START - 4  # the first step evaluated with the new metric


def test_unknown_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"keep_best: unknown metric 'los' \(did you mean 'loss'\?\); available: loss, "
    ):
        run_training(tmp_path / "run", keep_best="los")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("eval_every", [0, 1])
def test_divergence_stops_training(eval_every: int, tmp_path: Path) -> None:
    """The first update overflows: an evaluation detects it at once, otherwise the next step does."""
    step = 1 if eval_every else 2
    with pytest.raises(Diverged, match=rf"step {step}: .*(?s:.*)flaxen replay {tmp_path} --step {step}"):
        run_training(tmp_path, rate=3e38, eval_every=eval_every, log_every=5)
    assert steps_in(tmp_path) == list(range(1, step))
    assert not (tmp_path / "model").exists()


def test_complete_run_is_unchanged(tmp_path: Path) -> None:
    run_training(tmp_path, keep_best="loss")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    tracker = Interrupt(-1)
    assert run_training(tmp_path, [tracker], keep_best="loss") == {"loss": 16.0, "accuracy": 2 / 7}
    assert tracker.seen == []
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for name in ("model", "best"):  # an export missing after a kill is repeated
        (tmp_path / name / "w.npy").unlink()
        (tmp_path / name).rmdir()
    run_training(tmp_path, keep_best="loss")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_speed_excludes_the_compiling_step(tmp_path: Path) -> None:
    run_training(tmp_path)
    first, *others = records(tmp_path, "train")
    assert "tokens_per_second" not in first
    assert all(record["tokens_per_second"] > 0 for record in others)


def test_trackers_receive_all_records(tmp_path: Path) -> None:
    tracker = Interrupt(-1)
    run_training(tmp_path, [tracker], steps=2)
    assert [(step, next(iter(values)).split("/")[0]) for step, values in tracker.seen] == [
        (1, "train"), (1, "eval"), (2, "train"), (2, "eval")
    ]  # fmt: skip
    assert tracker.seen[1][1] == {"eval/loss": 1.0, "eval/accuracy": 2 / 7}
    assert tracker.closed
