"""The pair of ViT and GPT-2 in Hugging Face's files: a VisionEncoderDecoderModel."""

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
    """config.json, which holds one for either half. Ids at its top win over the decoder's, as in transformers."""
    read(json, {}, Config, {*HALVES, "pad_token_id", "decoder_start_token_id"}, {"is_encoder_decoder": (True,)})
    for half, kind in HALVES.items():
        found = json.get(half, {}).get("model_type")
        if found != kind:
            raise InputError(f"config.json: the {half} has model_type {found!r}; supported: {kind!r}")
    encoder = vit.read_config(json["encoder"], tensors, "encoder.", "encoder of config.json")
    own = {name: value for name in SPECIAL if (value := json.get(name)) is not None}
    # A decoder's config may repeat that it is one half: without cross-attention it could not be.
    said = {**json["decoder"], **own, "add_cross_attention": True, "is_encoder_decoder": False}
    decoder = gpt2.read_config(said, tensors, "decoder.", "decoder of config.json")
    return Config(encoder, decoder)


def special_ids(config: Config) -> dict[str, Any]:
    c = config.decoder
    return dict(zip(SPECIAL, (c.pad_id, c.start_id, c.start_id, one_or_list(c.eos_ids))))


def write_config(config: Config, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["VisionEncoderDecoderModel"],
        "model_type": "vision-encoder-decoder",
        "is_encoder_decoder": True,
        "encoder": vit.write_config(config.encoder, dtype),
        "decoder": gpt2.write_config(config.decoder, dtype),
        **special_ids(config),
        "tie_word_embeddings": False,  # of encoder and decoder; the decoder's own field is about its head
        "torch_dtype": dtype,
    }


def rows(config: Config, tensors: Tensors | None = None) -> list[Row]:
    """Every leaf of a captioner and its tensor."""
    bridge = []
    if config.encoder.d_model != config.decoder.d_model:
        bridge = [
            Row("bridge.weight", "enc_to_dec_proj.weight", "d e -> e d"),
            Row("bridge.bias", "enc_to_dec_proj.bias"),
        ]
    encoder = vit.rows(config.encoder, tensors, "encoder.", "encoder.")
    return [*encoder, *bridge, *gpt2.rows(config.decoder, tensors, "decoder.", "decoder.")]


def unneeded(name: str, tensors: Tensors) -> bool:
    half = vit if name.startswith("encoder.") else gpt2
    return half.unneeded(name, tensors, "encoder." if half is vit else "decoder.")


FORMAT = Format(read_config, write_config, rows, unneeded, SPECIAL, special_ids)
