"""Transformer-VQ checkpoints: our own format, since Hugging Face has none, and import from the original code."""

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flaxen.errors import InputError, did_you_mean
from flaxen.hf.fields import ids, make_config, one_or_list, read
from flaxen.hf.format import Format
from flaxen.hf.tensors import InMemory, Tensors
from flaxen.hf.weightmap import Row, load
from flaxen.models.vq_config import Config
from flaxen.models.vq_lm import VQLM
from flaxen.tree import leaves

if TYPE_CHECKING:
    from flaxen.pretrained import Pretrained

MODEL_TYPE = "transformer_vq"
NOT_SAVED = ("pad_id", "eos_ids", "start_id", "form", "compute", "scan", "remat")  # or saved under other names
FIELDS = {field.name: field.name for field in dataclasses.fields(Config) if field.name not in NOT_SAVED}
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")
# Name in the original code -> ours. Its other settings concern training or have no effect.
ORIGINAL = {
    "n_vocab": "vocab_size", "d_model": "d_model", "d_k": "d_k", "d_v": "d_v", "n_head": "n_heads",
    "n_layer": "n_layers", "n_code": "n_codes", "block_len": "block", "mem_len": "window", "agg_cache": "aggregate",
    "grad_thru_cache": "through_cache", "pe_abs": "absolute", "pe_lam": "wavelength", "e_tie": "tied",
    "e_preln": "norm_out", "e_scale": "logit_scale", "p_dropemb": "embedding_dropout", "p_dropsin": "position_drop",
    "p_dropres": "dropout", "p_droplyr": "layer_drop", "dtype": "compute",
}  # fmt: skip
UNIT = {
    "norm.weight": "input_ln/g", "norm.bias": "input_ln/b", "q.weight": "q_proj/kernel",
    "kvg.weight": "kvg_proj/kernel",
    "r.weight": "r_proj/kernel", "o.weight": "res_proj/kernel", "content": "u", "distance": "v",
    "codebook.sum": "quantizer/c_sum", "codebook.count": "quantizer/c_count",
}  # fmt: skip


def read_config(json: dict[str, Any], tensors: Tensors | None, what: str = "config.json") -> Config:
    """Convert config.json to our Config."""
    fields = read({**json, "image": tuple(json.get("image", ()))}, FIELDS, Config, SPECIAL, what=what)
    special = {"pad_id": json.get("pad_token_id", 0), "start_id": json.get("bos_token_id", 1)}
    return make_config(Config, {**fields, **special, "eos_ids": ids(json.get("eos_token_id", 1))}, what)


def special_ids(config: Config) -> dict[str, Any]:
    """Return the special token ids under their names in config.json."""
    return dict(zip(SPECIAL, (config.pad_id, config.start_id, one_or_list(config.eos_ids))))


def write_config(config: Config, dtype: str) -> dict[str, Any]:
    """Convert our Config to a config.json."""
    fields = dataclasses.asdict(config)
    own = {name: fields[name] for name in FIELDS}
    return {"model_type": MODEL_TYPE, "architectures": ["VQLM"], **own, **special_ids(config), "torch_dtype": dtype}


def rows(config: Config, tensors: Tensors | None = None) -> list[Row]:
    """Return the weight table: every leaf is stored under its own path, with one tensor per layer."""
    return [Row(path, path.replace("layers.", "layers.{i}.")) for path in leaves(VQLM(config))]


def unneeded(name: str, tensors: Tensors) -> bool:
    """Whether a tensor may be ignored when loading: none may."""
    return False


def original_rows(config: Config) -> list[Row]:
    """Return the weight table that maps our leaves to the parameters of the original code."""
    table = [
        Row("embedding.weight", "token_embedder/embs"),
        Row("scale", "position_embedder/scale"),
        Row("norm.weight", "out_ln/g"),
        Row("norm.bias", "out_ln/b"),
        Row("head.weight", "out_proj/kernel", "d v -> v d"),
        Row("bias", "token_embedder/bias_out" if config.tied else "out_proj/bias"),
    ]
    for half, theirs in (("first", "scanned_attn1"), ("second", "scanned_attn2")):
        table += [Row(f"layers.{half}.{a}", f"transformer_layers_{{i}}/{theirs}/{b}") for a, b in UNIT.items()]
    return table


def original_config(settings: dict[str, Any]) -> Config:
    """Convert the settings of the original code to our Config.

    All settings that affect results are required: if a misspelt name fell back to a default, the model would silently
    compute something else.
    """
    missing = [name for name in ORIGINAL if name not in settings and not name.startswith("p_") and name != "dtype"]
    if missing:
        close = "".join(did_you_mean(name, settings) for name in missing)
        raise InputError(f"missing settings of the original model: {', '.join(missing)}{close}")
    kinds: dict[str, Any] = {field.name: type(field.default) for field in dataclasses.fields(Config)}
    kinds |= {name: partial(_parse_switch, name) for name, kind in kinds.items() if kind is bool}
    fields = {ours: kinds[ours](settings[theirs]) for theirs, ours in ORIGINAL.items() if theirs in settings}
    return make_config(Config, {**fields, "reference": True}, "the original's settings")


def _parse_switch(name: str, value: Any) -> bool:
    if str(value) not in ("0", "1", "False", "True"):
        raise InputError(f"the original's setting for {name} must be 0 or 1, got {value!r}")
    return str(value) in ("1", "True")


def _unused(name: str, tensors: Tensors) -> bool:
    """Whether a parameter may be ignored: the original code creates token_embedder/bias_out even if it is not used."""
    return name == "token_embedder/bias_out"


def load_original(flat: dict[str, np.ndarray], config: dict[str, Any]) -> "Pretrained":
    """Load a model from the original code's settings and parameters, which are named by their paths joined with '/'.

    A model with a vocabulary of 259 gets the byte tokenizer.
    """
    from flaxen.pretrained import Pretrained  # imported here because flaxen.pretrained imports this module

    ours = original_config(config)
    return Pretrained.over_bytes(load(VQLM(ours), original_rows(ours), InMemory(flat), np.float32, _unused))


FORMAT = Format(read_config, write_config, rows, unneeded, SPECIAL, special_ids)
