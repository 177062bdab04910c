"""Build a run from its settings: tokenizer, model, data, task and stepper."""

import dataclasses
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flaxen import families
from flaxen.atomic_directory import atomic_directory
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

# Configuration fields that model.fields must not set, and what sets them instead.
ELSEWHERE = {
    "compute": "use --model.compute",
    "remat": "use --model.remat",
    "vocab_size": "it is determined by the tokenizer",
    "pad_id": "it is determined by the tokenizer",
    "eos_ids": "it is determined by the tokenizer",
    "start_id": "it is determined by the tokenizer",
    "image": "it is determined by the data",
}


@dataclass(frozen=True)
class OpenedSetup(Setup):
    """A setup together with the checkpoint that its weights are loaded from."""

    stored: Stored | None = None  # None: random weights

    def weights(self, config: Any, adapter: str | None = None, seed: int = 0) -> Any:
        """Load the initial model from the checkpoint or initialise it at random, with this configuration."""
        if self.stored is None:
            return initialise(self.family.model(config), seed)
        return self.stored.weights(config, adapter=adapter)

    def pretrained(self, model: Any) -> Pretrained:
        """Bundle a model with its tokenizer, generation config and image processor, ready to save."""
        modules = self.stored.modules if self.stored else None
        return Pretrained(model, self.tokenizer, self.generation_config, self.processor, modules)

    def save(self, config: Any, directory: Path) -> None:
        """Save everything but the weights of a model with this configuration; `open_run_export` reads it."""
        with atomic_directory(directory) as fresh:
            loading.write_all_but_weights(self.pretrained(self.family.model(config)), fresh)


@dataclass(frozen=True)
class RunComponents:
    """Everything `flaxen train` needs to run."""

    task: Task
    stepper: Stepper
    abstract: Any  # shapes and dtypes of the trained parameters: the model, or a LoRA adapter
    initial: Callable[[], Any]  # makes the initial parameters; called only if there is no checkpoint to resume from
    export: Callable[[Any, Path], None]  # saves the trained parameters to a directory
    write_setup: Callable[[Path], None]  # saves the model without its weights
    fingerprint: dict[str, Any]  # resolved data, lengths and sizes; must not change when a run resumes
    finish: Callable[[RunFiles], None]  # writes additional files when training is complete


def build(settings: Settings) -> RunComponents:
    """Open the configuration and the data of a run. No weights are loaded before `initial` is called."""
    setup = open_setup(settings.model)
    has_codebooks = settings.task == "language" and _has_codebooks(setup)
    if settings.task == "language" and not has_codebooks:
        check_unused(settings, CODEBOOKS, "with a model without codebooks")
    if has_codebooks and settings.model.init is not None and settings.objective.codebooks == "data":  # type: ignore[attr-defined]
        raise InputError(
            "--objective.codebooks data cannot be combined with --model.init, whose checkpoint already has codebooks; "
            "remove it"
        )
    task = open_task(settings, setup)
    abstract, seed = setup.family.model(task.config), settings.training.seed

    def weights() -> Any:
        return task.prepare_model(setup.weights(task.config, seed=seed))

    make = partial(Stepper, task, settings.optimizer, settings.schedule, settings.training)
    fingerprint = task.fingerprint | {"model": dataclasses.asdict(task.config)}
    export, write_setup = exporter(settings, setup, task.config), partial(setup.save, task.config)
    if settings.lora.rank:
        stepper = _lora_stepper(settings, make, weights)
        # An adapter starts from the shapes of the model alone; the base weights are loaded when the stepper first needs
        # them.
        initial: Callable[[], Any] = partial(lora.initial_adapter, abstract, settings.lora, seed)
        abstract = lora.abstract(abstract, settings.lora)
    else:
        stepper, initial = make(), weights
        frozen(settings.optimizer, abstract)  # before training starts, report globs that match no weight
    fingerprint |= {"steps": stepper.steps}
    finish = _draw_codebooks if has_codebooks and not settings.lora.rank else _nothing_else
    return RunComponents(task, stepper, abstract, initial, export, write_setup, fingerprint, finish)


def _has_codebooks(setup: OpenedSetup) -> bool:
    return setup.family.language is not None and setup.family.language.has_codebooks(setup.config)


def exporter(settings: Settings, setup: OpenedSetup, config: Any) -> Callable[..., None]:
    """Return a function (parameters, directory, overwrite) that saves a trained model or LoRA adapter."""

    def export(model: Any, directory: Path, overwrite: bool = False) -> None:
        setup.pretrained(model).save(directory, overwrite=overwrite)

    def export_adapter(adapter: Any, directory: Path, overwrite: bool = False) -> None:
        # PEFT scales an adapter by alpha / rank.
        rank, alpha = settings.lora.rank, settings.lora.scale * settings.lora.rank
        rows, base = setup.family.format.rows(config, None), settings.model.init
        if base is not None and Path(base).expanduser().is_dir():
            base = os.path.abspath(os.path.expanduser(base))
        peft.write(adapter, rows, setup.family.peft_task, rank, alpha, directory, base, overwrite)

    return export_adapter if settings.lora.rank else export


def open_run_export(directory: Path, settings: Settings) -> tuple[Any, Callable[..., None]]:
    """Return the shapes of the parameters that a run trains, and the function that exports them.

    Neither the data nor the initial checkpoint of the run is needed.
    """
    saved = RunFiles(directory).setup
    if not saved.is_dir():  # a run of a version before 0.3
        components = build(settings)
        return components.abstract, components.export
    stored = loading.read(saved, has_weights=False)
    tokenizer = stored.tokenizer()
    if tokenizer is None:
        raise InputError(f"{saved} is damaged: it has no tokenizer; restore it from a backup")
    setup = OpenedSetup(stored.family, stored.config, tokenizer, stored.generation, stored.processor, stored)
    model = setup.family.model(stored.config)
    abstract = lora.abstract(model, settings.lora) if settings.lora.rank else model
    return abstract, exporter(settings, setup, stored.config)


def _lora_stepper(settings: Settings, make: Any, weights: Callable[[], Any]) -> Stepper:
    """Return the stepper of a run that trains a LoRA adapter on top of frozen weights."""
    options: LoRA = settings.lora
    if settings.optimizer.name in ("adamw-rms", "adafactor"):
        raise InputError(
            f"optimizer {settings.optimizer.name} cannot train a LoRA adapter, because it scales updates by the "
            "weights, and half of the adapter's matrices start at 0; "
            "use --optimizer.name adamw --optimizer.learning-rate 1e-3"
        )

    def attach(adapter: Any, base: Any) -> Any:
        return lora.attach(base, adapter, options.scale)

    def merge(adapter: Any, base: Any) -> Any:
        return lora.merge(base, adapter, options.scale)

    return make(attach, merge, weights)


def open_task(settings: Settings, setup: OpenedSetup) -> Task:
    """Open the data of a run and connect it to the model."""
    check_supported(settings.task, setup.family)
    return TASKS[settings.task].load().open(setup, settings, settings.training.seed)


def open_evaluation(name: str, evaluation: Any, setup: OpenedSetup, split: str) -> Task:
    """Open the data to evaluate on. If the split has its own files, the training files are not read."""
    check_supported(name, setup.family)
    task: type[Task] = TASKS[name].load()
    split_files, data = getattr(evaluation.data, split), evaluation.data
    if not (split_files or data.train or data.dataset):
        raise InputError(f"no data to evaluate on; pass files with --data.{split} or --data.train")
    if split_files and not data.dataset and not (hasattr(evaluation, "split") and data.train):
        evaluation = dataclasses.replace(evaluation, data=dataclasses.replace(data, train=split_files))
    opened = task.open(setup, evaluation, getattr(evaluation, "seed", 0), split, training=False)
    if not opened.validation_examples:
        raise InputError(f"no data to evaluate on; pass files with --data.{split}{opened.why_no_validation()}")
    return opened


def check_supported(task: str, family: Family) -> None:
    if task not in family.tasks:
        raise InputError(f"the task {task} requires a model of type {families.supporting(task)}, got a {family.name}")


def _nothing_else(files: RunFiles) -> None:
    """Write no additional files."""


def _draw_codebooks(files: RunFiles) -> None:
    """Plot codebook usage to codebooks.png if matplotlib is installed."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        print(
            "skipped codebooks.png: plotting requires matplotlib; install it with: pip install 'flaxen[plots]'",
            file=sys.stderr,
        )
        return
    from flaxen.cli.plots import codebooks

    codebooks(loading.load(files.model).model, files.codebooks)


def open_setup(model: ModelSettings) -> OpenedSetup:
    """Open the configuration, tokenizer and image processor of a model, without loading or creating weights."""
    _check_fields(model)
    stored: Stored | None = None
    if model.init is not None:
        stored = loading.read(files.locate(model.init))
        family, config = stored.family, stored.config
        unchangeable = [name for name in _field_names(model) if name not in family.changeable]
        if unchangeable:
            can = f"only {' and '.join(family.changeable)} can" if family.changeable else "no field can"
            raise InputError(f"model.fields cannot change {unchangeable[0]} of a checkpoint; {can} be changed")
        config = changed(config, model.fields)
        tokenizer = load_named_tokenizer(model.tokenizer, family) if model.tokenizer else stored.tokenizer()
        if tokenizer is None:
            raise InputError(
                f"{model.init} has no tokenizer; choose one with --model.tokenizer (flaxen eval: --tokenizer)"
            )
        loading.check_tokenizer(tokenizer, config, model.init)
    else:
        config = changed(families.preset(model.preset) if model.preset else _config_file(model.config), model.fields)
        family = families.of_config(config)
        tokenizer = _load_tokenizer_of_new_model(model, family)
        if hasattr(config, "for_vocabulary"):
            config = config.for_vocabulary(tokenizer.size, tokenizer.pad_id, tokenizer.eos_id)
    config = loading.computed_in(config, model.compute, remat=model.remat)
    config = config if model.dropout is None else with_dropout(config, model.dropout)
    config, processor = _resize_images(config, family, stored.processor if stored else None, model.image_size)
    return OpenedSetup(family, config, tokenizer, stored.generation if stored else {}, processor, stored)


def _field_names(model: ModelSettings) -> list[str]:
    return [field.partition("=")[0] for field in model.fields]


def _check_fields(model: ModelSettings) -> None:
    for name in _field_names(model):
        if name in ELSEWHERE:
            raise InputError(f"model.fields cannot set {name}: {ELSEWHERE[name]}")


def _load_tokenizer_of_new_model(model: ModelSettings, family: Family) -> Tokenizer:
    """Load the tokenizer of a model that starts from random weights."""
    bytewise = family.byte_presets is not None and (model.preset or "").startswith(family.byte_presets)
    if model.tokenizer is None and not bytewise:
        raise InputError(
            "--model.tokenizer is required for a model with random weights; expected a directory, a hub id "
            "or the word 'bytes'"
        )
    return load_named_tokenizer(model.tokenizer or "bytes", family)


def _resize_images(
    config: Any, family: Family, processor: ImageProcessor | None, size: int | None
) -> tuple[Any, ImageProcessor | None]:
    """Resize the encoder and the image preprocessing to `size`, if it is given."""
    if family.prompting.reads != "image" or not family.parts:
        if size is not None:
            raise InputError("model.image_size has no effect with a model that does not read images; remove it")
        return config, processor
    if size is None:
        return config, processor or ImageProcessor.default(config.encoder.image_size)
    encoder = dataclasses.replace(config.encoder, image_size=(size, size))
    old = processor or ImageProcessor.default(size)
    resized = dataclasses.replace(old, size=(size, size), shortest_edge=None, crop=None)
    return dataclasses.replace(config, encoder=encoder), resized


def load_named_tokenizer(name: str, family: Family = families.T5) -> Tokenizer:
    """Load a tokenizer from a directory or hub id; `bytes` selects the byte tokenizer of the model family."""
    if name == "bytes":
        return family.bytes()
    tokenizer = load_tokenizer(files.locate(name))
    if tokenizer is None:
        raise InputError(f"{name} has no tokenizer; expected tokenizer.json, spiece.model or tokenizer_config.json")
    return tokenizer


def changed(config: Any, fields: tuple[str, ...]) -> Any:
    """Return the configuration with some fields changed; each change is written name=value."""
    types = {field.name: type(getattr(config, field.name)) for field in dataclasses.fields(config)}
    changes: dict[str, Any] = {}
    for change in fields:
        name, equals, value = change.partition("=")
        if name not in types or not equals:
            raise InputError(
                f"model.fields {change!r}: expected name=value with a known name{did_you_mean(name, types)}; "
                f"available: {', '.join(types)}"
            )
        try:
            # bool("false") is True, so truth values are looked up.
            booleans = {"true": True, "false": False, "1": True, "0": False}
            changes[name] = booleans[value.lower()] if types[name] is bool else types[name](value)
        except (KeyError, ValueError):
            raise InputError(f"model.fields {name} must be of type {types[name].__name__}, got {value!r}") from None
    try:
        return dataclasses.replace(config, **changes)
    except ValueError as error:
        raise InputError(f"model.fields: {error}") from None


def _config_file(path: Path | None) -> Any:
    assert path is not None
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise InputError(f"{path} does not exist; --model.config expects a config.json or a directory with one")
    json = files.read_json(path)
    return families.of_json(json, path).format.read_config(json, None)
