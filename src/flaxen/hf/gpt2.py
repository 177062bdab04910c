"""Hugging Face format of GPT-2: config fields and weight names, for reading and writing."""

import dataclasses
from typing import Any

from flaxen.hf.fields import ids, make_config, one_or_list, read
from flaxen.hf.format import Format
from flaxen.hf.tensors import Tensors
from flaxen.hf.weightmap import Row, equal_tensors
from flaxen.models.gpt2 import Config

# Name in config.json -> name in our Config.
FIELDS = {
    "vocab_size": "vocab_size",
    "n_positions": "n_positions",
    "n_embd": "d_model",
    "n_inner": "d_ff",
    "n_layer": "n_layers",
    "n_head": "n_heads",
    "activation_function": "activation",
    "add_cross_attention": "cross",
    "layer_norm_epsilon": "epsilon",
    "scale_attn_weights": "scaled",
    "scale_attn_by_inverse_layer_idx": "inverse_layer",
    "resid_pdrop": "dropout",
    "embd_pdrop": "embedding_dropout",
    "attn_pdrop": "attention_dropout",
    "initializer_range": "std",
}
# Fields that do not affect the computation. reorder_and_upcast_attn requests float32 scores, which we always compute.
SILENT = {
    "reorder_and_upcast_attn", "n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "is_decoder", "pad_token_id", "decoder_start_token_id", "n_special",
    "predict_special_tokens",
}  # fmt: skip
FIXED: dict[str, tuple[Any, ...]] = {"cross_attention_hidden_size": (None,), "is_encoder_decoder": (False,)}
SPECIAL = ("pad_token_id", "decoder_start_token_id", "bos_token_id", "eos_token_id")


def read_config(json: dict[str, Any], tensors: Tensors | None, at: str = "", what: str = "config.json") -> Config:
    """Convert config.json to our Config; `at` is the prefix of the tensor names."""
    fields = read(json, FIELDS, Config, SILENT, FIXED, what)
    fields.setdefault("d_ff", 4 * fields.get("d_model", Config.d_model))
    eos = ids(json.get("eos_token_id", 50256))
    start = json.get("decoder_start_token_id")
    start = json.get("bos_token_id", 50256) if start is None else start
    pad = json.get("pad_token_id")
    fields["eos_ids"] = eos
    fields["start_id"] = next((token for token in (start, *eos) if token is not None), 0)
    fields["pad_id"] = pad if pad is not None else eos[0] if eos else fields["start_id"]
    # The weights decide whether the head is tied, if they are available.
    if tensors is not None:
        head, table = f"{at}lm_head.weight", f"{at}{prefix(tensors, at)}wte.weight"
        fields["tied"] = head not in tensors or equal_tensors(tensors, head, table)
    elif json.get("tie_word_embeddings") is not None:
        fields["tied"] = bool(json["tie_word_embeddings"])
    return make_config(Config, fields, what)


def prefix(tensors: Tensors | None, at: str = "") -> str:
    """Return the name prefix of the body: 'transformer.', or none for a bare GPT2Model, such as the hub id `gpt2`."""
    return "" if tensors is not None and f"{at}wte.weight" in tensors else "transformer."


def special_ids(config: Config) -> dict[str, Any]:
    """Return the special token ids under their names in config.json."""
    return dict(zip(SPECIAL, (config.pad_id, None, config.start_id, one_or_list(config.eos_ids))))


def write_config(config: Config, dtype: str) -> dict[str, Any]:
    """Convert our Config to a config.json."""
    fields = dataclasses.asdict(config)
    return {
        **{theirs: fields[ours] for theirs, ours in FIELDS.items()},
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_ctx": config.n_positions,
        "is_decoder": config.cross,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": config.tied,
        **{name: value for name, value in special_ids(config).items() if value is not None},
        "torch_dtype": dtype,
    }


def rows(config: Config, tensors: Tensors | None = None, at: str = "", ours: str = "") -> list[Row]:
    """Map every leaf of a GPT-2 to its tensor; `at` prefixes the names in the file, `ours` those of the leaves."""
    body = f"{at}{prefix(tensors, at)}"
    layer = f"{body}h.{{i}}"
    table = [
        Row("embedding.weight", f"{body}wte.weight"),
        Row("positions.weight", f"{body}wpe.weight"),
        *([] if config.tied else [Row("head.weight", f"{at}lm_head.weight")]),
    ]
    # GPT-2 stores weights as [inputs, outputs], and q, k and v (axis p) in one matrix.
    joint = "d (p n h) -> d p n h"
    weights = {
        "attention.qkv": ("attn.c_attn", joint),
        "attention.o": ("attn.c_proj", "(n h) d -> n h d"),
        "mlp.wi": ("mlp.c_fc", "d f -> d f"),
        "mlp.wo": ("mlp.c_proj", "f d -> f d"),
    }
    norms = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
    if config.cross:
        weights |= {
            "cross.q": ("crossattention.q_attn", "d (n h) -> d n h"),
            "cross.kv": ("crossattention.c_attn", joint),
            "cross.o": ("crossattention.c_proj", "(n h) d -> n h d"),
        }
        norms["cross_norm"] = "ln_cross_attn"
    for name, (theirs, pattern) in weights.items():
        # A bias has the output axes of its weight: drop d from patterns whose outputs are split into heads.
        split = "-> d" in pattern and "(" in pattern
        bias_pattern = pattern.replace("d (", "(").replace("d p", "p").replace("d n", "n") if split else ""
        table.append(Row(f"layers.{name}.weight", f"{layer}.{theirs}.weight", pattern))
        table.append(Row(f"layers.{name}.bias", f"{layer}.{theirs}.bias", bias_pattern))
    for part in ("weight", "bias"):
        table += [Row(f"layers.{name}.{part}", f"{layer}.{theirs}.{part}") for name, theirs in norms.items()]
        table.append(Row(f"norm.{part}", f"{body}ln_f.{part}"))
    return [dataclasses.replace(row, ours=f"{ours}{row.ours}") for row in table]


def unneeded(name: str, tensors: Tensors, at: str = "") -> bool:
    """Whether a tensor may be ignored: causal masks, and a head that equals the embedding."""
    if name == f"{at}lm_head.weight":
        return equal_tensors(tensors, name, f"{at}{prefix(tensors, at)}wte.weight")
    return name.endswith(("attn.bias", "attn.masked_bias", "crossattention.bias", "crossattention.masked_bias"))


FORMAT = Format(read_config, write_config, rows, unneeded, SPECIAL, special_ids)
