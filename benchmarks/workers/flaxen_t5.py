"""Flaxen. bf16 is: to generate, bf16 weights; for the loss and for training, f32 weights and bf16 compute."""

from collections.abc import Callable
from typing import Any

from measure import Worker
from workloads import LEARNING_RATE

PIECES = 4  # that a batch of eight is computed in: the same numbers, and the activations of two rows instead of eight


def main() -> None:
    worker = Worker(__doc__, precisions=("f32", "bf16"))
    import jax
    import numpy as np

    from flaxen import load  # the name itself: `import flaxen` alone imports nothing
    from flaxen.train import accumulate

    worker.mark("import")
    options = {}
    if worker.precision == "bf16":
        options = {"compute" if worker.workload in ("loss", "train") else "dtype": "bfloat16"}
    pretrained = load(worker.model_dir, **options)
    worker.mark("load")

    @jax.jit
    def value_and_grad(model: Any, source: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        of_piece = lambda model, piece, key: model.loss(*piece)[1]  # noqa: E731
        value, _, gradients = accumulate.value_and_grad(of_piece, model, (source, labels), pieces(source))
        return value, gradients

    def loss(source: np.ndarray, labels: np.ndarray) -> tuple[float, list[np.ndarray]]:
        value, gradients = jax.block_until_ready(value_and_grad(pretrained.model, source, labels))
        return float(value), [np.asarray(gradient) for gradient in jax.tree.leaves(gradients)]

    def train(source: np.ndarray, labels: np.ndarray) -> Callable[[], float]:
        # Here and not above: the other workloads need no optimizer, and `cold` times the imports.
        from flaxen.train.settings import Optimizer, Schedule, Training
        from flaxen.train.step import Stepper

        nonlocal pretrained
        stepper = Stepper(
            Constant(),
            Optimizer("adamw", learning_rate=LEARNING_RATE, clip=0.0),
            Schedule("constant"),
            Training(steps=1000, batch_size=len(source), accumulate=pieces(source)),
        )
        state, pretrained = stepper.start(pretrained.model), None  # nobody else keeps the first weights
        batch = jax.device_put({"input_ids": source, "labels": labels})

        def step() -> float:
            nonlocal state
            state, report = jax.block_until_ready(stepper.update(state, batch))
            return float(report.sums.loss / report.sums.weight)

        return step

    def generate(source: np.ndarray, new_tokens: int, beams: int) -> list[list[int]]:
        outputs = pretrained.generate(
            source.tolist(), max_new_tokens=new_tokens, min_new_tokens=new_tokens, num_beams=beams
        )
        return [[int(token) for token in output.tokens] for output in outputs]

    worker.run(loss, train, generate, ["jax", "flax", "flaxen"])


class Constant:
    """As much of a `flaxen.tasks.task.Task` as a `Stepper` uses: the caller has the batch, and there is no dropout."""

    examples = 8

    @staticmethod
    def loss(model: Any, batch: dict[str, Any], key: Any) -> Any:
        return model.loss(batch["input_ids"], batch["labels"])[1]


def pieces(source: Any) -> int:
    return PIECES if len(source) % PIECES == 0 else 1


if __name__ == "__main__":
    main()
