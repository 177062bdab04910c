"""T5 of transformers v5 on torch, f32. `prepare` creates the random model that all systems load."""

from collections.abc import Callable
from typing import Any

from measure import Worker
from workloads import LEARNING_RATE


def main() -> None:
    worker = Worker(__doc__)
    import torch
    import transformers

    sizes = worker.sizes
    model_class = getattr(transformers, f"{sizes.family}ForConditionalGeneration")
    torch.set_num_threads(worker.threads)
    if worker.workload == "prepare":
        torch.manual_seed(0)
        long = {"local_radius": sizes.radius, "global_block_size": sizes.global_block}
        long |= {"encoder_attention_type": sizes.attention}
        model = model_class(
            getattr(transformers, f"{sizes.family}Config")(
                vocab_size=sizes.vocab_size,
                d_model=sizes.d_model,
                d_kv=sizes.d_head,
                d_ff=sizes.d_ff,
                num_layers=sizes.n_layers,
                num_heads=sizes.n_heads,
                decoder_start_token_id=0,
                **(long if sizes.family == "LongT5" else {}),
            )
        )
        # With T5's initial embeddings, a random model with a tied head repeats its start token forever. With small ones
        # the output depends on the layers, and a gain after them keeps the logits near 1. Only then is it meaningful
        # that systems generate equal tokens and losses.
        model.shared.weight.data *= 0.05
        model.decoder.final_layer_norm.weight.data *= 20
        model.save_pretrained(worker.model_dir)
        return

    worker.mark("import")
    model = model_class.from_pretrained(worker.model_dir, dtype=torch.float32, dropout_rate=0.0).eval()
    worker.mark("load")
    run(worker, model, "input_ids")


def run(worker: Worker, model: Any, named: str) -> None:
    """Run the workload of an encoder-decoder; `named` is the keyword of its inputs."""
    import numpy as np
    import torch

    def tensor(array: np.ndarray) -> torch.Tensor:
        result = torch.from_numpy(array)
        return result if result.is_floating_point() else result.long()

    def loss(source: np.ndarray, labels: np.ndarray) -> tuple[float, list[np.ndarray]]:
        model.zero_grad(set_to_none=True)
        value = model(**{named: tensor(source)}, labels=tensor(labels), use_cache=False).loss
        value.backward()
        gradients = [parameter.grad for parameter in model.parameters()]  # a ViT's pooler has none
        return value.item(), [gradient.numpy() for gradient in gradients if gradient is not None]

    def train(source: np.ndarray, labels: np.ndarray) -> Callable[[], float]:
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        batch = {named: tensor(source), "labels": tensor(labels)}

        def step() -> float:
            optimizer.zero_grad(set_to_none=True)
            value = model(**batch, use_cache=False).loss
            value.backward()
            optimizer.step()
            return value.item()

        return step

    def generate(source: np.ndarray, new_tokens: int, beams: int) -> list[list[int]]:
        with torch.inference_mode():
            sequences = model.generate(
                tensor(source),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                num_beams=beams,
                do_sample=False,
            )
        return sequences[:, 1:].tolist()  # without the start token

    worker.run(loss, train, generate, ["torch", "transformers"])


if __name__ == "__main__":
    main()
