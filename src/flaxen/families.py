"""Registry of model families: one record per architecture, with its config, presets, checkpoint format and decoder.

To add a family, write a model file and a Hugging Face weight table, then add a record to `FAMILIES`. No other code
branches on the class of a model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flaxen.data.tokenizers import ByteTokenizer, Tokenizer
from flaxen.errors import InputError, unknown
from flaxen.hf import captioner as hf_captioner
from flaxen.hf import gpt2 as hf_gpt2
from flaxen.hf import t5 as hf_t5
from flaxen.hf import t5_encoder as hf_t5_encoder
from flaxen.hf import vit as hf_vit
from flaxen.hf import vq as hf_vq
from flaxen.hf.format import Format
from flaxen.models import captioner, gpt2, gpt2_language, t5, t5_encoder, vit, vq_config, vq_language, vq_lm, vq_reading
from flaxen.models.gpt2_decoding import CaptionDecoder, GPT2Decoder
from flaxen.models.t5_decoding import T5Decoder
from flaxen.models.vq_decoding import VQDecoder
from flaxen.nn.param import with_config


@dataclass(frozen=True)
class Prompting:
    """How a family turns prompts into model inputs."""

    reads: Literal["text", "image"] = "text"
    continues: bool = False  # decoder-only: the output continues the prompt, which may be empty and is left-padded
    starts: bool = False  # prepend the start token to a text, as in training
    specials: bool = True  # parse special tokens spelled out in a prompt, such as "</s>"
    carries: bool = False  # a prompt can continue from a stored recurrent state
    position_limit: Callable[[Any], int | None] = lambda config: None  # maximum length of prompt plus output


@dataclass(frozen=True)
class Family:
    """Everything that is specific to one architecture."""

    name: str  # display name
    model_types: tuple[str, ...]  # values of model_type in config.json
    model: Callable[[Any], Any]  # Config -> abstract model
    config: type
    presets: Mapping[str, Any]
    format: Format
    flops: Callable[..., float]  # (config, lengths …) -> FLOPs of the matmuls in one forward pass
    architectures: tuple[str, ...] = ()  # in config.json, where model_type alone is ambiguous
    encode: Callable[..., Any] | None = None  # (model, ids, valid) -> hidden states [B, S, D]; None: no embeddings
    tasks: tuple[str, ...] = ()  # training tasks that support it
    language: Any = None  # its tasks.language.LanguageModel, if it is trained as a language model
    decoder: Any = None  # its generate.search.Decoder; None if it cannot generate
    prompting: Prompting = field(default_factory=Prompting)
    peft_task: str | None = None  # PEFT's task_type
    bytes: Callable[[], Tokenizer] = ByteTokenizer  # the tokenizer that `--tokenizer bytes` selects
    byte_presets: str | None = None  # presets with this name prefix use `bytes` by default
    changeable: tuple[str, ...] = ()  # config fields that do not affect results, so they may differ from a checkpoint's
    parts: tuple["Family", ...] = ()  # families of its encoder and decoder, if each is a model of its own
    join: Callable[..., Any] | None = None  # configs of the parts -> Config
    with_config: Callable[[Any, Any], Any] = with_config  # (model, config) -> same weights, new config
    reader: Callable[..., Any] | None = None  # (model, ids, state) -> state after reading ids


T5 = Family(
    name="T5",
    model_types=tuple(hf_t5.MODEL_TYPES),
    model=t5.T5,
    config=t5.Config,
    presets=t5.PRESETS,
    format=hf_t5.FORMAT,
    flops=t5.flops,
    encode=t5.T5.encode,
    tasks=("denoise", "seq2seq"),
    decoder=T5Decoder,
    peft_task="SEQ_2_SEQ_LM",
    byte_presets="byt5",
)
T5_ENCODER = Family(
    name="T5 encoder",
    model_types=tuple(hf_t5.MODEL_TYPES),
    architectures=tuple(hf_t5_encoder.ARCHITECTURES.values()),
    model=t5_encoder.T5Encoder,
    config=t5_encoder.Config,
    presets={},
    format=hf_t5_encoder.FORMAT,
    flops=t5_encoder.flops,
    encode=t5_encoder.T5Encoder.encode,
    peft_task="FEATURE_EXTRACTION",
)
GPT2 = Family(
    name="GPT-2",
    model_types=("gpt2",),
    model=gpt2.GPT2,
    config=gpt2.Config,
    presets=gpt2.PRESETS,
    format=hf_gpt2.FORMAT,
    flops=gpt2.flops,
    tasks=("language",),
    language=gpt2_language,
    decoder=GPT2Decoder,
    prompting=Prompting(continues=True, position_limit=lambda config: config.n_positions),
    peft_task="CAUSAL_LM",
    bytes=ByteTokenizer.plain,
)
VIT = Family(
    name="ViT",
    model_types=("vit",),
    model=vit.ViT,
    config=vit.Config,
    presets=vit.PRESETS,
    format=hf_vit.FORMAT,
    flops=vit.flops,
    prompting=Prompting(reads="image"),
)
CAPTIONER = Family(
    name="ViT + GPT-2 captioner",
    model_types=("vision-encoder-decoder",),
    model=captioner.Captioner,
    config=captioner.Config,
    presets={},
    format=hf_captioner.FORMAT,
    flops=captioner.flops,
    tasks=("caption",),
    decoder=CaptionDecoder,
    prompting=Prompting(reads="image"),
    parts=(VIT, GPT2),
    join=captioner.join,
    with_config=captioner.with_config,
)
TRANSFORMER_VQ = Family(
    name="Transformer-VQ",
    model_types=(hf_vq.MODEL_TYPE,),
    model=vq_lm.VQLM,
    config=vq_config.Config,
    presets=vq_config.PRESETS,
    format=hf_vq.FORMAT,
    flops=vq_config.flops,
    tasks=("language",),
    language=vq_language,
    decoder=VQDecoder,
    # Trained on raw text, in which "</s>" is four ordinary characters.
    prompting=Prompting(continues=True, starts=True, specials=False, carries=True),
    bytes=ByteTokenizer.plain,
    byte_presets="vq",
    changeable=("block", "form"),
    reader=vq_reading.read,
)
FAMILIES = (T5, T5_ENCODER, GPT2, VIT, CAPTIONER, TRANSFORMER_VQ)
PRESETS: dict[str, Any] = {name: config for family in FAMILIES for name, config in family.presets.items()}


def of_config(config: Any) -> Family:
    """Return the family of a configuration, by its type."""
    return next(family for family in FAMILIES if family.config is type(config))


def of_model(model: Any) -> Family:
    """Return the family of a model, by the type of its configuration."""
    return of_config(model.config)


def of_json(json: dict[str, Any], where: Any) -> Family:
    """Return the family of a config.json: by model_type first, then by `architectures` where several share it."""
    kind, classes = json.get("model_type", "t5"), json.get("architectures") or ()
    candidates = [family for family in FAMILIES if kind in family.model_types]
    exact = [family for family in candidates if set(classes) & set(family.architectures)]
    if candidates:
        return (exact or candidates)[0]
    supported = ", ".join(dict.fromkeys(name for family in FAMILIES for name in family.model_types))
    raise InputError(f"{where}: model_type {kind!r} is not supported; supported: {supported}")


def supporting(task: str) -> str:
    """Return the names of the families that a task can train, for error messages."""
    return ", ".join(family.name for family in FAMILIES if task in family.tasks)


def joined(*parts: Any) -> Any:
    """Combine the configurations of an encoder and a decoder into one, such as ViT and GPT-2 into a captioner."""
    kinds = tuple(map(of_config, parts))
    for family in FAMILIES:
        if family.parts and family.parts == kinds and family.join:
            return family.join(*parts)
    pairs = [" and a ".join(part.name for part in family.parts) for family in FAMILIES if family.parts]
    raise InputError(
        f"{' and '.join(f'a {kind.name}' for kind in kinds)} cannot be combined into one model; supported: a {pairs[0]}"
    )


def preset(name: str) -> Any:
    """Return the configuration of a preset; 'vit-…+gpt2-…' combines two into a captioner."""
    configs = []
    for part in name.split("+"):
        if part not in PRESETS:
            raise InputError(unknown("preset", part, PRESETS))
        configs.append(PRESETS[part])
    return configs[0] if len(configs) == 1 else joined(*configs)
