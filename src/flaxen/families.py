"""One record per model family: what the library knows of an architecture is here, or reached from here.

A new family is a model file, a Hugging Face table and a record in `FAMILIES`. Nothing else asks what class a model is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flaxen.data.tokenizers import ByteTokenizer, Tokenizer
from flaxen.errors import InputError, did_you_mean
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
    """How prompts become the inputs of a model."""

    reads: Literal["text", "image"] = "text"
    continues: bool = False  # the output continues the prompt, which may be empty and is padded at the left
    starts: bool = False  # a text begins with the start token, as every text did in training
    specials: bool = True  # a special token spelled out in a prompt is that token
    carries: bool = False  # a state can come with a prompt
    position_limit: Callable[[Any], int | None] = lambda config: None  # of prompt and output together


@dataclass(frozen=True)
class Family:
    """Everything that differs from architecture to architecture."""

    name: str  # as people write it
    model_types: tuple[str, ...]  # of config.json
    model: Callable[[Any], Any]  # Config -> abstract model
    config: type
    presets: Mapping[str, Any]
    format: Format
    flops: Callable[..., float]  # (config, lengths …) -> operations of the matmuls of one forward pass
    architectures: tuple[str, ...] = ()  # of config.json, where model_type alone does not tell
    encode: Callable[..., Any] | None = None  # (model, ids, valid) -> hidden states [B, S, D]; None: no embeddings
    tasks: tuple[str, ...] = ()  # that train it
    language: Any = None  # its tasks.language.LanguageModel, if it is trained as one
    decoder: Any = None  # its generate.search.Decoder; None if it generates nothing
    prompting: Prompting = field(default_factory=Prompting)
    peft_task: str | None = None  # PEFT's task_type
    bytes: Callable[[], Tokenizer] = ByteTokenizer  # what the tokenizer `bytes` is for it
    byte_presets: str | None = None  # presets whose names begin so take `bytes` unless told otherwise
    changeable: tuple[str, ...] = ()  # fields that change no result: a checkpoint can be run with others
    parts: tuple["Family", ...] = ()  # the families of its halves
    join: Callable[..., Any] | None = None  # the configs of the halves -> Config
    with_config: Callable[[Any, Any], Any] = with_config  # (model, config) -> the same weights with that config
    reader: Callable[..., Any] | None = None  # (model, ids, state) -> the state after reading them


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
    # It was trained on texts as they are, where "</s>" is four characters.
    prompting=Prompting(continues=True, starts=True, specials=False, carries=True),
    bytes=ByteTokenizer.plain,
    byte_presets="vq",
    changeable=("block", "form"),
    reader=vq_reading.read,
)
FAMILIES = (T5, T5_ENCODER, GPT2, VIT, CAPTIONER, TRANSFORMER_VQ)
PRESETS: dict[str, Any] = {name: config for family in FAMILIES for name, config in family.presets.items()}


def of_config(config: Any) -> Family:
    """The family that a configuration belongs to."""
    return next(family for family in FAMILIES if family.config is type(config))


def of_model(model: Any) -> Family:
    return of_config(model.config)


def of_json(json: dict[str, Any], where: Any) -> Family:
    """The family that a config.json names: of several with its model_type, the one that names its architecture."""
    kind, classes = json.get("model_type", "t5"), json.get("architectures") or ()
    found = [family for family in FAMILIES if kind in family.model_types]
    named = [family for family in found if set(classes) & set(family.architectures)]
    if found:
        return (named or found)[0]
    known = ", ".join(dict.fromkeys(name for family in FAMILIES for name in family.model_types))
    raise InputError(f"{where}: model_type {kind!r}; supported: {known}")


def supporting(task: str) -> str:
    """The families that a task can train, for messages."""
    return ", ".join(family.name for family in FAMILIES if task in family.tasks)


def joined(*parts: Any) -> Any:
    """The configuration of the family whose halves have these configurations."""
    kinds = tuple(map(of_config, parts))
    for family in FAMILIES:
        if family.parts and family.parts == kinds and family.join:
            return family.join(*parts)
    pairs = [" and a ".join(part.name for part in family.parts) for family in FAMILIES if family.parts]
    raise InputError(f"no model is made of {' and '.join(f'a {kind.name}' for kind in kinds)}; known: a {pairs[0]}")


def preset(name: str) -> Any:
    """The configuration of a preset; 'vit-…+gpt2-…' joins two."""
    configs = []
    for part in name.split("+"):
        if part not in PRESETS:
            raise InputError(f"no preset {part!r}{did_you_mean(part, PRESETS)}; there are {', '.join(PRESETS)}")
        configs.append(PRESETS[part])
    return configs[0] if len(configs) == 1 else joined(*configs)
