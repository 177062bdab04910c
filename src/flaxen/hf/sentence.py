"""Directories of sentence-transformers: what is done to hidden states after the encoder, both directions.

modules.json lists a Transformer, a Pooling, and perhaps Dense layers and a Normalize, each with its folder.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flaxen.errors import InputError, did_you_mean
from flaxen.hf import files
from flaxen.hf.safetensors_files import Safetensors, write_tensors

# Their name of a pooling -> ours.
POOLINGS = {"mean": "mean", "cls": "first", "max": "max"}
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # how older directories spell it
ACTIVATIONS = {"Identity": "torch.nn.modules.linear.Identity", "Tanh": "torch.nn.modules.activation.Tanh",
               "ReLU": "torch.nn.modules.activation.ReLU"}  # fmt: skip
HOME = "sentence_transformers.models"  # where every version finds its modules


@dataclass(frozen=True)
class Dense:
    """A linear layer over the pooled vector, and its activation."""

    weight: np.ndarray  # [out, in]
    bias: np.ndarray | None
    activation: str  # of ACTIVATIONS


@dataclass(frozen=True)
class Modules:
    """How a checkpoint makes an embedding of hidden states. The defaults are for one that says nothing."""

    pooling: str = "mean"
    dense: tuple[Dense, ...] = ()
    normalise: bool = False
    length: int | None = None  # texts are cut to so many tokens
    prefix: str = ""  # put before every text


def transformer(directory: Path) -> Path:
    """The folder of the encoder: the directory itself, unless its modules.json names another."""
    listed = _listed(directory)
    return directory / listed[0][1] if listed and listed[0][0] == "Transformer" else directory


def read(directory: Path) -> Modules | None:
    """What modules.json says; None if there is none."""
    listed = _listed(directory)
    if not listed:
        return None
    kinds = [kind for kind, _ in listed]
    known = ("Transformer", "Pooling", "Dense", "Normalize")
    where = directory / "modules.json"
    for kind in kinds:
        if kind not in known:
            raise InputError(f"{where}: module {kind!r} is not supported; supported: {', '.join(known)}")
    n = len(kinds) - 2 - (kinds[-1] == "Normalize")
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2 : 2 + n] != ["Dense"] * n:
        order = "Transformer, Pooling, Dense (any number), Normalize (optional)"
        raise InputError(f"{where}: expected the modules {order}; got {', '.join(kinds)}")
    (_, first), (_, pooling), *others = [(kind, directory / path) for kind, path in listed]
    length, prefix = _limits(directory, first), _prefix(directory)
    return Modules(
        _pooling(pooling, bool(prefix)),
        tuple(_dense(path) for kind, path in others if kind == "Dense"),
        kinds[-1] == "Normalize",
        length,
        prefix,
    )


def write(modules: Modules, width: int, directory: Path) -> None:
    """modules.json and the folders that it names, beside a checkpoint of `width` features."""
    listed = [("Transformer", ""), ("Pooling", "1_Pooling")]
    theirs = {ours: theirs for theirs, ours in POOLINGS.items()}[modules.pooling]
    flags: dict[str, Any] = {flag: mode == theirs for flag, mode in FLAGS.items()}
    (directory / "1_Pooling").mkdir()
    files.write_json(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **flags})
    for one in modules.dense:
        folder = f"{len(listed)}_Dense"
        listed.append(("Dense", folder))
        (directory / folder).mkdir()
        sizes = {"in_features": one.weight.shape[1], "out_features": one.weight.shape[0]}
        rest = {"bias": one.bias is not None, "activation_function": ACTIVATIONS[one.activation]}
        files.write_json(directory / folder / "config.json", sizes | rest)
        tensors = {"linear.weight": one.weight} | ({} if one.bias is None else {"linear.bias": one.bias})
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


def _listed(directory: Path) -> list[tuple[str, str]]:
    """(class, folder) of each module."""
    path = directory / "modules.json"
    if not path.is_file():
        return []
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return [(one["type"].rpartition(".")[2], one["path"]) for one in sorted(value, key=lambda one: one["idx"])]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{path} must hold a list of objects with idx, path and type") from None


def _optional(path: Path) -> dict[str, Any]:
    return files.read_json(path) if path.is_file() else {}


def _limits(directory: Path, first: Path) -> int | None:
    """How many tokens a text may have."""
    name = "sentence_bert_config.json"
    says = _optional(first / name) or _optional(directory / name)
    if says.get("do_lower_case"):
        raise InputError(f"{directory}: {name} says do_lower_case, which is not supported; lowercase the texts first")
    return says.get("max_seq_length")


def _prefix(directory: Path) -> str:
    says = _optional(directory / "config_sentence_transformers.json")
    name = says.get("default_prompt_name")
    return "" if name is None else (says.get("prompts") or {}).get(name) or ""


def _pooling(folder: Path, prefixed: bool) -> str:
    says, path = files.read_json(folder / "config.json"), folder / "config.json"
    modes = says.get("pooling_mode") or [mode for flag, mode in FLAGS.items() if says.get(flag)] or "mean"
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise InputError(
            f"{path}: pooling {' + '.join(modes)} is not supported; supported: one of {', '.join(POOLINGS)}"
        )
    if prefixed and says.get("include_prompt") is False:
        raise InputError(f"{path}: include_prompt=False is not supported with a default prompt")
    return POOLINGS[modes[0]]


def _dense(folder: Path) -> Dense:
    path = folder / "config.json"
    says = files.read_json(path)
    name = says.get("activation_function", ACTIVATIONS["Tanh"]).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise InputError(f"{path}: activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    fixed = {
        "module_input_name": "sentence_embedding",
        "module_output_name": "sentence_embedding",
        "use_residual": False,
    }
    for field, value in says.items():
        if field in fixed and value not in (fixed[field], None):
            raise InputError(f"{path}: {field}={value!r} is not supported; only {fixed[field]!r} is")
        if field not in fixed and field not in (own := ("in_features", "out_features", "bias", "activation_function")):
            raise InputError(f"{path}: unknown field {field}={value!r}{did_you_mean(field, own)}")
    tensors = Safetensors(folder)
    wanted: dict[str, tuple[int, ...]] = {"linear.weight": (says["out_features"], says["in_features"])}
    wanted |= {"linear.bias": (says["out_features"],)} if says.get("bias", True) else {}
    found = {one: tensors.shape(one) for one in tensors}
    if found != wanted:
        raise InputError(f"{folder}: expected the tensors {wanted}, got {found}")
    arrays = {one: np.asarray(tensors[one], np.float32) for one in wanted}
    return Dense(arrays["linear.weight"], arrays.get("linear.bias"), name)
