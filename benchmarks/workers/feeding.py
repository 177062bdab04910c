"""Time a training step with batches from the loader, and the same step with a constant batch."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count, repeat
from pathlib import Path
from statistics import median
from typing import Any

from measure import emit, pin, timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--vocabulary", type=Path)
    parser.add_argument("--scratch", type=Path, help="an empty directory")
    parser.add_argument(
        "--rounds", type=int, default=18, help="number of rounds; each times both, in alternating order"
    )
    parser.add_argument("--steps", type=int, default=5, help="steps of each per round")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--pin", type=int, nargs="+", metavar="CORE")
    flags = parser.parse_args()
    pin(flags.pin)
    import jax

    from flaxen import families
    from flaxen.data.corpus import Corpus
    from flaxen.data.prefetch import prefetch
    from flaxen.data.store import open_corpus
    from flaxen.data.tokenizers import load_tokenizer
    from flaxen.models.t5 import T5, Config
    from flaxen.nn.param import initialise
    from flaxen.tasks.denoise import Denoise
    from flaxen.tasks.objective import DenoiseObjective
    from flaxen.train.settings import Optimizer, Schedule, Training
    from flaxen.train.step import Stepper

    tokenizer = load_tokenizer(flags.vocabulary)
    assert tokenizer is not None
    sizes = {"d_model": 64, "d_head": 16, "d_ff": 128, "n_heads": 4, "n_layers": 2, "n_decoder_layers": 2}
    if not flags.tiny:
        sizes = {"d_model": 256, "d_head": 64, "d_ff": 1024, "n_heads": 4, "n_layers": 4, "n_decoder_layers": 4}
    config = Config(vocab_size=-(-tokenizer.size // 128) * 128, dropout=0.0, **sizes)
    training = Training(steps=10**6, batch_size=8)
    train, validation = open_corpus(Corpus((str(flags.text),), cache=flags.scratch), tokenizer, progress=False)
    task = Denoise(
        families.T5,
        config,
        DenoiseObjective(input_length=32 if flags.tiny else 256),
        tokenizer,
        train,
        validation,
        seed=0,
    )
    stepper = Stepper(task, Optimizer("adamw", learning_rate=1e-4), Schedule("constant", warmup=0), training)
    state = stepper.init_state(initialise(T5(config), seed=0))

    waited, making = 0.0, []

    def make(step: int) -> dict[str, jax.Array]:
        started = time.thread_time()
        batch = jax.device_put(task.batch(step, training.batch_size))
        making.append(time.thread_time() - started)
        return batch

    def steps(batches: Iterator[Any], n: int) -> None:
        """Run n steps as the training loop does: a step's report is read while the next one is being computed."""
        nonlocal state, waited
        waited, report = 0.0, None
        for _ in range(n):
            requested = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - requested
            before, (state, report) = report, stepper.update(state, batch)
            if before is not None:
                float(before.norm)
        float(report.norm)

    constant = make(0)
    with closing(prefetch(make, count())) as fresh:  # type: ignore[type-var]
        feeds: dict[str, Iterator[Any]] = {"constant": repeat(constant), "loader": fresh}
        for batches in feeds.values():
            steps(batches, 3)
        making.clear()
        for number in range(flags.rounds):
            for name, batches in sorted(feeds.items(), reverse=bool(number % 2)):
                figures = timed(lambda batches=batches: steps(batches, flags.steps))
                per_step = {clock: figures[clock] / flags.steps for clock in ("wall", "cpu")}
                emit(feed=name, **per_step, waited=waited / flags.steps)
        emit(making=median(making))


if __name__ == "__main__":
    main()
