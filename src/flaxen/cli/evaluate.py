"""flaxen eval TASK MODEL --data.validation …: evaluate a checkpoint on held-out data."""

import dataclasses
import glob
import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

import tyro

from flaxen.atomic import check_output
from flaxen.cli.settings import Evaluation, ModelSettings
from flaxen.cli.tasks import TASKS
from flaxen.generate.options import Options, make_options

E = TypeVar("E", bound=Evaluation)


@dataclass(frozen=True)
class Eval(Generic[E]):
    """Evaluate a checkpoint.

    Example: flaxen eval seq2seq run/model --data.validation pairs.jsonl --data.source question --data.target answer
    """

    model: tyro.conf.Positional[str]
    """Checkpoint directory or Hugging Face hub id."""
    settings: Annotated[E, tyro.conf.arg(name="")]
    adapter: str | None = None
    """Directory or hub id of a LoRA adapter to merge into the model. Default: none."""
    tokenizer: str | None = None
    """Directory or hub id of a tokenizer, or `bytes` for raw bytes. Default: the checkpoint's tokenizer."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Data type of matrix products."""

    def run(self, given_flags: set[str]) -> None:
        from flaxen.cli.build import open_evaluation, open_setup
        from flaxen.train.loop import evaluate
        from flaxen.train.step import scorer

        evaluation: Any = self.settings
        split = getattr(evaluation, "split", "validation")
        setup = open_setup(ModelSettings(init=self.model, tokenizer=self.tokenizer, compute=self.compute))
        options = None
        if hasattr(evaluation, "options") and not evaluation.loss_only:
            options = _resolve_options(
                evaluation.options, given_flags, evaluation.objective.longest, setup.generation_config
            )
        outputs = [out for name in ("out", "sheet") if (out := getattr(evaluation, name, None)) is not None]
        for out in outputs:  # now, not after the evaluation
            check_output(out, _data_files(evaluation.data))
        task = open_evaluation(_task_name(evaluation), evaluation, setup, split)
        for note in task.evaluation_notes(evaluation.batch_size):
            print(note, file=sys.stderr)
        model, skipped = setup.weights(task.config, self.adapter), set[str]()
        values = evaluate(task, scorer(task), model, evaluation.batch_size, evaluation.examples, skipped)
        if options is not None:
            paths = (evaluation.out, getattr(evaluation, "sheet", None))
            values |= task.generate_and_score(
                model, options, evaluation.batch_size, evaluation.examples, *paths, skipped
            )
        print(task.describe_evaluated(evaluation.examples, len(skipped)), file=sys.stderr)
        print(json.dumps(({"split": split} if hasattr(evaluation, "split") else {}) | values))


def _data_files(data: Any) -> list[str]:
    """Return the files that match the patterns of the data, which must not be overwritten."""
    patterns = [*data.train, *data.validation, *getattr(data, "test", ())]
    return [path for pattern in patterns for path in (glob.glob(pattern, recursive=True) or [pattern])]


def _task_name(evaluation: Evaluation) -> str:
    return next(name for name, row in TASKS.items() if isinstance(evaluation, row.evaluation))


def _resolve_options(options: Options, given_flags: set[str], longest: int, generation: dict[str, Any]) -> Options:
    """Fill in options that were not given: max_new_tokens is `longest`, the others are the checkpoint's defaults."""
    explicit = {f.name: getattr(options, f.name) for f in dataclasses.fields(Options) if f.name in given_flags}
    return make_options({"max_new_tokens": longest} | explicit, generation)
