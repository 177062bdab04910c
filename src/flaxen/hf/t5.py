"""Hugging Face format of T5, mT5, umT5, ByT5 and LongT5: config fields and weight names, for reading and writing."""

import dataclasses
from typing import Any

import numpy as np

from flaxen.hf.fields import ids, make_config, one_or_list, read
from flaxen.hf.format import Format
from flaxen.hf.tensors import Tensors
from flaxen.hf.weightmap import Row, equal_tensors
from flaxen.models.t5 import Config

# model_type -> prefix of its class names in transformers.
MODEL_TYPES = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5", "longt5": "LongT5"}

# Name in config.json -> name in our Config, for fields with the same meaning.
FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "d_model",
    "d_kv": "d_head",
    "d_ff": "d_ff",
    "num_layers": "n_layers",
    "num_decoder_layers": "n_decoder_layers",
    "num_heads": "n_heads",
    "relative_attention_num_buckets": "n_buckets",
    "relative_attention_max_distance": "max_distance",
    "layer_norm_epsilon": "epsilon",
    "dropout_rate": "dropout",
    "initializer_factor": "factor",
    "pad_token_id": "pad_id",
    "decoder_start_token_id": "start_id",
}
LONG_FIELDS = {"encoder_attention_type": "attention", "local_radius": "radius", "global_block_size": "global_block"}
LONG_NAMES = {
    "full": "SelfAttention",
    "local": "LocalSelfAttention",
    "transient-global": "TransientGlobalSelfAttention",
}
# Defaults of fields missing from config.json, where a model_type differs from t5-small.
MT5 = {"vocab_size": 250112, "d_ff": 1024, "n_layers": 8, "n_heads": 6}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mt5": MT5,
    "umt5": {**MT5, "bias_per_layer": True},
    "longt5": {"attention": "local"},
}

# Fields that do not affect the computation, or that are read elsewhere in this module.
SILENT = {
    "n_positions", "output_past", "classifier_dropout", "dense_act_fn", "is_gated_act", "feed_forward_proj",
    "scale_decoder_outputs", "scalable_attention", "chronos_config",
}  # fmt: skip
# Fields that would change the computation: only these values are supported.
FIXED: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (True,),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}


def read_config(json: dict[str, Any], tensors: Tensors | None) -> Config:
    """Convert config.json to our Config.

    Whether the output head is tied to the embedding is read from the weights, because transformers 4 and 5 disagree on
    the meaning of tie_word_embeddings. Without weights it is tied if it is scaled, as in all of Google's models.
    """
    kind = json.get("model_type", "t5")
    names = FIELDS | (LONG_FIELDS if kind == "longt5" else {})
    fields: dict[str, Any] = {**DEFAULTS.get(kind, {}), **read(json, names, Config, SILENT, FIXED)}
    fields.setdefault("n_decoder_layers", fields.get("n_layers", Config.n_layers))
    fields["activation"], fields["gated"] = _read_activation(json.get("feed_forward_proj", _default_mlp(kind)))
    fields["eos_ids"] = ids(json.get("eos_token_id", 1))
    fields["scaled"] = fields["tied"] = _scaled(json, kind)
    if tensors is not None:
        fields["tied"] = "lm_head.weight" not in tensors or equal_tensors(tensors, "lm_head.weight", "shared.weight")
    fields["family"] = kind
    return make_config(Config, fields)


def _default_mlp(kind: str) -> str:
    """Return the default feed_forward_proj for a config.json that has none."""
    return "gated-gelu" if kind in ("mt5", "umt5") else "relu"


def _scaled(json: dict[str, Any], kind: str) -> bool:
    """Whether hidden states are scaled by d_model^-0.5 before the output head.

    transformers 4 scales if tie_word_embeddings is true. transformers 5 sets that field for every T5, and stores the
    scaling in scale_decoder_outputs.
    """
    if json.get("scale_decoder_outputs") is not None:
        return bool(json["scale_decoder_outputs"])
    major = str(json.get("transformers_version", "4")).split(".")[0]
    if kind == "mt5" and major.isdigit() and int(major) >= 5:
        return False
    return bool(json.get("tie_word_embeddings", True))


def _read_activation(projection: str) -> tuple[str, bool]:
    """Return the activation that feed_forward_proj names, and whether it is gated."""
    gated, name = projection.startswith("gated-"), projection.removeprefix("gated-")
    # In 'gated-gelu', gelu is the tanh approximation (gelu_new); plain 'gelu' is exact.
    return ("gelu_new" if projection == "gated-gelu" else name), gated


# Token ids that are in both config.json and generation_config.json.
SPECIAL = ("pad_token_id", "decoder_start_token_id", "eos_token_id")


def special_ids(config: Config) -> dict[str, Any]:
    """Return the special token ids under their names in config.json."""
    return dict(zip(SPECIAL, (config.pad_id, config.start_id, one_or_list(config.eos_ids))))


def write_config(config: Config, dtype: str) -> dict[str, Any]:
    """Convert our Config to a config.json that transformers 4 and 5 and the old Flax classes read as the same model."""
    fields = dataclasses.asdict(config)
    name = "gelu" if config.gated and config.activation == "gelu_new" else config.activation
    # Only LongT5 has sparse attention, and only umT5 has a position bias per layer.
    family = "longt5" if config.attention != "full" else "umt5" if config.bias_per_layer else config.family
    names = FIELDS | (LONG_FIELDS if family == "longt5" else {})
    return {
        **{theirs: fields[ours] for theirs, ours in names.items()},
        "architectures": [f"{MODEL_TYPES[family]}ForConditionalGeneration"],
        "model_type": family,
        "is_encoder_decoder": True,
        "feed_forward_proj": f"gated-{name}" if config.gated else name,
        **special_ids(config),
        # transformers 4 reads the scaling from the first field, 5 from the second (see `_scaled` and `with_copies`).
        "tie_word_embeddings": config.scaled,
        "scale_decoder_outputs": config.scaled,
        "torch_dtype": dtype,
    }


def rows(config: Config, tensors: Tensors | None = None) -> list[Row]:
    """Map every leaf of a T5 to its tensor."""
    mlp = {"gate": "wi_0", "wi": "wi_1", "wo": "wo"} if config.gated else {"wi": "wi", "wo": "wo"}
    table = [Row("embedding.weight", "shared.weight")]
    if not config.tied:
        table.append(Row("head.weight", "lm_head.weight"))
    for stack, parts in (
        ("encoder", (("attention", LONG_NAMES[config.attention]), ("mlp", "DenseReluDense"))),
        (
            "decoder",
            (("attention", "SelfAttention"), ("cross", "EncDecAttention"), ("mlp", "DenseReluDense")),
        ),
    ):
        # In a block, layer.0 is self-attention, and the last one (1 or 2) the feed-forward network.
        for at, (ours, theirs) in enumerate(parts):
            block = f"{stack}.block.{{i}}.layer.{at}"
            table.append(Row(f"{stack}.layers.{ours}_norm.weight", f"{block}.layer_norm.weight"))
            if ours == "mlp":
                for our_name, their_name in mlp.items():
                    pattern = "d f -> f d"
                    table.append(
                        Row(f"{stack}.layers.mlp.{our_name}.weight", f"{block}.{theirs}.{their_name}.weight", pattern)
                    )
                continue
            # PyTorch stores the weight of a linear layer as [outputs, inputs], with the heads merged.
            for part in "qkv":
                table.append(
                    Row(
                        f"{stack}.layers.{ours}.{part}.weight",
                        f"{block}.{theirs}.{part}.weight",
                        "(n h) d -> d n h",
                    )
                )
            table.append(Row(f"{stack}.layers.{ours}.o.weight", f"{block}.{theirs}.o.weight", "d (n h) -> n h d"))
        # T5 stores the position bias in layer 0 and shares it between layers; umT5 has one in every layer.
        bias = f"{stack}.block.{{i}}.layer.0.{parts[0][1]}.relative_attention_bias.weight"
        shared = Row(f"{stack}.bias.weight", bias.format(i=0))
        table += [
            Row(f"{stack}.layers.bias.weight", bias) if config.bias_per_layer else shared,
            Row(f"{stack}.norm.weight", f"{stack}.final_layer_norm.weight"),
        ]
    if config.attention == "transient-global":
        attention = f"encoder.block.{{i}}.layer.0.{LONG_NAMES[config.attention]}"
        bias = f"{attention.format(i=0)}.global_relative_attention_bias.weight"
        table += [
            Row("encoder.side_bias.weight", bias),
            Row("encoder.layers.attention.norm.weight", f"{attention}.global_input_layer_norm.weight"),
        ]
    return table


def unneeded(name: str, tensors: Tensors) -> bool:
    """Whether a tensor may be ignored: a copy of the embedding, or the unused cross-attention bias of old files."""
    if name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        return equal_tensors(tensors, name, "shared.weight")
    return name == "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def with_copies(config: Config, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add lm_head.weight for a tied but unscaled head: transformers 4 scales every tied head."""
    if config.tied and not config.scaled:
        return {**tensors, "lm_head.weight": tensors["shared.weight"]}
    return tensors


FORMAT = Format(read_config, write_config, rows, unneeded, SPECIAL, special_ids, with_copies)
