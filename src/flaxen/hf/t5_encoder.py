"""Hugging Face format of T5EncoderModel and its variants: a T5 configuration, and the tensors of the encoder only."""

import dataclasses
from typing import Any

from flaxen.hf import t5
from flaxen.hf.fields import make_config
from flaxen.hf.format import Format
from flaxen.hf.tensors import Tensors
from flaxen.hf.weightmap import Row
from flaxen.models.t5_encoder import Config

ARCHITECTURES = {kind: f"{name}EncoderModel" for kind, name in t5.MODEL_TYPES.items()}
TABLES = ("shared.weight", "encoder.embed_tokens.weight")  # names of the embedding: files have either or both


def read_config(json: dict[str, Any], tensors: Tensors | None) -> Config:
    """Convert config.json to our Config. It may describe a full T5, with is_encoder_decoder and decoder layers."""
    config = t5.read_config({**json, "is_encoder_decoder": True}, None)
    return make_config(Config, {field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def write_config(config: Config, dtype: str) -> dict[str, Any]:
    """Convert our Config to a config.json."""
    json = t5.write_config(config, dtype)
    return {**json, "architectures": [ARCHITECTURES[json["model_type"]]], "is_encoder_decoder": False}


def rows(config: Config, tensors: Tensors | None = None) -> list[Row]:
    """Map every leaf of the encoder to its tensor."""
    present = [name for name in TABLES if tensors is None or name in tensors] or TABLES
    encoder = [row for row in t5.rows(config) if row.ours.startswith("encoder.")]
    return [Row("embedding.weight", present[0]), *encoder]


def unneeded(name: str, tensors: Tensors) -> bool:
    """Whether a tensor may be ignored: copies of the embedding, and the decoder of a full T5."""
    return name.startswith("decoder.") or name == "lm_head.weight" or t5.unneeded(name, tensors)


FORMAT = Format(read_config, write_config, rows, unneeded)
