"""flaxen train TASK --out RUN --model.preset … --data.train …"""

import dataclasses
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flaxen.cli.recipe import to_dict
from flaxen.cli.settings import (
    FINE_TUNING,
    PRE_TRAINING,
    CaptionSettings,
    DenoiseSettings,
    LanguageSettings,
    Seq2SeqSettings,
    Settings,
)
from flaxen.train.settings import Optimizer

CALL = ("recipe", "print_config", "quiet")  # what belongs to a call and not to the run


@dataclass(frozen=True)
class Train(Settings):
    """Train, or go on with a run that was stopped."""

    recipe: Path | None = None
    """TOML file with settings; flags come before it. See recipes/."""
    print_config: bool = False
    """Print the resolved settings as TOML, which is a recipe, and stop."""
    quiet: bool = False
    """No progress on standard error."""

    def settings(self) -> dict[str, Any]:
        """What the run depends on."""
        values = to_dict(dataclasses.replace(self, optimizer=self.optimizer.resolved()))
        return {name: value for name, value in values.items() if name not in CALL}

    def run(self, given: set[str]) -> None:
        if self.print_config:
            import tomli_w

            print(tomli_w.dumps(self.settings()), end="")
            return
        from flaxen.cli.build import build
        from flaxen.train import tracking
        from flaxen.train.loop import train
        from flaxen.train.run import Run, check

        check(self.out, self.settings())  # before the work of reading the data
        tracking.check(self.tracking)
        built = build(self)
        # Weights that cannot be read must not leave a new directory behind; a run that goes on may not need them.
        model = None if (self.out / "config.toml").exists() else built.initial()
        with closing(Run(self.out, self.settings(), built.facts)) as run:
            initial = built.initial if model is None else lambda: model
            if model is not None and not self.quiet:  # a run that goes on has said it before
                print(*built.task.notes(self.training.batch_size), sep="\n", file=sys.stderr)
            tracked = tracking.trackers(self.tracking, self.out, self.settings())
            train(run, built.stepper, built.abstract, initial, tracked, built.export, self.quiet)
            built.finish(self.out)


@dataclass(frozen=True)
class TrainDenoise(Train, DenoiseSettings):
    """Pre-train T5, mT5, ByT5 or LongT5 on plain text by span corruption."""


@dataclass(frozen=True)
class TrainSeq2Seq(Train, Seq2SeqSettings):
    """Fine-tune T5, mT5, ByT5 or LongT5 on pairs of texts."""


@dataclass(frozen=True)
class TrainCaption(Train, CaptionSettings):
    """Train a captioner, ViT + GPT-2, on pictures with captions."""

    optimizer: Optimizer = FINE_TUNING  # again: Train comes first, and has another


@dataclass(frozen=True)
class TrainLanguage(Train, LanguageSettings):
    """Train a Transformer-VQ to predict text, bytes or pixels."""

    optimizer: Optimizer = PRE_TRAINING  # again: Train comes first, and has another
