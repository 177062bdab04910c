"""The training step: a pure function from the train state and a batch to the next state and its metrics."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from flaxen.errors import InputError, unknown
from flaxen.nn.hardware import training_options
from flaxen.nn.loss import Sums
from flaxen.tasks.task import Task
from flaxen.train import optim
from flaxen.train.accumulate import value_and_grad
from flaxen.train.settings import Optimizer, Schedule, Training


def compiled(function: Callable[..., Any], **options: Any) -> jax.stages.Wrapped:
    """Apply `jax.jit` with the compiler options for training, which reduce peak memory."""
    return jax.jit(function, compiler_options=training_options(), **options)


class TrainState(NamedTuple):
    """Everything that a training step changes."""

    step: Array  # number of completed training steps
    model: Any
    optimizer: Any  # state of the optax transformation
    carry: Any = None  # memory passed from one batch to the next, if the task has any


class Metrics(NamedTuple):
    """Metrics of a training step, still on the device."""

    sums: Sums
    norm: Array  # gradient norm before clipping
    rate: Array  # learning rate


ModelFrom = Callable[[Any, Any], Any]  # (trained weights, frozen base) -> model


class Stepper:
    """The compiled functions that the training loop calls: `init_state`, `update` and `score`.

    The trained weights are a whole model or an adapter of one. For an adapter, whole(trained, base) returns the model
    to train with and merged(trained, base) the model to generate with. `base` is frozen and not part of the state.
    """

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        schedule: Schedule,
        training: Training,
        whole: ModelFrom = lambda trained, base: trained,
        merged: ModelFrom = lambda trained, base: trained,
        base: Callable[[], Any] = lambda: None,
    ):
        # Only the names are needed, so any sums will do.
        metrics = [*task.metrics(Sums(*[jnp.ones(())] * len(Sums._fields))), *task.generation_metrics]
        best = training.keep_best
        if best is not None and best not in metrics:
            raise InputError(f"training.keep_best: {unknown('metric', best, metrics)}")
        if best is not None and next(iter(task.evaluation(1, 1)), None) is None:
            raise InputError(f"training.keep_best={best!r} requires validation data, but there is none")
        self.steps = training.length(task.examples)
        self.rate = optim.learning_rate(schedule, optimizer.peak, self.steps)
        self.task, self.training = task, training
        self.transform, self.optimizer = optim.make_optimizer(optimizer, self.rate), optimizer
        self.whole, self.merged, self._base = whole, merged, base
        # The new state reuses the buffers of the old one: weights and optimizer state are in memory once.
        self._compiled_update = compiled(self._update, donate_argnums=0)
        self._compiled_gradient = compiled(self._gradient)
        self._compiled_score = compiled(
            lambda trained, batch, carry, base: task.loss(whole(trained, base), batch, carry, None)
        )

    def init_state(self, model: Any) -> TrainState:
        """Create the initial state for a model or an adapter."""
        carry = self.task.carry(self.training.batch_size)
        return TrainState(jnp.zeros((), jnp.int32), model, jax.jit(self.transform.init)(model), carry)

    @cached_property
    def base(self) -> Any:
        """The frozen weights, loaded on first use."""
        return self._base()

    def model(self, trained: Any) -> Any:
        """Return the model to generate with."""
        return self.merged(trained, self.base)

    def update(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Return the state after one training step, and its metrics; the given state is donated."""
        # The base is an argument: jit would embed arrays of a closure in the program as constants.
        return self._compiled_update(state, batch, self.base)

    def gradient(self, state: TrainState, batch: Any) -> tuple[Sums, Any]:
        """Compute the loss sums and the gradient of a batch without updating the state."""
        return self._compiled_gradient(state, batch, self.base)[:2]

    def score(self, trained: Any, batch: Any, carry: Any = None) -> tuple[Sums, Any]:
        """Compute the loss sums of a batch without noise, and the carry for the next batch."""
        return self._compiled_score(trained, batch, carry, self.base)

    def _gradient(self, state: TrainState, batch: Any, base: Any) -> tuple[Sums, Any, Any]:
        # Noise depends only on (seed, step), so a resumed run draws the same noise.
        key = jax.random.fold_in(jax.random.key(self.training.seed), state.step)

        def loss(trained: Any, *rest: Any) -> tuple[Sums, Any]:
            return self.task.loss(self.whole(trained, base), *rest)

        pieces = self.training.accumulate
        divisor = self.task.divisor(batch)
        _, sums, gradient, carry = value_and_grad(loss, state.model, batch, pieces, key, state.carry, divisor)
        if self.optimizer.freeze:  # XLA drops the computation of gradients that are not used
            is_frozen = optim.frozen(self.optimizer, gradient)
            gradient = jax.tree.map(lambda frozen, leaf: jnp.zeros_like(leaf) if frozen else leaf, is_frozen, gradient)
        return sums, gradient, carry

    def _update(self, state: TrainState, batch: Any, base: Any) -> tuple[TrainState, Metrics]:
        sums, gradient, carry = self._gradient(state, batch, base)
        updates, optimizer = self.transform.update(gradient, state.optimizer, state.model)
        metrics = Metrics(sums, optim.norm(gradient), self.rate(state.step))
        return TrainState(state.step + 1, optax.apply_updates(state.model, updates), optimizer, carry), metrics


def scorer(task: Task) -> Callable[[Any, Any, Any], tuple[Sums, Any]]:
    """Compile a function that returns the loss sums of a batch without noise, and the carry for the next batch."""
    return compiled(lambda model, batch, carry: task.loss(model, batch, carry, None))
