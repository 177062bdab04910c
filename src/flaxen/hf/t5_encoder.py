"""T5EncoderModel and its kin in Hugging Face's files: a T5's configuration and the tensors of its encoder."""

import dataclasses
from typing import Any

from flaxen.hf import t5
from flaxen.hf.fields import make_config
from flaxen.hf.format import Format
from flaxen.hf.tensors import Tensors
from flaxen.hf.weightmap import Row
from flaxen.models.t5_encoder import Config

ARCHITECTURES = {kind: f"{name}EncoderModel" for kind, name in t5.MODEL_TYPES.items()}
TABLES = ("shared.weight", "encoder.embed_tokens.weight")  # the embedding table: a file may name it either way


def read_config(json: dict[str, Any], tensors: Tensors | None) -> Config:
    """config.json as our Config. It may still call the model an encoder-decoder, with layers of both."""
    config = t5.read_config({**json, "is_encoder_decoder": True}, None)
    return make_config(Config, {field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def write_config(config: Config, dtype: str) -> dict[str, Any]:
    written = t5.write_config(config, dtype)
    return {**written, "architectures": [ARCHITECTURES[written["model_type"]]], "is_encoder_decoder": False}


def rows(config: Config, tensors: Tensors | None = None) -> list[Row]:
    """Every leaf of the encoder and its tensor."""
    there = [name for name in TABLES if tensors is None or name in tensors] or TABLES
    encoder = [row for row in t5.rows(config) if row.ours.startswith("encoder.")]
    return [Row("embedding.weight", there[0]), *encoder]


def unneeded(name: str, tensors: Tensors) -> bool:
    """True for copies of the table, and for what a file may still hold of a decoder."""
    return name.startswith("decoder.") or name == "lm_head.weight" or t5.unneeded(name, tensors)


FORMAT = Format(read_config, write_config, rows, unneeded)
