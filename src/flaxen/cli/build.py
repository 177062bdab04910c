"""From settings to the things that train: tokenizer, model, data, task."""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flaxen.cli.settings import CaptionSettings, DenoiseSettings, LanguageSettings, Seq2SeqSettings, Settings, Start
from flaxen.data.captions import Captions, open_captions
from flaxen.data.images import Processor
from flaxen.data.pair_store import open_pairs
from flaxen.data.store import open_corpus
from flaxen.data.stream_store import open_streams
from flaxen.data.streams import Streamed
from flaxen.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from flaxen.errors import InputError, nearest
from flaxen.hf import families, files, peft
from flaxen.hf.families import Model
from flaxen.models import captioner, gpt2, t5, vit, vq_config, vq_language, vq_lm
from flaxen.nn.param import initialise
from flaxen.pretrained import Pretrained, cache_compilations, load
from flaxen.tasks.caption import Caption
from flaxen.tasks.denoise import Denoise
from flaxen.tasks.language import Language
from flaxen.tasks.objective import CaptionObjective, LanguageObjective, Writing
from flaxen.tasks.seq2seq import Seq2Seq
from flaxen.train import lora
from flaxen.train.optim import frozen
from flaxen.train.settings import LoRA
from flaxen.train.step import Stepper
from flaxen.tree import leaves, map_leaves

TaskOf = Denoise | Seq2Seq | Caption | Language


@dataclass(frozen=True)
class Beginning:
    """What a run begins with, beside weights."""

    config: Any
    tokenizer: Tokenizer
    generation: dict[str, Any]  # generation_config.json of the checkpoint it starts from
    processor: Processor | None  # of pictures

    @property
    def model(self) -> Model:
        """Its shapes."""
        return families.of_config(self.config)(self.config)


@dataclass(frozen=True)
class Built:
    """All that a run needs."""

    begin: Beginning
    task: TaskOf
    stepper: Stepper
    abstract: Any  # the shape of what is trained
    initial: Callable[[], Any]  # what to start from, made when it is needed
    export: Callable[[Any, Path], None]  # writes what is trained to a directory
    facts: dict[str, Any]  # what the settings came to: data, lengths, sizes
    finish: Callable[[Path], None] = lambda run: None  # what else a run directory gets at its end


def build(settings: Settings) -> Built:
    cache_compilations()
    begin = start(settings.model)
    task = make_task(settings, begin)
    begin = dataclasses.replace(begin, config=task.config) if isinstance(task, Language) else begin
    weights: Callable[[], Any] = partial(_initial, settings.model, begin.config, settings.training.seed)
    if isinstance(task, Language):
        if settings.model.init is not None and task.objective.codebooks == "data":
            raise InputError("a checkpoint has its codebooks: leave out --objective.codebooks data, or model.init")
        weights = partial(_started, task, weights)
    make = partial(Stepper, task, settings.optimizer, settings.schedule, settings.training)
    abstract = begin.model
    facts = task.facts | {"model": dataclasses.asdict(begin.config)}
    if not settings.lora.rank:
        stepper = make()
        frozen(settings.optimizer, abstract)  # globs that match nothing fail now
        export = lambda model, directory: _whole(begin, model).save(directory)  # noqa: E731
        finish = _draw_codebooks if isinstance(task, Language) and begin.config.attention == "vq" else lambda run: None
        return Built(begin, task, stepper, abstract, weights, export, facts | {"steps": stepper.steps}, finish)
    if settings.optimizer.name in ("adamw-rms", "adafactor"):
        raise InputError(
            f"optimizer {settings.optimizer.name} scales updates by the weights, and those of an adapter start at 0; "
            "choose --optimizer.name adamw --optimizer.learning-rate 1e-3"
        )
    whole, merged = (partial(_with_adapter, how, settings.lora.scale) for how in (lora.attach, lora.merge))
    stepper = make(whole, merged, weights)
    adapter = lora.abstract(abstract, settings.lora)
    initial = partial(lora.start, abstract, settings.lora, settings.training.seed)
    export = partial(_write_adapter, settings.lora, abstract, settings.model.init)
    return Built(begin, task, stepper, adapter, initial, export, facts | {"steps": stepper.steps})


def _started(task: Language, weights: Callable[[], Any]) -> Any:
    return task.started(weights())


def _whole(begin: Beginning, model: Any) -> Pretrained:
    return Pretrained(model, begin.tokenizer, begin.generation, begin.processor)


def _with_adapter(how: Callable[..., Any], scale: float, adapter: Any, base: Any) -> Any:
    return how(base, adapter, scale)


def _write_adapter(settings: LoRA, model: Any, base: str | None, adapter: Any, directory: Path) -> None:
    peft.write(adapter, model, settings.rank, settings.scale * settings.rank, directory, base)


def make_task(settings: Settings, begin: Beginning) -> TaskOf:
    """The data of a run, joined to its model."""
    seed, tokenizer = settings.training.seed, begin.tokenizer
    if isinstance(settings, CaptionSettings):
        return captions_task(settings.data, settings.objective, settings.writing, begin, seed)
    if isinstance(settings, LanguageSettings):
        return language_task(settings.data, settings.objective, begin, seed)
    check_kind(begin, t5.T5, "a T5, mT5, ByT5 or LongT5")
    if isinstance(settings, DenoiseSettings):
        return Denoise(begin.config, settings.objective, tokenizer, *open_corpus(settings.data, tokenizer), seed)
    assert isinstance(settings, Seq2SeqSettings)
    pairs = open_pairs(settings.data, tokenizer)
    return Seq2Seq(begin.config, settings.objective, settings.writing, tokenizer, *pairs, seed)


def captions_task(
    data: Captions, objective: CaptionObjective, writing: Writing, begin: Beginning, seed: int
) -> Caption:
    check_kind(begin, captioner.Captioner, "a captioner, ViT + GPT-2")
    assert begin.processor is not None
    return Caption(begin.config, objective, writing, begin.tokenizer, begin.processor, *open_captions(data), seed)


def language_task(
    data: Streamed, objective: LanguageObjective, begin: Beginning, seed: int, split: str = "validation"
) -> Language:
    check_kind(begin, vq_lm.VQLM, "a Transformer-VQ")
    opened = open_streams(data, begin.tokenizer)
    config = begin.config
    if config.image and opened.shape != config.image:
        raise InputError(f"the model writes pictures of shape {config.image}, the data has {opened.shape or 'none'}")
    if data.kind != "text" and not isinstance(begin.tokenizer, ByteTokenizer):
        raise InputError(
            f"data.kind {data.kind} reads bytes as they are, and this model's tokens are a vocabulary's; leave "
            "--model.tokenizer out, or read the files with --data.kind text"
        )
    config = dataclasses.replace(config, image=opened.shape)
    return Language(vq_language, config, objective, begin.tokenizer, opened, seed, split)


def _draw_codebooks(run: Path) -> None:
    """A picture, if the library that draws is there."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        print("no codebooks.png: it needs matplotlib (pip install 'flaxen[plots]')", file=sys.stderr)
        return
    from flaxen.cli.plots import codebooks

    model = load(run / "model").model
    codebooks(model, run / "codebooks.png")


def check_kind(begin: Beginning, kind: type, name: str) -> None:
    if not isinstance(begin.model, kind):
        raise InputError(f"this task is for {name}; the model is a {type(begin.model).__name__}")


def start(model: Start) -> Beginning:
    """Configuration, tokenizer and the like; no weights are read or made."""
    generation: dict[str, Any] = {}
    processor: Processor | None = None
    for name in (one.partition("=")[0] for one in model.fields):
        if name in ELSEWHERE:
            raise InputError(f"model.fields {name}: {ELSEWHERE[name]}")
        if model.init is not None and name not in ANY_WAY:
            raise InputError(
                f"model.fields {name}: a checkpoint is what it is; only {' and '.join(ANY_WAY)}, which say how a "
                "Transformer-VQ is computed, can be changed"
            )
    if model.init is not None:
        directory = files.locate(model.init)
        stored = families.read(directory)
        config, generation, processor = stored.config, stored.generation, Processor.read(directory)
        config = changed(config, model.fields) if model.fields else config
        tokenizer = named_tokenizer(model.tokenizer, config) if model.tokenizer else load_tokenizer(directory)
        if tokenizer is None:
            raise InputError(
                f"{model.init} has no tokenizer files; name a tokenizer: --model.tokenizer, or --tokenizer of eval"
            )
        if tokenizer.size > getattr(config, "vocab_size", tokenizer.size):
            raise InputError(
                f"the tokenizer has {tokenizer.size:,} ids and the model of {model.init} only {config.vocab_size:,}; "
                "they do not belong together"
            )
    else:
        config = changed(_preset(model.preset) if model.preset else _config_file(model.config), model.fields)
        if model.tokenizer is None and not (model.preset or "").startswith(("byt5", "vq")):
            raise InputError(
                "a model that starts from nothing needs --model.tokenizer: a directory, a hub id, or bytes"
            )
        tokenizer = named_tokenizer(model.tokenizer or "bytes", config)
        config = _for_tokenizer(config, tokenizer)
    config = families.computing(config, compute=model.compute, remat=model.remat)
    if model.dropout is not None:
        config = families.with_dropout(config, model.dropout)
    if isinstance(config, captioner.Config):
        config, processor = _for_pictures(config, processor, model.image_size)
    elif model.image_size is not None:
        raise InputError("model.image_size is for models that see pictures")
    return Beginning(config, tokenizer, generation, processor)


def _for_tokenizer(config: Any, tokenizer: Tokenizer) -> Any:
    """Rows of the table come in multiples of 128, as T5's 32,128 for 32,100 ids do: products like it."""
    if isinstance(config, captioner.Config):
        return dataclasses.replace(config, decoder=_for_tokenizer(config.decoder, tokenizer))
    ids: dict[str, Any] = {"pad_id": tokenizer.pad_id, "eos_ids": (tokenizer.eos_id,), "start_id": tokenizer.pad_id}
    if isinstance(config, vq_config.Config):  # every text begins behind the end of another
        return dataclasses.replace(config, vocab_size=tokenizer.size, **{**ids, "start_id": tokenizer.eos_id})
    return dataclasses.replace(config, vocab_size=-(-tokenizer.size // 128) * 128, **ids)


def _for_pictures(
    config: captioner.Config, processor: Processor | None, size: int | None
) -> tuple[captioner.Config, Processor]:
    """For pictures of another size, both the encoder and what is done to pictures change."""
    if size is None:
        return config, processor or Processor.default(config.encoder.image_size)
    encoder = dataclasses.replace(config.encoder, image_size=(size, size))
    old = processor or Processor.default(size)
    resized = dataclasses.replace(old, size=(size, size), shortest_edge=None, crop=None)
    return dataclasses.replace(config, encoder=encoder), resized


def named_tokenizer(name: str, config: Any = None) -> Tokenizer:
    """Of a directory or the hub; or bytes, as a model of this configuration has them."""
    if name == "bytes":
        return ByteTokenizer.plain() if isinstance(config, vq_config.Config) else ByteTokenizer()
    tokenizer = load_tokenizer(files.locate(name))
    if tokenizer is None:
        raise InputError(f"{name} holds no tokenizer (tokenizer.json, spiece.model or tokenizer_config.json)")
    return tokenizer


# Fields of a configuration that something else says, and what.
ELSEWHERE = {
    "compute": "that is --model.compute",
    "remat": "that is --model.remat",
    "vocab_size": "the tokenizer says it",
    "pad_id": "the tokenizer says it",
    "eos_ids": "the tokenizer says it",
    "start_id": "the tokenizer says it",
    "image": "the data says it",
}
ANY_WAY = ("block", "form")  # fields that change no result, so that a checkpoint can have others
PRESETS: dict[str, Any] = {**t5.PRESETS, **gpt2.PRESETS, **vit.PRESETS, **vq_config.PRESETS}


def changed(config: Any, fields: tuple[str, ...]) -> Any:
    """A configuration with some fields changed, each given as name=value."""
    known = {field.name: type(getattr(config, field.name)) for field in dataclasses.fields(config)}
    changes: dict[str, Any] = {}
    for one in fields:
        name, equals, value = one.partition("=")
        if name not in known or not equals:
            raise InputError(
                f"model.fields {one!r}: expected name=value{nearest(name, known)}; there are {', '.join(known)}"
            )
        try:
            truths = {"true": True, "false": False, "1": True, "0": False}
            changes[name] = truths[value.lower()] if known[name] is bool else known[name](value)
        except (KeyError, ValueError):
            raise InputError(f"model.fields {name} must be {known[name].__name__}, got {value!r}") from None
    try:
        return dataclasses.replace(config, **changes)
    except ValueError as error:
        raise InputError(f"model.fields: {error}") from None


def _preset(name: str) -> Any:
    """A preset; 'vit-…+gpt2-…' is a captioner of two."""
    parts = [find_preset(part) for part in name.split("+")]
    if len(parts) == 1:
        return parts[0]
    if len(parts) != 2 or not isinstance(parts[0], vit.Config) or not isinstance(parts[1], gpt2.Config):
        raise InputError(f"preset {name!r}: a captioner is a ViT and a GPT-2, such as vit-mini+gpt2-mini")
    return captioner.Config(parts[0], dataclasses.replace(parts[1], cross=True))


def find_preset(name: str) -> Any:
    if name not in PRESETS:
        raise InputError(f"no preset {name!r}{nearest(name, PRESETS)}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def _config_file(path: Path | None) -> Any:
    assert path is not None
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise InputError(f"no file {path}; --model.config is a config.json")
    json = files.read_json(path)
    return families.family_named(json, path).read_config(json, None)


def _initial(model: Start, config: Any, seed: int) -> Model:
    abstract = families.of_config(config)(config)
    if model.init is None:
        return initialise(abstract, seed)
    loaded = load(model.init).model
    weights = leaves(loaded)
    if isinstance(loaded, captioner.Captioner) and loaded.config.encoder.image_size != config.encoder.image_size:
        seeing = vit.resized(loaded.encoder, config.encoder.image_size)
        weights |= {f"encoder.{path}": leaf for path, leaf in leaves(seeing).items()}
    return map_leaves(lambda path, _: weights[path], abstract)
