"""Flaxen. bf16 is: to generate, bf16 weights; for the loss, f32 weights and bf16 compute, as in training."""

from typing import Any

from measure import Worker


def main() -> None:
    worker = Worker(__doc__, precisions=("f32", "bf16"))
    import jax
    import numpy as np

    from flaxen import load  # the name itself: `import flaxen` alone imports nothing
    from flaxen.train import accumulate

    worker.mark("import")
    options = {}
    if worker.precision == "bf16":
        options = {"compute" if worker.workload == "loss" else "dtype": "bfloat16"}
    pretrained = load(worker.model_dir, **options)
    worker.mark("load")

    @jax.jit
    def value_and_grad(model: Any, source: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        # In four pieces where the batch allows it: the same numbers, and the activations of two rows instead of eight.
        pieces = 4 if len(source) % 4 == 0 else 1
        of_piece = lambda model, piece, key: model.loss(*piece)[1]  # noqa: E731
        value, _, gradients = accumulate.value_and_grad(of_piece, model, (source, labels), pieces)
        return value, gradients

    def loss(source: np.ndarray, labels: np.ndarray) -> tuple[float, list[np.ndarray]]:
        value, gradients = jax.block_until_ready(value_and_grad(pretrained.model, source, labels))
        return float(value), [np.asarray(gradient) for gradient in jax.tree.leaves(gradients)]

    def generate(source: np.ndarray, new_tokens: int, beams: int) -> list[list[int]]:
        outputs = pretrained.generate(
            source.tolist(), max_new_tokens=new_tokens, min_new_tokens=new_tokens, num_beams=beams
        )
        return [[int(token) for token in output.tokens] for output in outputs]

    worker.run(loss, generate, ["jax", "flax", "flaxen"])


if __name__ == "__main__":
    main()
