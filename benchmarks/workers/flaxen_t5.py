"""T5 in Flaxen. bf16 means bf16 weights for generation, and f32 weights with bf16 matmuls for loss and training."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from measure import Worker
from workloads import LEARNING_RATE

PIECES = 4  # gradient accumulation: the same result, with the activations of two rows in memory instead of eight


def main() -> None:
    run(Worker(__doc__, precisions=("f32", "bf16")), PIECES)


def run(worker: Worker, most: int) -> None:
    """Run the workload of an encoder-decoder; accumulate gradients over `most` pieces if that divides the batch."""
    from flaxen.cli import process
    from flaxen.malloc import restart_with_tuned_malloc

    restart_with_tuned_malloc()  # as the flaxen command does
    process.cache_compilations()
    import jax
    import numpy as np

    from flaxen import load  # imports are lazy: `import flaxen` alone would load nothing
    from flaxen.train import accumulate

    worker.mark("import")
    options = {}
    if worker.precision == "bf16":
        options = {"compute" if worker.workload in ("loss", "train") else "dtype": "bfloat16"}
    pretrained = load(worker.model_dir, **options)
    if worker.remat:
        for part in (pretrained.model, pretrained.model.encoder, pretrained.model.decoder):
            part.config = replace(part.config, remat=True)
    worker.mark("load")

    @jax.jit
    def value_and_grad(model: Any, source: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        if len(source) == 1:
            return jax.value_and_grad(lambda model: model.loss(source, labels)[0])(model)

        def of_piece(model: Any, piece: Any, carry: Any, key: Any) -> Any:
            return (model.loss(*piece)[1], None)

        value, _, gradients, _ = accumulate.value_and_grad(of_piece, model, (source, labels), pieces(source, most))
        return value, gradients

    def loss(source: np.ndarray, labels: np.ndarray) -> tuple[float, list[np.ndarray]]:
        value, gradients = jax.block_until_ready(value_and_grad(pretrained.model, source, labels))
        return float(value), [np.asarray(gradient) for gradient in jax.tree.leaves(gradients)]

    def train(source: np.ndarray, labels: np.ndarray) -> Callable[[], float]:
        # Imported here because `cold` times the imports, and other workloads need no optimizer.
        from flaxen.train.settings import Optimizer, Schedule, Training
        from flaxen.train.step import Stepper

        nonlocal pretrained
        task = one_batch(source, labels)
        stepper = Stepper(
            task,
            Optimizer("adamw", learning_rate=LEARNING_RATE, clip=0.0),
            Schedule("constant", warmup=0),
            Training(steps=1000, batch_size=len(source), accumulate=pieces(source, most)),
        )
        state, pretrained = (
            stepper.init_state(pretrained.model),
            None,
        )  # drop the other reference to the initial weights, which are donated
        batch = jax.device_put(task.batch(0, len(source)))

        def step() -> float:
            nonlocal state
            state, report = jax.block_until_ready(stepper.update(state, batch))
            return task.metrics(report.sums)["loss"]

        return step

    def generate(source: np.ndarray, new_tokens: int, beams: int) -> list[list[int]]:
        prompts = source.tolist() if source.ndim == 2 else source  # ids, or pixels
        outputs = pretrained.generate(prompts, max_new_tokens=new_tokens, min_new_tokens=new_tokens, num_beams=beams)
        return [[int(token) for token in output.tokens] for output in outputs]

    worker.run(loss, train, generate, ["jax", "flax", "flaxen"])


def one_batch(source: Any, labels: Any) -> Any:
    from flaxen.tasks.task import Task  # only after the restart in `run`

    class OneBatch(Task):
        """A task with one batch. Its loss does not use the key, so there is no dropout."""

        tokens, flops = 0, 0.0  # only used to display speed

        def __init__(self, source: Any, labels: Any) -> None:
            self._batch, self.examples = {"input_ids": source, "labels": labels}, len(source)

        def batch(self, step: int, size: int, rows: slice = slice(None)) -> dict[str, Any]:
            return {name: array[rows] for name, array in self._batch.items()}

        def evaluation(self, size: int, limit: int | None = None) -> Iterator[dict[str, Any]]:
            return iter(())

        def loss(self, model: Any, batch: dict[str, Any], carry: None, key: Any) -> Any:
            return model.loss(batch["input_ids"], batch["labels"])[1], None

    return OneBatch(source, labels)


def pieces(source: Any, most: int) -> int:
    return most if len(source) % most == 0 else 1


if __name__ == "__main__":
    main()
