"""One row per task: its settings, its class, and which flags each command leaves out. `flaxen COMMAND TASK` reads them.

A new task is a class in tasks/, its settings, and a row here.
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
from flaxen.errors import InputError

if TYPE_CHECKING:
    from flaxen.tasks.task import Task


@dataclass(frozen=True)
class TaskRow:
    """What the commands know of a task."""

    about: str  # of `flaxen train TASK`
    shows: str  # of `flaxen preview TASK`
    settings: type[Settings]  # of train and preview
    evaluation: type[Evaluation]  # of eval
    home: str  # module:class of the task, imported when it is needed
    not_in_training: tuple[str, ...]  # settings of other tasks, as dotted paths: no flags
    not_in_evaluation: tuple[str, ...]  # settings that say nothing without training

    def load(self) -> "type[Task]":
        module, name = self.home.split(":")
        return getattr(import_module(module), name)


CODEBOOKS = ("optimizer.codebook", "optimizer.restart")  # without codebooks they do nothing
# No flags for other models, though `reference` does the same to them.
VQ_ONLY = ("optimizer.codebook", "optimizer.restart", "optimizer.reference", "schedule.reference")
IMAGES_ONLY = ("model.image_size",)
# They change nothing that is shown; batch size and seed do.
NOT_IN_PREVIEW = (
    "out", "optimizer", "schedule", "lora", "tracking", "generation", "objective.z_loss", "objective.label_smoothing",
    "objective.commit", "objective.normalise", "objective.codebooks", "objective.continued", "training.steps",
    "training.epochs", "training.accumulate", "training.log_every", "training.eval_every", "training.eval_batch_size",
    "training.eval_examples", "training.save_every", "training.keep", "training.keep_best",
)  # fmt: skip
TASKS: dict[str, TaskRow] = {
    "denoise": TaskRow(
        about="Pre-train T5, mT5, ByT5 or LongT5 on plain text by span corruption.",
        shows="Show texts with their masked spans, before training on them. Recipes are those of training.",
        settings=settings.DenoiseSettings,
        evaluation=settings.DenoiseEvaluation,
        home="flaxen.tasks.denoise:Denoise",
        not_in_training=(*VQ_ONLY, *IMAGES_ONLY),
        not_in_evaluation=("objective.z_loss",),
    ),
    "seq2seq": TaskRow(
        about="Fine-tune T5, mT5, ByT5 or LongT5 on pairs of texts.",
        shows="Show pairs as the model will see them. Recipes are those of training.",
        settings=settings.Seq2SeqSettings,
        evaluation=settings.Seq2SeqEvaluation,
        home="flaxen.tasks.seq2seq:Seq2Seq",
        not_in_training=(*VQ_ONLY, *IMAGES_ONLY),
        not_in_evaluation=("objective.label_smoothing", "objective.z_loss", "objective.batching"),
    ),
    "caption": TaskRow(
        about="Train a captioner, ViT + GPT-2, on images with captions.",
        shows="Show which images there are, with their captions. Recipes are those of training.",
        settings=settings.CaptionSettings,
        evaluation=settings.CaptionEvaluation,
        home="flaxen.tasks.caption:Caption",
        not_in_training=VQ_ONLY,
        not_in_evaluation=("objective.label_smoothing", "objective.z_loss"),
    ),
    "language": TaskRow(
        about="Train a Transformer-VQ or a GPT-2 to predict text, bytes or pixels.",
        shows="Show pieces of what the model will predict. Recipes are those of training.",
        settings=settings.LanguageSettings,
        evaluation=settings.LanguageEvaluation,
        home="flaxen.tasks.language:Language",
        not_in_training=IMAGES_ONLY,
        not_in_evaluation=("objective.commit", "objective.normalise", "objective.codebooks"),
    ),
}


def of_name(name: str, where: Any) -> TaskRow:
    if name not in TASKS:
        raise InputError(f"{where}: no task {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name]


def of_run(directory: Path) -> Settings:
    """The settings that a run directory records."""
    from flaxen.train.run import RunFiles, read_config

    path = RunFiles(directory).config
    values = current_settings(read_config(directory), str(path))
    return from_dict(of_name(values.get("task", "denoise"), path).settings, values, str(path))


def without(kind: type, paths: tuple[str, ...]) -> type:
    """The dataclass `kind` whose fields at these dotted paths, as far as it has them, are no flags. Its instances are
    still of `kind`."""
    hints, fields = typing.get_type_hints(kind, include_extras=True), dataclasses.fields(kind)
    changed: list[tuple[str, Any, Any]] = []
    heads = {path.partition(".")[0] for path in paths}
    for known in (one for one in fields if one.name in heads):
        name = known.name
        inner = tuple(path.partition(".")[2] for path in paths if path.startswith(f"{name}.") and name not in paths)
        hint: Any = without(hints[name], inner) if inner else Annotated[hints[name], tyro.conf.Suppress]
        changed.append((name, hint, _default(known, hint, hints[name])))
    made = make_dataclass(kind.__name__, changed, bases=(kind,), frozen=True)
    made.__doc__ = kind.__doc__
    return made


def _default(known: dataclasses.Field, hint: Any, plain: Any) -> Any:
    """The same default, as an instance of the narrowed type where that is another."""
    if known.default is not dataclasses.MISSING:
        return known.default
    if known.default_factory is dataclasses.MISSING:
        # A required field that is no flag is empty; one that is has none.
        return field(default_factory=plain) if not dataclasses.is_dataclass(plain) else field()
    if not isinstance(hint, type):
        return field(default_factory=known.default_factory)
    value = known.default_factory()
    values = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    return field(default_factory=lambda: hint(**values))


def check_unused(given: Settings, paths: tuple[str, ...], where: str) -> None:
    """Refuse settings that do nothing `where` this is said, if a recipe or a flag changes them."""
    plain = TASKS[given.task].settings(model=dataclasses.replace(given.model, image_size=None), out=given.out)
    for path in paths:
        value, default = (attrgetter(path)(one) for one in (given, plain))
        if value != default:
            raise InputError(f"{path}={value!r} does nothing {where}; leave it out")
