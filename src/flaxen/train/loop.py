"""The training loop: step, log, evaluate, save a checkpoint; resume from the newest checkpoint.

A process killed at any moment loses only the steps since the last checkpoint.
"""

import math
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxen.atomic_directory import check_directory
from flaxen.data.prefetch import prefetch
from flaxen.errors import InputError
from flaxen.nn.loss import Sums
from flaxen.tasks.task import Batch, Task, report_skipped
from flaxen.train.checkpoint import Checkpoints
from flaxen.train.display import Display, numbers, seconds
from flaxen.train.run import Run
from flaxen.train.speed import peak
from flaxen.train.step import Metrics, Stepper, TrainState
from flaxen.train.tracking import Tracker

LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte", "bits_per_dim", "word_perplexity")
Export = Callable[[Any, Path], None]  # writes a model to a directory


def train(
    run: Run,
    stepper: Stepper,
    abstract: Any,
    initial: Callable[[], Any],
    trackers: list[Tracker],
    export: Export,
    quiet: bool = False,
    received: Sequence[int] = (),
) -> dict[str, float]:
    """Train, resuming from the newest checkpoint or starting from `initial()`. Returns the last evaluation.

    `abstract` has the shapes of the model, so that resuming initialises no weights. When a signal number appears in
    `received`, the current step is completed and saved, and the process exits.
    """
    task, training, steps = stepper.task, stepper.training, stepper.steps
    checkpoints = Checkpoints(run.checkpoints, training.keep)
    state, loop_state = _restore_or_start(checkpoints, stepper, abstract, initial)
    done, skipped = int(state.step), set[str]()  # completed steps; examples reported as unreadable
    # Before anything is recorded: the steps after the checkpoint will run and be recorded once more.
    run.forget_after(done)
    if done < steps:  # otherwise training would fail at the end
        for target in (run.model, run.best):
            check_directory(target, advice="move them elsewhere and rerun the command, which exports the model there")

    # Called in the prefetch thread, so reading, and copying to the device, overlap with the computation.
    def load_batch(step: int) -> dict[str, jax.Array]:
        batch = task.batch(step, training.batch_size)
        report_skipped(task.skipped_examples(batch), skipped)
        return jax.device_put(batch)

    with (
        ExitStack() as cleanup,
        closing(checkpoints),
        Display(steps, done, quiet) as display,
        closing(prefetch(load_batch, range(done, steps))) as batches,
    ):
        for tracker in trackers:
            cleanup.callback(tracker.close)
        records = Records(run, trackers, display)
        # A complete run has no speed to compare with the peak, so the peak is not measured.
        speed = Throughput(task, training.batch_size, peak() if steps > done else None)
        if done:
            display.line(f"resuming from step {done:,} of {steps:,}")
        pending: Metrics | None = None
        for step, batch in enumerate(batches, done + 1):
            metrics: Metrics
            state, metrics = stepper.update(state, batch)
            if step == done + 1:  # exclude compilation from the measured speed
                jax.block_until_ready(metrics)
                speed.start(1)
            # Read the metrics of the previous step: reading those of this one would wait for the device.
            if pending is not None:
                loop_state.absorb(pending, step - 1, run.directory)
                display.step(step - 1, loop_state.loss, speed.text())
            pending = metrics
            # An interval of 0 means only at the last step.
            log, validate, save = (
                step == steps or (every and step % every == 0)
                for every in (training.log_every, training.eval_every, training.save_every)
            )
            stopping = bool(received)
            if not (log or validate or save or stopping):
                continue

            # Before evaluating and saving: if the step is not finite this raises, and the state reaches no checkpoint.
            loop_state.absorb(metrics, step, run.directory)
            pending = None
            speed.stop(step - done)
            if log:
                records.log(step, loop_state.window(task), metrics, speed)
            if validate:
                loop_state.evaluation = _validate(stepper, state, run, step, skipped)
                records.evaluation(step, loop_state.evaluation)
                loop_state.note_best(step)
            # A new best step is saved at once, whatever save_every says.
            if save or stopping or loop_state.best_step == step:
                # Before the checkpoint: after a power failure no checkpoint is newer than the metrics.
                run.sync_metrics()
                checkpoints.save(step, state, loop_state.saved(), loop_state.best_step)
            if stopping:
                checkpoints.wait()
                name = signal.Signals(received[0]).name
                display.line(f"saved step {step:,} on {name}; rerun the same command to resume")
                # The exit code that shells report for a process terminated by a signal.
                raise SystemExit(128 + received[0])
            speed.start(step - done)  # exclude the time of evaluating and saving

        if done == steps:
            display.line(f"the run is already complete ({steps:,} steps)")
        checkpoints.wait()
        # After a complete run, only export what is missing: the process may have been killed before exporting.
        for target, export_step in ((run.model, steps), (run.best, loop_state.best_step)):
            if export_step is not None and (done < steps or not target.exists()):
                latest = export_step == int(state.step)
                export(state.model if latest else checkpoints.restore_model(export_step, state.model), target)
        if done < steps:
            display.line(f"trained {steps - done:,} steps in {seconds(speed.total)}; model saved in {run.model}")
    return loop_state.evaluation or {}


def _restore_or_start(
    checkpoints: Checkpoints, stepper: Stepper, abstract: Any, initial: Callable[[], Any]
) -> tuple[TrainState, "LoopState"]:
    """Load the newest intact checkpoint to resume from, or create the initial state."""
    like = jax.eval_shape(stepper.init_state, abstract)
    if restored := checkpoints.restore_newest(like, on_damage=stepper.training.on_damage):
        state, loop_state = restored[0], LoopState(**restored[1])
    else:
        state, loop_state = stepper.init_state(initial()), LoopState()
    # keep_best may change when a run is resumed; a best step by another metric is meaningless.
    loop_state.compare_by(stepper.training.keep_best)
    # Commit the state, restored or new, to an explicit device; otherwise a resumed run would compile a different
    # program.
    return jax.device_put(state, jax.devices()[0]), loop_state


def _validate(stepper: Stepper, state: TrainState, run: Run, step: int, skipped: set[str]) -> dict[str, float]:
    """Compute the validation metrics and, if the task generates text, the metrics of the generated text."""
    task, training = stepper.task, stepper.training
    limits = (training.eval_rows, training.eval_examples)
    values = evaluate(task, stepper.score, state.model, *limits, skipped)
    if values and task.generation_metrics:
        values |= task.generate_and_score_sample(stepper.model(state.model), run.new_predictions(step), skipped)
    if values and not math.isfinite(values["loss"]):
        raise Diverged(f"the validation loss is {values['loss']}", step, run.directory)
    return values


class Records:
    """Send metrics to metrics.jsonl, the trackers and the console."""

    def __init__(self, run: Run, trackers: list[Tracker], display: Display):
        self._run, self._trackers, self._display = run, trackers, display

    def log(self, step: int, means: dict[str, float], metrics: Metrics, speed: "Throughput") -> None:
        values = means | {"gradient_norm": float(metrics.norm), "learning_rate": float(metrics.rate)}
        self._display.line(f"step {step:,}  {numbers(values)}  {speed.text()}")
        self._write("train", step, values | speed.values())

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        if values:
            self._display.line(f"step {step:,}  validation: {numbers(values)}")
            self._write("eval", step, values)

    def _write(self, kind: str, step: int, values: dict[str, float]) -> None:
        self._run.record({"step": step, "kind": kind, **values})
        for tracker in self._trackers:
            tracker.log({f"{kind}/{name}": value for name, value in values.items()}, step)


def evaluate(
    task: Task,
    score: Callable[[Any, Any, Any], tuple[Sums, Any]],
    model: Any,
    size: int,
    limit: int | None = None,
    skipped: set[str] | None = None,
) -> dict[str, float]:
    """Compute metrics as exact means over the validation examples, independent of the batch size; {} if there are none.

    Examples that cannot be read are reported once and added to `skipped`.
    """
    total, carry = np.zeros(len(Sums._fields)), task.carry(size)
    known = set[str]() if skipped is None else skipped

    def to_device(batch: Batch) -> dict[str, jax.Array]:
        report_skipped(task.skipped_examples(batch, "validation"), known)
        return jax.device_put(batch)

    with closing(prefetch(to_device, task.evaluation(size, limit))) as batches:
        for batch in batches:
            sums, carry = score(model, batch, carry)
            # Added in f64, because in f32 a large total would swallow the low bits of each batch.
            total += np.asarray(sums, np.float64)
    return task.metrics(Sums(*total)) if total[-1] else {}  # the last sum is the number of labels


class LoopState:
    """The loop's own state between steps (running sums, best metric), saved in each checkpoint."""

    def __init__(
        self,
        sums: list[float] | None = None,
        evaluation: dict[str, float] | None = None,
        best_metric: str | None = None,
        best_step: int | None = None,
        best_value: float | None = None,
    ):
        self.sums = np.array(sums or [0.0] * len(Sums._fields))  # accumulated since the last log record
        self.evaluation = evaluation
        self.best_metric, self.best_step, self.best_value = best_metric, best_step, best_value
        self.loss = math.nan  # training loss of the last step

    def saved(self) -> dict[str, Any]:
        """Values to store in a checkpoint as JSON: the arguments of `__init__`."""
        names = ("evaluation", "best_metric", "best_step", "best_value")
        return {"sums": self.sums.tolist()} | {name: getattr(self, name) for name in names}

    def absorb(self, metrics: Metrics, step: int, directory: Path) -> None:
        """Add the sums of a step; raise Diverged if its loss or gradient norm is not finite."""
        sums, norm = np.asarray(metrics.sums, np.float64), float(metrics.norm)
        self.loss = float(sums[0] / max(sums[-1], 1.0))
        if not (math.isfinite(self.loss) and math.isfinite(norm)):
            raise Diverged(f"the loss is {self.loss} and the gradient norm {norm}", step, directory)
        self.sums = self.sums + sums

    def window(self, task: Task) -> dict[str, float]:
        """Return the means since the last log record and reset the sums; {} if all labels were padding."""
        values = task.metrics(Sums(*self.sums)) if self.sums[-1] else {}
        self.sums = np.zeros_like(self.sums)
        return values

    def compare_by(self, metric: str | None) -> None:
        """Set the metric that decides which checkpoint is best; if it changes, discard the best one so far."""
        if metric != self.best_metric:
            self.best_metric, self.best_step, self.best_value = metric, None, None

    def note_best(self, step: int) -> None:
        """Remember this step if its evaluation is strictly better than the best so far."""
        if self.best_metric is None or not self.evaluation:
            return
        value, sign = self.evaluation[self.best_metric], -1 if self.best_metric in LOWER_IS_BETTER else 1
        if self.best_value is None or sign * value > sign * self.best_value:
            self.best_step, self.best_value = step, value


class Diverged(InputError):
    """The loss or gradient is not finite. The diverged state is never saved."""

    def __init__(self, what: str, step: int, directory: Path):
        super().__init__(
            f"training diverged at step {step}: {what}; the step was not saved.\n"
            f"To inspect its batch and gradients: flaxen replay {directory} --step {step}\n"
            "Common remedies: a lower learning rate, a longer warmup, gradient clipping, float32 compute, z-loss"
        )


class Throughput:
    """Training speed since the last `start`: tokens per second and model FLOP utilisation (MFU)."""

    def __init__(self, task: Task, batch_size: int, peak: float | None):
        self._tokens, self._flops, self._peak = task.tokens * batch_size, task.flops * batch_size, peak
        self._clock, self._steps, self._rate, self.total = time.monotonic(), 0, math.nan, 0.0

    def start(self, step: int) -> None:
        self._clock, self._steps = time.monotonic(), step

    def stop(self, step: int) -> None:
        took = time.monotonic() - self._clock
        self.total += took
        if step > self._steps:  # unless only the first step, which compiles, has run
            self._rate = (step - self._steps) / took

    def values(self) -> dict[str, float]:
        if math.isnan(self._rate):
            return {}
        values = {"tokens_per_second": self._rate * self._tokens}
        return values | ({"mfu": self._rate * self._flops / self._peak} if self._peak else {})

    def text(self) -> str:
        if math.isnan(self._rate):
            return ""
        mfu = f"  {100 * self._rate * self._flops / self._peak:.0f} % MFU" if self._peak else ""
        return f"{self._rate * self._tokens:,.0f} tokens/s{mfu}"
