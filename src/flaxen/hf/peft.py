"""Read and write LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from flaxen.atomic_directory import atomic_directory
from flaxen.errors import InputError, did_you_mean
from flaxen.hf import files
from flaxen.hf.safetensors_files import Safetensors
from flaxen.hf.weightmap import Row
from flaxen.nn.layers import Linear

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# PEFT uses module names in memory, which transformers 5 changed for ViT, while checkpoint files kept the old names.
# Suffix in checkpoint files (and in memory, in transformers 4) -> suffix in memory in transformers 5.
IN_MEMORY = (
    ("encoder.layer.{i}.attention.attention.query", "layers.{i}.attention.q_proj"),
    ("encoder.layer.{i}.attention.attention.key", "layers.{i}.attention.k_proj"),
    ("encoder.layer.{i}.attention.attention.value", "layers.{i}.attention.v_proj"),
    ("encoder.layer.{i}.attention.output.dense", "layers.{i}.attention.o_proj"),
    ("encoder.layer.{i}.intermediate.dense", "layers.{i}.mlp.fc1"),
    ("encoder.layer.{i}.output.dense", "layers.{i}.mlp.fc2"),
)
# Fields that would change the computation of an adapter: only these values are supported.
FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "alpha_pattern": ({}, None),
    "trainable_token_indices": (None,),
    "lora_bias": (False, None),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None,),
    # Other initialisations (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) also modify the base weights.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
    "layer_replication": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}


def modules(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """Map the path of each Linear to its module names in PEFT's files: with transformers 5 and with transformers 4."""
    names = {}
    for row in rows:
        path, _, leaf = row.ours.rpartition(".")
        if leaf != "weight" or path.endswith(("norm", "embedding", "positions", "head", "bias")):
            continue
        theirs = row.theirs.removesuffix(".weight")
        new = theirs
        for old, now in IN_MEMORY:
            if theirs.endswith(old) and "pooler" not in theirs:
                new = theirs.removesuffix(old) + now
                break
        names[path] = (new, theirs)
    return names


def write(
    adapter: dict[str, dict[str, Array]],
    rows: Sequence[Row],
    task_type: str | None,
    rank: int,
    alpha: float,
    directory: Path,
    base: str | None,
    overwrite: bool = False,
) -> None:
    """Write an adapter in PEFT's format, atomically; `rows` is the weight table of the model it belongs to."""
    from safetensors.numpy import save_file

    names, tensors, targets = modules(rows), {}, []
    if not adapter:
        raise InputError("the adapter is empty, which PEFT's format does not allow")
    for path, factors in adapter.items():
        if path not in names:
            raise InputError(f"the adapter targets {path!r}, which the model does not have{did_you_mean(path, names)}")
        for module, down, up in _split_layers(names[path][0], factors):
            if (down.shape[-1], len(up)) != (rank, rank):
                raise InputError(f"the factors of {path} have ranks {down.shape[-1]} and {len(up)}, expected {rank}")
            targets.append(module)
            # PEFT stores A as [rank, inputs] and B as [outputs, rank]; ours are [inputs, rank] and [rank, outputs].
            a, b = np.moveaxis(down, -1, 0), np.moveaxis(up, 0, -1)
            if _is_convolution(path):
                b = b[..., None, None]
            else:
                a, b = a.reshape(rank, -1), b.reshape(-1, rank)
            tensors[f"{PREFIX}{module}.lora_A.weight"] = np.ascontiguousarray(a)
            tensors[f"{PREFIX}{module}.lora_B.weight"] = np.ascontiguousarray(b)
    config = {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        # GPT-2's Conv1D weights are stored as [inputs, outputs].
        "fan_in_fan_out": all(row.keeps_order for row in rows if row.ours.removesuffix(".weight") in adapter),
        "bias": "none",
        "inference_mode": True,
    }
    with atomic_directory(directory, overwrite) as fresh:
        files.write_json(fresh / CONFIG, config)
        save_file(tensors, fresh / WEIGHTS, metadata={"format": "pt"})


def _is_convolution(path: str) -> bool:
    """Whether PEFT stores both factors as convolutions: the patch embedding of a ViT is a Conv2d in PyTorch."""
    return path.endswith("patches")


def _split_layers(name: str, factors: dict[str, Array]) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Split the factors of stacked layers; return (module name, down, up) of each layer."""
    down, up = np.asarray(factors["down"], np.float32), np.asarray(factors["up"], np.float32)
    if "{i}" not in name:
        return [(name, down, up)]
    return [(name.format(i=i), down[i], up[i]) for i in range(len(down))]


def read(directory: Path, rows: Sequence[Row], linears: dict[str, Linear]) -> dict[str, dict[str, Array]]:
    """Read an adapter, with its scale folded into `up`, for a model with this weight table and these linear layers.

    Layers that the adapter does not target are filled with zeros if other layers of the same stack are targeted.
    """
    config = files.read_json(directory / CONFIG)
    for name, allowed in FIXED.items():
        if name in config and config[name] not in allowed:
            raise InputError(f"{directory}: {name}={config[name]!r} is not supported; only {allowed[0]!r} is")
    # 8 is PEFT's default.
    alpha = config.get("lora_alpha", 8)
    if not isinstance(alpha, int | float):
        raise InputError(f"{directory}: lora_alpha must be a number, got {alpha!r}")
    tensors = Safetensors(directory, WEIGHTS)
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for key in tensors:
        # In a state dict that was saved directly, names include that of the adapter, "default".
        match = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.default)?\.weight", key)
        if not match or len(tensors.shape(key)) < 2:
            got = f"unexpected tensor {key!r} of shape {tensors.shape(key)}"
            raise InputError(f"{directory}: {got}; expected matrices whose names end in lora_A.weight or lora_B.weight")
        pairs.setdefault(match[1], {})[match[2]] = np.asarray(tensors[key], np.float32)
    if not pairs:
        raise InputError(f"{directory / WEIGHTS} contains no tensors; download or save it again")
    adapter = {}
    for path, names in modules(rows).items():
        if path not in linears:
            continue
        node = linears[path]
        stacked = "{i}" in names[0]
        n, shape = (node.weight.shape[0], node.weight.shape[1:]) if stacked else (1, node.weight.shape)
        inputs, outputs = shape[: node.n_inputs], shape[node.n_inputs :]
        layers = [_pop_layer(pairs, names, i) for i in range(n)]
        if not any(layers):
            continue
        # Ranks may differ by layer (rank_pattern): pad all to the largest with zeros.
        rank = max(len(layer["A"]) for layer in layers if layer)
        down, up = np.zeros((n, math.prod(inputs), rank)), np.zeros((n, rank, math.prod(outputs)))
        for i, layer in enumerate(layers):
            if not layer:
                continue
            r = len(layer["A"])
            flat = ((r, math.prod(inputs)), (math.prod(outputs), r))
            expected = ((r, *inputs), (*outputs, r, 1, 1)) if _is_convolution(path) else flat
            if (layer["A"].shape, layer["B"].shape) != expected:
                got = f"{layer['A'].shape} and {layer['B'].shape}"
                raise InputError(f"{directory}: lora_A and lora_B of {path} have shapes {got}, expected {expected}")
            # Rank-stabilised LoRA divides by the square root of the rank.
            divisor = math.sqrt(r) if config.get("use_rslora") else r
            down[i, :, :r] = layer["A"].reshape(r, -1).T
            up[i, :r] = layer["B"].reshape(-1, r).T * (alpha / divisor)
        lead = (n,) if stacked else ()
        adapter[path] = {
            "down": jnp.asarray(down.reshape(*lead, *inputs, rank), jnp.float32),
            "up": jnp.asarray(up.reshape(*lead, rank, *outputs), jnp.float32),
        }
    # Modules that the model has were removed above.
    if pairs:
        more = f" and {len(pairs) - 3} more" if len(pairs) > 3 else ""
        raise InputError(
            f"{directory} targets modules that this model does not have: {', '.join(list(pairs)[:3])}{more}"
        )
    return adapter


def _pop_layer(pairs: dict[str, dict[str, np.ndarray]], names: tuple[str, str], i: int) -> dict[str, np.ndarray]:
    """Remove and return the factors A and B of layer i under any of its names; empty if the adapter has none."""
    for name in names:
        # An adapter of a bare GPT2Model or ViTModel has no prefix.
        for module in (name.format(i=i), name.format(i=i).removeprefix("transformer.")):
            if module in pairs:
                factors = pairs.pop(module)
                if factors.keys() != {"A", "B"}:
                    raise InputError(
                        f"the adapter has only lora_{next(iter(factors))} of {module}, expected lora_A and lora_B"
                    )
                return factors
    return {}
