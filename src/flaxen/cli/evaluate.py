"""flaxen eval TASK MODEL --data.validation …"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

import tyro

from flaxen.cli.settings import Evaluation, ModelSettings
from flaxen.cli.tasks import TASKS
from flaxen.generate.options import Options, make_options

E = TypeVar("E", bound=Evaluation)


@dataclass(frozen=True)
class Eval(Generic[E]):
    """Evaluate a checkpoint."""

    model: tyro.conf.Positional[str]
    """Checkpoint directory or hub id."""
    settings: Annotated[E, tyro.conf.arg(name="")]
    adapter: str | None = None
    """Directory of a LoRA adapter to add to it."""
    tokenizer: str | None = None
    """Directory or hub id of a tokenizer, or `bytes`. Default: the checkpoint's."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """dtype of matrix products."""

    def run(self, given: set[str]) -> None:
        from flaxen.cli.build import open_evaluation, setup
        from flaxen.train.loop import evaluate
        from flaxen.train.step import scorer

        asked: Any = self.settings
        split = getattr(asked, "split", "validation")
        begin = setup(ModelSettings(init=self.model, tokenizer=self.tokenizer, compute=self.compute))
        options = None
        if hasattr(asked, "options") and not asked.loss_only:
            options = _chosen(asked.options, given, asked.objective.longest, begin.generation_config)
        task = open_evaluation(_task_name(asked), asked, begin, split)
        for note in task.evaluation_notes(asked.batch_size):
            print(note, file=sys.stderr)
        model, skipped = begin.weights(task.config, self.adapter), set[str]()
        values = evaluate(task, scorer(task), model, asked.batch_size, asked.examples, skipped)
        if options is not None:
            where = (asked.out, getattr(asked, "sheet", None))
            values |= task.generate_and_score(model, options, asked.batch_size, asked.examples, *where, skipped)
        print(task.describe_evaluated(asked.examples, len(skipped)), file=sys.stderr)
        print(json.dumps(({"split": split} if hasattr(asked, "split") else {}) | values))


def _task_name(asked: Evaluation) -> str:
    return next(name for name, row in TASKS.items() if isinstance(asked, row.evaluation))


def _chosen(options: Options, given: set[str], longest: int, generation: dict[str, Any]) -> Options:
    """What was not typed is left to the checkpoint's own defaults; but the length, to the targets' limit."""
    typed = {f.name: getattr(options, f.name) for f in dataclasses.fields(Options) if f.name in given}
    return make_options({"max_new_tokens": longest} | typed, generation)
