"""Hugging Face format of ViT: config fields and weight names, for reading and writing."""

import dataclasses
from typing import Any

from flaxen.hf.fields import make_config, read
from flaxen.hf.format import Format
from flaxen.hf.tensors import Tensors
from flaxen.hf.weightmap import Row
from flaxen.models.vit import Config

# Name in config.json -> name in our Config.
FIELDS = {
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_channels": "n_channels",
    "hidden_act": "activation",
    "qkv_bias": "qkv_bias",
    "layer_norm_eps": "epsilon",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "std",
}
# Fields that do not affect the computation, or that `read_config` reads itself. encoder_stride and use_mask_token
# belong to masked image modelling, whose head we do not have.
SILENT = {
    "encoder_stride", "image_size", "patch_size", "pooler_act", "pooler_output_size", "use_mask_token", "pad_token_id",
    "decoder_start_token_id",
}  # fmt: skip
FIXED: dict[str, tuple[Any, ...]] = {
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
}


def read_config(json: dict[str, Any], tensors: Tensors | None, at: str = "", what: str = "config.json") -> Config:
    """Convert config.json to our Config; `at` is the prefix of the tensor names."""
    fields = read(json, FIELDS, Config, SILENT, FIXED, what)
    for name, default in (("image_size", 224), ("patch_size", 16)):
        value = json.get(name, default)
        fields[name] = tuple(value) if isinstance(value, list) else (value, value)
    if tensors is not None and f"{at}{prefix(tensors, at)}pooler.dense.weight" in tensors:
        fields["pooler"] = json.get("pooler_act", "tanh")
        fields["pooler_size"] = json.get("pooler_output_size")
    return make_config(Config, fields, what)


def prefix(tensors: Tensors | None, at: str = "") -> str:
    """Return the name prefix of the ViT: 'vit.' in the file of a classifier, otherwise none."""
    return "vit." if tensors is not None and f"{at}vit.embeddings.cls_token" in tensors else ""


def write_config(config: Config, dtype: str) -> dict[str, Any]:
    """Convert our Config to a config.json; square sizes become one number."""
    fields = dataclasses.asdict(config)
    sizes = {name: fields[name][0] if len(set(fields[name])) == 1 else list(fields[name]) for name in SIZES}
    pooler = {"pooler_act": config.pooler, "pooler_output_size": config.pooler_size}
    return {
        **{theirs: fields[ours] for theirs, ours in FIELDS.items()},
        **sizes,
        **{name: value for name, value in pooler.items() if value is not None},
        "architectures": ["ViTModel"],
        "model_type": "vit",
        "torch_dtype": dtype,
    }


SIZES = ("image_size", "patch_size")


def rows(config: Config, tensors: Tensors | None = None, at: str = "", ours: str = "") -> list[Row]:
    """Map every leaf of a ViT to its tensor; `at` prefixes the names in the file, `ours` those of the leaves."""
    body = f"{at}{prefix(tensors, at)}"
    layer, embeddings = f"{body}encoder.layer.{{i}}", f"{body}embeddings"
    table = [
        Row("first", f"{embeddings}.cls_token", "1 1 d -> d"),
        Row("positions", f"{embeddings}.position_embeddings", "1 n d -> n d"),
        Row("patches.weight", f"{embeddings}.patch_embeddings.projection.weight", "d c y x -> c y x d"),
        Row("patches.bias", f"{embeddings}.patch_embeddings.projection.bias"),
    ]
    for part, theirs in (("q", "query"), ("k", "key"), ("v", "value")):
        name = f"{layer}.attention.attention.{theirs}"
        table.append(Row(f"layers.attention.{part}.weight", f"{name}.weight", "(n h) d -> d n h"))
        if config.qkv_bias:
            table.append(Row(f"layers.attention.{part}.bias", f"{name}.bias", "(n h) -> n h"))
    table += [
        Row("layers.attention.o.weight", f"{layer}.attention.output.dense.weight", "d (n h) -> n h d"),
        Row("layers.attention.o.bias", f"{layer}.attention.output.dense.bias"),
    ]
    for part, theirs in (("wi", "intermediate"), ("wo", "output")):
        table.append(Row(f"layers.mlp.{part}.weight", f"{layer}.{theirs}.dense.weight", "d f -> f d"))
        table.append(Row(f"layers.mlp.{part}.bias", f"{layer}.{theirs}.dense.bias"))
    for part in ("weight", "bias"):
        table += [
            Row(f"layers.attention_norm.{part}", f"{layer}.layernorm_before.{part}"),
            Row(f"layers.mlp_norm.{part}", f"{layer}.layernorm_after.{part}"),
            Row(f"norm.{part}", f"{body}layernorm.{part}"),
        ]
    if config.pooler:
        table.append(Row("pooler.weight", f"{body}pooler.dense.weight", "d f -> f d"))
        table.append(Row("pooler.bias", f"{body}pooler.dense.bias"))
    return [dataclasses.replace(row, ours=f"{ours}{row.ours}") for row in table]


def unneeded(name: str, tensors: Tensors, at: str = "") -> bool:
    """Whether a tensor may be ignored: the classifier, and the mask token of masked image modelling."""
    body = f"{at}{prefix(tensors, at)}"
    return name == f"{body}embeddings.mask_token" or name in (f"{at}classifier.weight", f"{at}classifier.bias")


FORMAT = Format(read_config, write_config, rows, unneeded)
