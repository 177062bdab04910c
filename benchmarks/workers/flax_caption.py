"""ViT + GPT-2 of transformers 4.57.6 on Flax, f32, one jitted function per workload.

`prepare` converts the torch checkpoint to Flax; the conversion of transformers would need torch.
"""

import shutil
from pathlib import Path
from typing import Any

from flax_t5 import run
from measure import Worker
from workloads import caption_sizes_and_works


def main() -> None:
    worker = Worker(__doc__, works=caption_sizes_and_works)
    flax_dir = worker.model_dir / "flax"
    if worker.workload == "prepare":
        from flax.serialization import to_bytes

        flax_dir.mkdir()
        (flax_dir / "flax_model.msgpack").write_bytes(
            to_bytes(torch_parameters(worker.model_dir / "model.safetensors"))
        )
        for name in ("config.json", "generation_config.json"):
            shutil.copy(worker.model_dir / name, flax_dir / name)
        return

    import jax
    from transformers import FlaxVisionEncoderDecoderModel

    # from_pretrained always creates random weights first. Unlike those of a T5, the loaded weights are not committed to
    # a device, and the second training step, which is timed, would compile again: put them on the device.
    model = FlaxVisionEncoderDecoderModel.from_pretrained(flax_dir)
    model.params = jax.device_put(model.params, jax.devices()[0])
    run(worker, model, model.params)


def torch_parameters(file: Path) -> dict[str, Any]:
    """Convert the parameters of a torch VisionEncoderDecoderModel to the nested form of Flax."""
    from flax.traverse_util import unflatten_dict
    from safetensors.numpy import load_file

    flat = {}
    for name, tensor in load_file(file).items():
        *path, leaf = name.split(".")
        if path[-1] in ("wte", "wpe"):
            leaf = "embedding"
        elif leaf == "weight" and tensor.ndim == 1:
            leaf = "scale"
        elif leaf == "weight":
            # Conv1D is [in, out] in torch and [out, in] in Flax, a Linear the other way round.
            leaf, tensor = "kernel", tensor.transpose(2, 3, 1, 0) if tensor.ndim == 4 else tensor.T
        flat[(*path, leaf)] = tensor
    return unflatten_dict(flat)


if __name__ == "__main__":
    main()
