"""The table of tasks: settings, class, and the flags that each `flaxen COMMAND TASK` hides.

To add a task, write a class in tasks/ and its settings, and add a row here.
"""

import dataclasses
import typing
from dataclasses import dataclass, field, make_dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from flaxen.cli import settings
from flaxen.cli.recipe import from_dict
from flaxen.cli.renamed import current_settings
from flaxen.cli.settings import Evaluation, Settings
from flaxen.errors import InputError, unknown

if TYPE_CHECKING:
    from flaxen.tasks.task import Task


@dataclass(frozen=True)
class TaskRow:
    """What the commands need to know about a task."""

    about: str  # description of `flaxen train TASK`
    shows: str  # description of `flaxen preview TASK`
    settings: type[Settings]  # flags of train and preview
    evaluation: type[Evaluation]  # flags of eval; its docstring is the description
    home: str  # module:class of the task, imported on demand
    not_in_training: tuple[str, ...]  # dotted paths of settings that only other tasks use: not offered as flags
    not_in_evaluation: tuple[str, ...]  # settings that only affect training

    def load(self) -> "type[Task]":
        """Import the class of the task."""
        module, name = self.home.split(":")
        return getattr(import_module(module), name)


CODEBOOKS = ("optimizer.codebook", "optimizer.restart")  # no effect on models without codebooks
# Offered only where a Transformer-VQ can be trained. (`reference` would work with other models too.)
VQ_ONLY = ("optimizer.codebook", "optimizer.restart", "optimizer.reference", "schedule.reference")
IMAGES_ONLY = ("model.image_size",)
# Settings that do not change the examples. (Batch size and seed do.)
NOT_IN_PREVIEW = (
    "out", "optimizer", "schedule", "lora", "tracking", "generation", "objective.z_loss", "objective.label_smoothing",
    "objective.commit", "objective.normalise", "objective.codebooks", "objective.continued", "training.steps",
    "training.epochs", "training.accumulate", "training.log_every", "training.eval_every", "training.eval_batch_size",
    "training.eval_examples", "training.save_every", "training.keep", "training.keep_best",
)  # fmt: skip
TASKS: dict[str, TaskRow] = {
    "denoise": TaskRow(
        about="Pre-train T5, mT5, umT5, ByT5 or LongT5 on plain text by span corruption.\n\n"
        "Example: flaxen train denoise --out run --model.preset byt5-small --data.train 'texts/*.txt'",
        shows="Show denoising examples: the text, the input with masked spans, and the target.\n\n"
        "Example: flaxen preview denoise --model.preset byt5-small --data.train 'texts/*.txt'",
        settings=settings.DenoiseSettings,
        evaluation=settings.DenoiseEvaluation,
        home="flaxen.tasks.denoise:Denoise",
        not_in_training=(*VQ_ONLY, *IMAGES_ONLY),
        not_in_evaluation=("objective.z_loss",),
    ),
    "seq2seq": TaskRow(
        about="Fine-tune T5, mT5, umT5, ByT5 or LongT5 on pairs of source and target text.\n\n"
        "Example: flaxen train seq2seq --out run --model.init google/flan-t5-small --data.train train.jsonl "
        "--data.source article --data.target summary",
        shows="Show pairs of source and target text as the model will see them.\n\n"
        "Example: flaxen preview seq2seq --model.init google/flan-t5-small --data.train train.jsonl "
        "--data.source article --data.target summary",
        settings=settings.Seq2SeqSettings,
        evaluation=settings.Seq2SeqEvaluation,
        home="flaxen.tasks.seq2seq:Seq2Seq",
        not_in_training=(*VQ_ONLY, *IMAGES_ONLY),
        not_in_evaluation=("objective.label_smoothing", "objective.z_loss", "objective.batching"),
    ),
    "caption": TaskRow(
        about="Train a ViT + GPT-2 captioner on images with captions.\n\n"
        "Example: flaxen train caption --out run --model.init captioner --data.train captions.jsonl",
        shows="Show images with their captions as the model will see them.\n\n"
        "Example: flaxen preview caption --model.init captioner --data.train captions.jsonl",
        settings=settings.CaptionSettings,
        evaluation=settings.CaptionEvaluation,
        home="flaxen.tasks.caption:Caption",
        not_in_training=VQ_ONLY,
        not_in_evaluation=("objective.label_smoothing", "objective.z_loss"),
    ),
    "language": TaskRow(
        about="Train a Transformer-VQ or GPT-2 language model on text, bytes or pixels.\n\n"
        "Example: flaxen train language --out run --model.preset vq-tiny --data.train enwik8 --data.kind bytes",
        shows="Show training sequences as the language model will see them.\n\n"
        "Example: flaxen preview language --model.preset vq-tiny --data.train enwik8 --data.kind bytes",
        settings=settings.LanguageSettings,
        evaluation=settings.LanguageEvaluation,
        home="flaxen.tasks.language:Language",
        not_in_training=IMAGES_ONLY,
        not_in_evaluation=("objective.commit", "objective.normalise", "objective.codebooks"),
    ),
}


def of_name(name: str, where: Any) -> TaskRow:
    """Look up a task; `where` is the file that names it, for the error message."""
    if name not in TASKS:
        raise InputError(f"{where}: {unknown('task', name, TASKS)}")
    return TASKS[name]


def of_run(directory: Path) -> Settings:
    """Load the settings that a run directory records."""
    from flaxen.train.run import RunFiles, read_config

    path = RunFiles(directory).config
    values = current_settings(read_config(directory), str(path))
    return from_dict(of_name(values.get("task", "denoise"), path).settings, values, str(path))


def without(kind: type, paths: tuple[str, ...]) -> type:
    """Return a subclass of `kind` whose fields at these dotted paths are not flags; paths it lacks are ignored."""
    hints, fields = typing.get_type_hints(kind, include_extras=True), dataclasses.fields(kind)
    changed: list[tuple[str, Any, Any]] = []
    heads = {path.partition(".")[0] for path in paths}
    for original in (candidate for candidate in fields if candidate.name in heads):
        name = original.name
        inner = tuple(path.partition(".")[2] for path in paths if path.startswith(f"{name}.") and name not in paths)
        hint: Any = without(hints[name], inner) if inner else Annotated[hints[name], tyro.conf.Suppress]
        changed.append((name, hint, _default(original, hint, hints[name])))
    # A subclass, so that narrowed settings are accepted wherever `kind` is.
    narrowed = make_dataclass(kind.__name__, changed, bases=(kind,), frozen=True)
    # A generated dataclass gets its signature as its docstring, and the commands show the docstring.
    narrowed.__doc__ = kind.__doc__
    return narrowed


def _default(original: dataclasses.Field, hint: Any, plain: Any) -> Any:
    """Return the default of a field; if its type was narrowed, as an instance of the narrowed type."""
    if original.default is not dataclasses.MISSING:
        return original.default
    if original.default_factory is dataclasses.MISSING:
        # A required field that is hidden gets an empty value; a nested dataclass stays required.
        return field(default_factory=plain) if not dataclasses.is_dataclass(plain) else field()
    if not isinstance(hint, type):
        return field(default_factory=original.default_factory)
    value = original.default_factory()
    values = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    return field(default_factory=lambda: hint(**values))


def check_unused(run_settings: Settings, paths: tuple[str, ...], where: str) -> None:
    """Raise if a flag or recipe changes one of these settings, which have no effect; `where` says in which case."""
    defaults = TASKS[run_settings.task].settings(
        model=dataclasses.replace(run_settings.model, image_size=None), out=run_settings.out
    )
    for path in paths:
        value, default = (attrgetter(path)(source) for source in (run_settings, defaults))
        if value != default:
            raise InputError(f"{path}={value!r} has no effect {where}; remove it")
