"""Read and write sentence-transformers directories: how hidden states of an encoder become an embedding.

modules.json lists the modules in order, each with its folder: Transformer, Pooling, any Dense layers, and optionally
Normalize.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flaxen.errors import InputError, did_you_mean
from flaxen.hf import files
from flaxen.hf.safetensors_files import Safetensors, write_tensors

# Pooling mode in sentence-transformers -> our name.
POOLINGS = {"mean": "mean", "cls": "first", "max": "max"}
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # older directories have one boolean flag per mode
ACTIVATIONS = {"Identity": "torch.nn.modules.linear.Identity", "Tanh": "torch.nn.modules.activation.Tanh",
               "ReLU": "torch.nn.modules.activation.ReLU"}  # fmt: skip
HOME = "sentence_transformers.models"  # import path of module classes that every version accepts


@dataclass(frozen=True)
class Dense:
    """A linear layer on the pooled vector, with an activation."""

    weight: np.ndarray  # [out, in]
    bias: np.ndarray | None
    activation: str  # key of ACTIVATIONS


@dataclass(frozen=True)
class Modules:
    """How a checkpoint turns hidden states into an embedding. The defaults apply if it has no modules.json."""

    pooling: str = "mean"
    dense: tuple[Dense, ...] = ()
    normalise: bool = False
    length: int | None = None  # maximum number of tokens; longer texts are truncated
    prefix: str = ""  # prepended to every text


def transformer(directory: Path) -> Path:
    """Return the folder of the encoder: the one named in modules.json, or the directory itself."""
    listed = _list_modules(directory)
    return directory / listed[0][1] if listed and listed[0][0] == "Transformer" else directory


def read(directory: Path) -> Modules | None:
    """Read the modules of a sentence-transformers directory; None if it has no modules.json."""
    listed = _list_modules(directory)
    if not listed:
        return None
    kinds = [kind for kind, _ in listed]
    supported = ("Transformer", "Pooling", "Dense", "Normalize")
    where = directory / "modules.json"
    for kind in kinds:
        if kind not in supported:
            raise InputError(f"{where}: module {kind!r} is not supported; supported: {', '.join(supported)}")
    n = len(kinds) - 2 - (kinds[-1] == "Normalize")  # number of Dense layers
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2 : 2 + n] != ["Dense"] * n:
        order = "Transformer, Pooling, Dense (any number), Normalize (optional)"
        raise InputError(f"{where}: expected the modules {order}, got {', '.join(kinds)}")
    (_, first), (_, pooling), *others = [(kind, directory / path) for kind, path in listed]
    length, prefix = _max_length(directory, first), _prefix(directory)
    return Modules(
        _read_pooling(pooling, bool(prefix)),
        tuple(_read_dense(path) for kind, path in others if kind == "Dense"),
        kinds[-1] == "Normalize",
        length,
        prefix,
    )


def write(modules: Modules, width: int, directory: Path) -> None:
    """Write modules.json and the folders that it names next to a checkpoint whose hidden states have size `width`."""
    listed = [("Transformer", ""), ("Pooling", "1_Pooling")]
    theirs = {ours: theirs for theirs, ours in POOLINGS.items()}[modules.pooling]
    flags: dict[str, Any] = {flag: mode == theirs for flag, mode in FLAGS.items()}
    (directory / "1_Pooling").mkdir()
    files.write_json(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **flags})
    for layer in modules.dense:
        folder = f"{len(listed)}_Dense"
        listed.append(("Dense", folder))
        (directory / folder).mkdir()
        sizes = {"in_features": layer.weight.shape[1], "out_features": layer.weight.shape[0]}
        rest = {"bias": layer.bias is not None, "activation_function": ACTIVATIONS[layer.activation]}
        files.write_json(directory / folder / "config.json", sizes | rest)
        tensors = {"linear.weight": layer.weight} | ({} if layer.bias is None else {"linear.bias": layer.bias})
        write_tensors(directory / folder, tensors, 5 * 10**9)
    if modules.normalise:
        listed.append(("Normalize", f"{len(listed)}_Normalize"))
        (directory / listed[-1][1]).mkdir()
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"{HOME}.{kind}"} for i, (kind, path) in enumerate(listed)
    ]
    (directory / "modules.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    limit = {} if modules.length is None else {"max_seq_length": modules.length}
    files.write_json(directory / "sentence_bert_config.json", {**limit, "do_lower_case": False})
    if modules.prefix:
        prompts = {"prompts": {"default": modules.prefix}, "default_prompt_name": "default"}
        files.write_json(directory / "config_sentence_transformers.json", prompts)


def _list_modules(directory: Path) -> list[tuple[str, str]]:
    """Return (class name, folder) of each module in modules.json; empty if there is no such file."""
    path = directory / "modules.json"
    if not path.is_file():
        return []
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        entries = sorted(value, key=lambda entry: entry["idx"])
        # The import path of a module depends on the version of sentence-transformers; its class name does not.
        return [(entry["type"].rpartition(".")[2], entry["path"]) for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{path} must contain a list of objects with idx, path and type") from None


def _read_optional(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file does not exist."""
    return files.read_json(path) if path.is_file() else {}


def _max_length(directory: Path, first: Path) -> int | None:
    """Return the maximum number of tokens of a text; `first` is the folder of the Transformer module."""
    name = "sentence_bert_config.json"
    config = _read_optional(first / name) or _read_optional(directory / name)
    if config.get("do_lower_case"):
        raise InputError(f"{directory}: {name} has do_lower_case, which is not supported; lowercase the texts first")
    return config.get("max_seq_length")


def _prefix(directory: Path) -> str:
    """Return the default prompt, which is prepended to every text."""
    config = _read_optional(directory / "config_sentence_transformers.json")
    name = config.get("default_prompt_name")
    return "" if name is None else (config.get("prompts") or {}).get(name) or ""


def _read_pooling(folder: Path, prefixed: bool) -> str:
    """Read the config.json of a Pooling module and return our name for its mode."""
    config, path = files.read_json(folder / "config.json"), folder / "config.json"
    modes = config.get("pooling_mode") or [mode for flag, mode in FLAGS.items() if config.get(flag)] or "mean"
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise InputError(
            f"{path}: pooling {' + '.join(modes)} is not supported; supported: one of {', '.join(POOLINGS)}"
        )
    if prefixed and config.get("include_prompt") is False:
        raise InputError(f"{path}: include_prompt=False cannot be combined with a default prompt")
    return POOLINGS[modes[0]]


def _read_dense(folder: Path) -> Dense:
    """Read the config.json and weights of a Dense module."""
    path = folder / "config.json"
    config = files.read_json(path)
    # Tanh is the default of sentence-transformers.
    name = config.get("activation_function", ACTIVATIONS["Tanh"]).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise InputError(f"{path}: activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    fixed = {
        "module_input_name": "sentence_embedding",
        "module_output_name": "sentence_embedding",
        "use_residual": False,
    }
    for field, value in config.items():
        if field in fixed and value not in (fixed[field], None):
            raise InputError(f"{path}: {field}={value!r} is not supported; only {fixed[field]!r} is")
        if field not in fixed and field not in (own := ("in_features", "out_features", "bias", "activation_function")):
            raise InputError(f"{path}: unknown field {field}={value!r}{did_you_mean(field, own)}")
    tensors = Safetensors(folder)
    expected: dict[str, tuple[int, ...]] = {"linear.weight": (config["out_features"], config["in_features"])}
    expected |= {"linear.bias": (config["out_features"],)} if config.get("bias", True) else {}
    shapes = {tensor: tensors.shape(tensor) for tensor in tensors}
    if shapes != expected:
        raise InputError(f"{folder}: expected the tensors {expected}, got {shapes}")
    arrays = {tensor: np.asarray(tensors[tensor], np.float32) for tensor in expected}
    return Dense(arrays["linear.weight"], arrays.get("linear.bias"), name)
