"""One update of a model: a pure function of the state and a batch."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from flaxen.errors import InputError, did_you_mean
from flaxen.nn.hardware import training_options
from flaxen.nn.loss import Sums
from flaxen.tasks.task import Task
from flaxen.train import optim
from flaxen.train.accumulate import value_and_grad
from flaxen.train.settings import Optimizer, Schedule, Training


def compiled(function: Callable[..., Any], **how: Any) -> jax.stages.Wrapped:
    """`jax.jit` for programs whose memory is large."""
    return jax.jit(function, compiler_options=training_options(), **how)


class TrainState(NamedTuple):
    """All that an update changes."""

    step: Array  # how many updates there have been
    model: Any
    optimizer: Any  # optax's state
    carry: Any = None  # what the last batch leaves to the next, if the task has such a thing


class Metrics(NamedTuple):
    """What an update says of itself."""

    sums: Sums
    norm: Array  # of the gradient, before it is clipped
    rate: Array


ModelFrom = Callable[[Any, Any], Any]  # a model out of what is trained and what is not


class Stepper:
    """Compiles what the loop calls: `start`, `update`, `score`.

    What is trained is a model, or a part of one (an adapter): whole(trained, base) is then the model to train with and
    merged(trained, base) the one to write with. `base` is never changed and no part of the state.
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
        measured = [*task.metrics(Sums(*[jnp.ones(())] * len(Sums._fields))), *task.generation_metrics]
        best = training.keep_best
        if best is not None and best not in measured:
            there = f"there are {', '.join(measured)}{did_you_mean(best, measured)}"
            raise InputError(f"training.keep_best={best!r} is not measured; {there}")
        if best is not None and next(iter(task.evaluation(1, 1)), None) is None:
            raise InputError(f"training.keep_best={best!r} needs data to validate on, and there is none")
        self.steps = training.length(task.examples)
        self.rate = optim.learning_rate(schedule, optimizer.peak, self.steps)
        self.task, self.training = task, training
        self.transform, self.optimizer = optim.make_optimizer(optimizer, self.rate), optimizer
        self.whole, self.merged, self._base = whole, merged, base
        self._compiled_update = compiled(self._update, donate_argnums=0)
        self._compiled_gradient = compiled(self._gradient)
        self._compiled_score = compiled(
            lambda trained, batch, carry, base: task.loss(whole(trained, base), batch, carry, None)
        )

    def start(self, model: Any) -> TrainState:
        carry = self.task.carry(self.training.batch_size)
        return TrainState(jnp.zeros((), jnp.int32), model, jax.jit(self.transform.init)(model), carry)

    @cached_property
    def base(self) -> Any:
        """What is not trained, made when it is needed."""
        return self._base()

    def model(self, trained: Any) -> Any:
        """The model that writes."""
        return self.merged(trained, self.base)

    def update(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """The state one update later; the one given is used up."""
        return self._compiled_update(state, batch, self.base)

    def gradient(self, state: TrainState, batch: Any) -> tuple[Sums, Any]:
        return self._compiled_gradient(state, batch, self.base)[:2]

    def score(self, trained: Any, batch: Any, carry: Any = None) -> tuple[Sums, Any]:
        """Sums over a batch without noise, and what it leaves to the next."""
        return self._compiled_score(trained, batch, carry, self.base)

    def _gradient(self, state: TrainState, batch: Any, base: Any) -> tuple[Sums, Any, Any]:
        key = jax.random.fold_in(jax.random.key(self.training.seed), state.step)

        def loss(trained: Any, *rest: Any) -> tuple[Sums, Any]:
            return self.task.loss(self.whole(trained, base), *rest)

        pieces = self.training.accumulate
        divisor = self.task.divisor(batch)
        _, sums, gradient, carry = value_and_grad(loss, state.model, batch, pieces, key, state.carry, divisor)
        if self.optimizer.freeze:  # then XLA need not compute theirs
            still = optim.frozen(self.optimizer, gradient)
            gradient = jax.tree.map(lambda one, leaf: jnp.zeros_like(leaf) if one else leaf, still, gradient)
        return sums, gradient, carry

    def _update(self, state: TrainState, batch: Any, base: Any) -> tuple[TrainState, Metrics]:
        sums, gradient, carry = self._gradient(state, batch, base)
        changes, memory = self.transform.update(gradient, state.optimizer, state.model)
        report = Metrics(sums, optim.norm(gradient), self.rate(state.step))
        return TrainState(state.step + 1, optax.apply_updates(state.model, changes), memory, carry), report


def scorer(task: Task) -> Callable[[Any, Any, Any], tuple[Sums, Any]]:
    """Sums over a batch without noise, and what it leaves to the next."""
    return compiled(lambda model, batch, carry: task.loss(model, batch, carry, None))
