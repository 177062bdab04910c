"""Hugging Face format of the ViT + GPT-2 captioner, a VisionEncoderDecoderModel: config fields and weight names."""

from typing import Any

from flaxen.errors import InputError
from flaxen.hf import gpt2, vit
from flaxen.hf.fields import one_or_list, read
from flaxen.hf.format import Format
from flaxen.hf.tensors import Tensors
from flaxen.hf.weightmap import Row
from flaxen.models.captioner import Config

HALVES = {"encoder": "vit", "decoder": "gpt2"}
SPECIAL = gpt2.SPECIAL


def read_config(json: dict[str, Any], tensors: Tensors | None) -> Config:
    """Convert config.json, which nests the configs of encoder and decoder, to our Config.

    Token ids at the top level override the decoder's, as in transformers.
    """
    read(json, {}, Config, {*HALVES, "pad_token_id", "decoder_start_token_id"}, {"is_encoder_decoder": (True,)})
    for half, kind in HALVES.items():
        model_type = json.get(half, {}).get("model_type")
        if model_type != kind:
            raise InputError(f"config.json: the model_type of the {half} must be {kind!r}, got {model_type!r}")
    encoder = vit.read_config(json["encoder"], tensors, "encoder.", "encoder of config.json")
    special = {name: value for name in SPECIAL if (value := json.get(name)) is not None}
    # The nested config may omit or contradict these two fields, but the decoder of a captioner always has these values.
    decoder_json = {**json["decoder"], **special, "add_cross_attention": True, "is_encoder_decoder": False}
    decoder = gpt2.read_config(decoder_json, tensors, "decoder.", "decoder of config.json")
    return Config(encoder, decoder)


def special_ids(config: Config) -> dict[str, Any]:
    """Return the special token ids under their names in config.json."""
    c = config.decoder
    return dict(zip(SPECIAL, (c.pad_id, c.start_id, c.start_id, one_or_list(c.eos_ids))))


def write_config(config: Config, dtype: str) -> dict[str, Any]:
    """Convert our Config to a config.json."""
    return {
        "architectures": ["VisionEncoderDecoderModel"],
        "model_type": "vision-encoder-decoder",
        "is_encoder_decoder": True,
        "encoder": vit.write_config(config.encoder, dtype),
        "decoder": gpt2.write_config(config.decoder, dtype),
        **special_ids(config),
        "tie_word_embeddings": False,  # between encoder and decoder; the decoder's config says whether its head is tied
        "torch_dtype": dtype,
    }


def rows(config: Config, tensors: Tensors | None = None) -> list[Row]:
    """Map every leaf of a captioner to its tensor."""
    bridge = []
    if config.encoder.d_model != config.decoder.d_model:
        bridge = [
            Row("bridge.weight", "enc_to_dec_proj.weight", "d e -> e d"),
            Row("bridge.bias", "enc_to_dec_proj.bias"),
        ]
    encoder = vit.rows(config.encoder, tensors, "encoder.", "encoder.")
    return [*encoder, *bridge, *gpt2.rows(config.decoder, tensors, "decoder.", "decoder.")]


def unneeded(name: str, tensors: Tensors) -> bool:
    """Whether a tensor may be ignored: it is redundant in the format of the encoder or decoder."""
    half = vit if name.startswith("encoder.") else gpt2
    return half.unneeded(name, tensors, "encoder." if half is vit else "decoder.")


FORMAT = Format(read_config, write_config, rows, unneeded, SPECIAL, special_ids)
