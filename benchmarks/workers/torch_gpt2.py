"""Measure a torch GPT-2 as large as the preset vq-mini: training, forward, and greedy decoding after a long context."""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any


def timed(step: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Return the fastest of `repeats` calls, after an untimed one."""
    times = []
    for _ in range(repeats + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        times.append((time.process_time() - cpu, time.perf_counter() - wall))
    return {"cpu": min(t[0] for t in times[1:]), "wall": min(t[1] for t in times[1:]), "compile_cpu": 0.0}


def main(request: dict[str, Any]) -> dict[str, Any]:
    if request["cores"]:
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: request["cores"]]))
    import torch
    import transformers

    torch.set_num_threads(request["cores"] or os.cpu_count() or 1)
    torch.manual_seed(0)
    length, new = request["length"], 32
    config = transformers.GPT2Config(
        vocab_size=259, n_positions=length + new + 1, n_embd=256, n_layer=5, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(3, 259, (1, length + 1))
    if request["kind"] == "train":
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            model(ids[:, :-1], labels=ids[:, :-1]).loss.backward()
            optimizer.step()

        figures, tokens = timed(step, request["repeats"]), length
    elif request["kind"] == "forward":
        with torch.inference_mode():
            figures, tokens = timed(lambda: model(ids[:, :-1], labels=ids[:, :-1]).loss, request["repeats"]), length
    else:
        with torch.inference_mode():
            past = model(ids[:, :-1], use_cache=True).past_key_values

            def decode() -> None:
                nonlocal past
                token = ids[:, -1:]
                for _ in range(new):
                    out = model(token, past_key_values=past, use_cache=True)
                    past, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
                past.crop(-new)

            figures, tokens = timed(decode, request["repeats"]), new
        figures["milliseconds"] = 1e3 * figures["wall"] / tokens
    figures["tokens_per_second"] = tokens / figures["wall"]
    figures["tokens_per_cpu_second"] = tokens / figures["cpu"]
    figures["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return figures


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
