"""T5 of transformers 4.57.6 on Flax, f32, as fast as it gets: loss, training step and generation are jitted.

`prepare` converts the torch checkpoint to Flax; the conversion of transformers would need torch.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from measure import Worker
from workloads import LEARNING_RATE


def main() -> None:
    worker = Worker(__doc__)
    # `run` needs optax; import it here so that a cold start counts it as import time.
    import optax  # noqa: F401
    import transformers

    model_class = getattr(transformers, f"Flax{worker.sizes.family}ForConditionalGeneration")
    flax_dir = worker.model_dir / "flax"
    if worker.workload == "prepare":
        config = model_class.config_class.from_pretrained(worker.model_dir)
        model = model_class(config, _do_init=False)
        model.save_pretrained(flax_dir, params=torch_parameters(worker.model_dir / "model.safetensors"))
        return

    worker.mark("import")
    model, params = model_class.from_pretrained(flax_dir, _do_init=False)
    worker.mark("load")
    run(worker, model, params)


def run(worker: Worker, model: Any, params: Any) -> None:
    """Run the workload of an encoder-decoder."""
    import jax
    import numpy as np
    import optax
    from transformers.models.t5.modeling_flax_t5 import shift_tokens_right

    config = model.config

    @jax.jit
    @jax.value_and_grad
    def value_and_grad(params: Any, source: jax.Array, labels: jax.Array) -> jax.Array:
        decoder_inputs = shift_tokens_right(labels, config.pad_token_id, config.decoder_start_token_id)
        logits = model(source, decoder_input_ids=decoder_inputs, params=params, train=False).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def loss(source: np.ndarray, labels: np.ndarray) -> tuple[float, list[np.ndarray]]:
        value, gradients = jax.block_until_ready(value_and_grad(params, source, labels))
        return float(value), [np.asarray(gradient) for gradient in jax.tree.leaves(gradients)]

    def train(source: np.ndarray, labels: np.ndarray) -> Callable[[], float]:
        nonlocal params
        optimizer = optax.adamw(LEARNING_RATE, weight_decay=0.0)

        @partial(jax.jit, donate_argnums=(0, 1))
        def update(params: Any, memory: Any, source: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
            decoder_inputs = shift_tokens_right(labels, config.pad_token_id, config.decoder_start_token_id)

            def mean_loss(params: Any) -> jax.Array:
                logits = model(source, decoder_input_ids=decoder_inputs, params=params, train=False).logits
                # One-hot labels: the loss of transformers' run_t5_mlm_flax.py and run_image_captioning_flax.py.
                return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1])).mean()

            value, gradients = jax.value_and_grad(mean_loss)(params)
            changes, memory = optimizer.update(gradients, memory, params)
            return optax.apply_updates(params, changes), memory, value

        # Commit the optimizer state to a device, like the loaded weights. Otherwise `update` would compile a second
        # time for its own outputs.
        init = jax.jit(optimizer.init, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
        state, params = (
            (params, init(params)),
            None,
        )  # drop the other reference to the initial weights, which are donated

        def step() -> float:
            nonlocal state
            *state, value = jax.block_until_ready(update(*state, source, labels))
            return float(value)

        return step

    def search(params: Any, source: jax.Array, new_tokens: int, beams: int) -> jax.Array:
        # Flax has no min_new_tokens; its lengths count the start token.
        length = new_tokens + 1
        return model.generate(
            source, params=params, max_length=length, min_length=length, num_beams=beams, do_sample=False
        ).sequences

    jitted_search = jax.jit(search, static_argnums=(2, 3))

    def generate(source: np.ndarray, new_tokens: int, beams: int) -> list[list[int]]:
        return np.asarray(jitted_search(params, source, new_tokens, beams))[:, 1:].tolist()

    worker.run(loss, train, generate, ["jax", "flax", "transformers"])


def torch_parameters(file: Path) -> dict[str, Any]:
    """Convert the parameters of a torch T5 or LongT5 to the nested form of Flax."""
    from flax.traverse_util import unflatten_dict
    from safetensors.numpy import load_file

    flat = {}
    for name, tensor in load_file(file).items():
        *path, leaf = name.split(".")
        if path[-1] == "shared" or path[-1].endswith("relative_attention_bias"):
            leaf = "embedding"
        elif "layer_norm" not in path[-1]:  # a Linear, which torch stores as [out, in]
            leaf, tensor = "kernel", tensor.T
        flat[(*path, leaf)] = tensor
    return unflatten_dict(flat)


if __name__ == "__main__":
    main()
