"""From settings to the things that train: tokenizer, model, data, task, stepper."""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flaxen import families
from flaxen.cli.settings import ModelSettings, Settings
from flaxen.cli.tasks import CODEBOOKS, TASKS, check_unused
from flaxen.data.images import ImageProcessor
from flaxen.data.tokenizers import Tokenizer, load_tokenizer
from flaxen.errors import InputError, did_you_mean
from flaxen.families import Family
from flaxen.hf import files, peft
from flaxen.models.config import with_dropout
from flaxen.nn.param import initialise
from flaxen.pretrained import Pretrained, loading
from flaxen.pretrained.loading import Stored
from flaxen.tasks.task import Setup, Task
from flaxen.train import lora
from flaxen.train.optim import frozen
from flaxen.train.run import RunFiles
from flaxen.train.settings import LoRA
from flaxen.train.step import Stepper

# Fields of a configuration that something else decides, and what.
ELSEWHERE = {
    "compute": "that is --model.compute",
    "remat": "that is --model.remat",
    "vocab_size": "the tokenizer says it",
    "pad_id": "the tokenizer says it",
    "eos_ids": "the tokenizer says it",
    "start_id": "the tokenizer says it",
    "image": "the data says it",
}


@dataclass(frozen=True)
class OpenedSetup(Setup):
    """A setup, and where its weights come from."""

    stored: Stored | None = None  # the checkpoint that it starts from

    def weights(self, config: Any, adapter: str | None = None, seed: int = 0) -> Any:
        """The initial model, computed as `config` says: read from the checkpoint, or random."""
        if self.stored is None:
            return initialise(self.family.model(config), seed)
        return self.stored.weights(config, adapter=adapter)

    def pretrained(self, model: Any) -> Pretrained:
        """A model with what belongs to it, to be saved."""
        modules = self.stored.modules if self.stored else None
        return Pretrained(model, self.tokenizer, self.generation_config, self.processor, modules)


@dataclass(frozen=True)
class RunComponents:
    """All that a run needs."""

    task: Task
    stepper: Stepper
    abstract: Any  # the shape of what is trained
    initial: Callable[[], Any]  # what to start from, made when it is needed
    export: Callable[[Any, Path], None]  # writes what is trained to a directory
    fingerprint: dict[str, Any]  # what the settings came to: data, lengths, sizes
    finish: Callable[[RunFiles], None]  # what else a run directory gets at its end


def build(settings: Settings) -> RunComponents:
    """Read the checkpoint's configuration and the data, and put the run together; weights come later."""
    begin = setup(settings.model)
    has_codebooks = settings.task == "language" and _has_codebooks(begin)
    if settings.task == "language" and not has_codebooks:
        check_unused(settings, CODEBOOKS, "to a model without codebooks")
    if has_codebooks and settings.model.init is not None and settings.objective.codebooks == "data":  # type: ignore[attr-defined]
        raise InputError("a checkpoint has its codebooks: leave out --objective.codebooks data, or model.init")
    task = open_task(settings, begin)
    abstract, seed = begin.family.model(task.config), settings.training.seed

    def weights() -> Any:
        return task.prepare_model(begin.weights(task.config, seed=seed))

    make = partial(Stepper, task, settings.optimizer, settings.schedule, settings.training)
    fingerprint = task.fingerprint | {"model": dataclasses.asdict(task.config)}
    if settings.lora.rank:
        return _with_lora(settings, begin, task, abstract, weights, make, fingerprint)
    stepper = make()
    frozen(settings.optimizer, abstract)  # globs that match nothing fail now

    def export(model: Any, directory: Path) -> None:
        begin.pretrained(model).save(directory)

    finish = _draw_codebooks if has_codebooks else _nothing_else
    return RunComponents(task, stepper, abstract, weights, export, fingerprint | {"steps": stepper.steps}, finish)


def _has_codebooks(begin: OpenedSetup) -> bool:
    return begin.family.language is not None and begin.family.language.has_codebooks(begin.config)


def _with_lora(
    settings: Settings,
    begin: OpenedSetup,
    task: Task,
    abstract: Any,
    weights: Any,
    make: Any,
    fingerprint: dict[str, Any],
) -> RunComponents:
    """What is trained is an adapter; the weights are its base."""
    chosen: LoRA = settings.lora
    if settings.optimizer.name in ("adamw-rms", "adafactor"):
        raise InputError(
            f"optimizer {settings.optimizer.name} scales updates by the weights, and those of an adapter start at 0; "
            "choose --optimizer.name adamw --optimizer.learning-rate 1e-3"
        )

    def whole(adapter: Any, base: Any) -> Any:
        return lora.attach(base, adapter, chosen.scale)

    def merged(adapter: Any, base: Any) -> Any:
        return lora.merge(base, adapter, chosen.scale)

    def export(adapter: Any, directory: Path) -> None:
        rows, alpha = begin.family.format.rows(task.config, None), chosen.scale * chosen.rank
        peft.write(adapter, rows, begin.family.peft_task, chosen.rank, alpha, directory, settings.model.init)

    stepper = make(whole, merged, weights)
    initial = partial(lora.initial_adapter, abstract, chosen, settings.training.seed)
    shapes = lora.abstract(abstract, chosen)
    return RunComponents(task, stepper, shapes, initial, export, fingerprint | {"steps": stepper.steps}, _nothing_else)


def open_task(settings: Settings, begin: OpenedSetup) -> Task:
    """The data of a run, joined to its model."""
    check_supported(settings.task, begin.family)
    return TASKS[settings.task].load().open(begin, settings, settings.training.seed)


def open_evaluation(name: str, asked: Any, begin: OpenedSetup, split: str) -> Task:
    """The data to evaluate on, joined to a model. With files of its own, nothing else is read."""
    check_supported(name, begin.family)
    task: type[Task] = TASKS[name].load()
    own, data = getattr(asked.data, split), asked.data
    if not (own or data.train or data.dataset):
        raise InputError(f"there is nothing to evaluate on; name files with --data.{split}, or --data.train")
    if own and not data.dataset and not (hasattr(asked, "split") and data.train):
        asked = dataclasses.replace(asked, data=dataclasses.replace(data, train=own))
    opened = task.open(begin, asked, getattr(asked, "seed", 0), split, training=False)
    if not opened.validation_examples:
        raise InputError(f"there is nothing to evaluate on; name files with --data.{split}{opened.why_no_validation()}")
    return opened


def check_supported(task: str, family: Family) -> None:
    if task not in family.tasks:
        raise InputError(f"the task {task} is for {families.supporting(task)}; the model is a {family.name}")


def _nothing_else(files: RunFiles) -> None:
    """Most runs are complete without."""


def _draw_codebooks(files: RunFiles) -> None:
    """A plot, if the library that draws is there."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        print("no codebooks.png: it needs matplotlib (pip install 'flaxen[plots]')", file=sys.stderr)
        return
    from flaxen.cli.plots import codebooks

    codebooks(loading.load(files.model).model, files.codebooks)


def setup(model: ModelSettings) -> OpenedSetup:
    """Configuration, tokenizer and the like; no weights are read or made."""
    _check_fields(model)
    stored: Stored | None = None
    if model.init is not None:
        stored = loading.read(files.locate(model.init))
        family, config = stored.family, stored.config
        unchangeable = [name for name in _names(model) if name not in family.changeable]
        if unchangeable:
            can = f"only {' and '.join(family.changeable)}" if family.changeable else "none"
            raise InputError(f"model.fields {unchangeable[0]}: a checkpoint is what it is; {can} can be changed")
        config = changed(config, model.fields)
        tokenizer = load_named_tokenizer(model.tokenizer, family) if model.tokenizer else stored.tokenizer()
        if tokenizer is None:
            raise InputError(
                f"{model.init} has no tokenizer files; name a tokenizer: --model.tokenizer, or --tokenizer of eval"
            )
        loading.check_tokenizer(tokenizer, config, model.init)
    else:
        config = changed(families.preset(model.preset) if model.preset else _config_file(model.config), model.fields)
        family = families.of_config(config)
        tokenizer = _tokenizer_of_new(model, family)
        if hasattr(config, "for_vocabulary"):
            config = config.for_vocabulary(tokenizer.size, tokenizer.pad_id, tokenizer.eos_id)
    config = loading.computed_in(config, model.compute, remat=model.remat)
    config = config if model.dropout is None else with_dropout(config, model.dropout)
    config, processor = _for_images(config, family, stored.processor if stored else None, model.image_size)
    return OpenedSetup(family, config, tokenizer, stored.generation if stored else {}, processor, stored)


def _names(model: ModelSettings) -> list[str]:
    return [one.partition("=")[0] for one in model.fields]


def _check_fields(model: ModelSettings) -> None:
    for name in _names(model):
        if name in ELSEWHERE:
            raise InputError(f"model.fields {name}: {ELSEWHERE[name]}")


def _tokenizer_of_new(model: ModelSettings, family: Family) -> Tokenizer:
    """The tokenizer of a model that starts from random weights."""
    bytewise = family.byte_presets is not None and (model.preset or "").startswith(family.byte_presets)
    if model.tokenizer is None and not bytewise:
        raise InputError("a model that starts from nothing needs --model.tokenizer: a directory, a hub id, or bytes")
    return load_named_tokenizer(model.tokenizer or "bytes", family)


def _for_images(
    config: Any, family: Family, processor: ImageProcessor | None, size: int | None
) -> tuple[Any, ImageProcessor | None]:
    """For images of another size, both the encoder and what is done to images change."""
    if family.prompting.reads != "image" or not family.parts:
        if size is not None:
            raise InputError("model.image_size is for models that see images")
        return config, processor
    if size is None:
        return config, processor or ImageProcessor.default(config.encoder.image_size)
    encoder = dataclasses.replace(config.encoder, image_size=(size, size))
    old = processor or ImageProcessor.default(size)
    resized = dataclasses.replace(old, size=(size, size), shortest_edge=None, crop=None)
    return dataclasses.replace(config, encoder=encoder), resized


def load_named_tokenizer(name: str, family: Family = families.T5) -> Tokenizer:
    """The tokenizer of a directory or hub id; or bytes, as models of this family have them."""
    if name == "bytes":
        return family.bytes()
    tokenizer = load_tokenizer(files.locate(name))
    if tokenizer is None:
        raise InputError(f"{name} holds no tokenizer (tokenizer.json, spiece.model or tokenizer_config.json)")
    return tokenizer


def changed(config: Any, fields: tuple[str, ...]) -> Any:
    """A configuration with some fields changed, each given as name=value."""
    known = {field.name: type(getattr(config, field.name)) for field in dataclasses.fields(config)}
    changes: dict[str, Any] = {}
    for one in fields:
        name, equals, value = one.partition("=")
        if name not in known or not equals:
            raise InputError(
                f"model.fields {one!r}: expected name=value{did_you_mean(name, known)}; there are {', '.join(known)}"
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


def _config_file(path: Path | None) -> Any:
    assert path is not None
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise InputError(f"no file {path}; --model.config is a config.json")
    json = files.read_json(path)
    return families.of_json(json, path).format.read_config(json, None)
