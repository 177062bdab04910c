"""flaxen preview [seq2seq | caption | language]: what the model will see, before any training."""

from dataclasses import dataclass, field
from pathlib import Path

import tyro

from flaxen.cli.settings import CaptionSettings, DenoiseSettings, LanguageSettings, Seq2SeqSettings, Settings
from flaxen.train.settings import LoRA, Optimizer, Schedule, Tracking


@dataclass(frozen=True)
class Preview(Settings):
    """Show decoded training examples, and how many there are."""

    # No flags, but in recipes: they change nothing that is shown.
    out: tyro.conf.Suppress[Path] = Path()
    optimizer: tyro.conf.Suppress[Optimizer] = field(default_factory=Optimizer)
    schedule: tyro.conf.Suppress[Schedule] = field(default_factory=Schedule)
    lora: tyro.conf.Suppress[LoRA] = field(default_factory=LoRA)
    tracking: tyro.conf.Suppress[Tracking] = field(default_factory=Tracking)
    recipe: Path | None = None
    """TOML file with settings; flags come before it. See recipes/."""
    examples: int = 3
    """How many to show."""
    step: int = 0
    """Of which batch."""

    def run(self, given: set[str]) -> None:
        from rich.console import Console

        from flaxen.cli.build import make_task, start

        begin = start(self.model)
        task, tokenizer, size = make_task(self, begin), begin.tokenizer, self.training.batch_size
        console = Console(soft_wrap=True, highlight=False, emoji=False)
        for note in task.notes(size):
            console.print(note, markup=False)
        marks = tokenizer.sentinels if isinstance(self, DenoiseSettings) else ()
        sentinels = f", sentinels {', '.join(map(str, marks[:3]))}, …" if marks else ""
        console.print(
            f"tokenizer: {tokenizer.size:,} ids{sentinels}; model: {begin.config.vocab_size:,} rows", markup=False
        )
        batch = task.batch(self.step, size)
        for row in range(min(self.examples, size)):
            for title, text in task.show(batch, row).items():
                console.print(f"[bold]{title:>7}[/bold]  ", end="")
                console.print(text.replace("\n", "⏎ "), markup=False)
            console.print()


@dataclass(frozen=True)
class PreviewDenoise(Preview, DenoiseSettings):
    """Show texts with their holes, before training on them. Flags and recipes are those of training."""


@dataclass(frozen=True)
class PreviewSeq2Seq(Preview, Seq2SeqSettings):
    """Show pairs as the model will see them. Flags and recipes are those of training."""


@dataclass(frozen=True)
class PreviewCaption(Preview, CaptionSettings):
    """Show which pictures there are, with their captions. Flags and recipes are those of training."""

    optimizer: tyro.conf.Suppress[Optimizer] = field(default_factory=Optimizer)


@dataclass(frozen=True)
class PreviewLanguage(Preview, LanguageSettings):
    """Show pieces of what the model will predict. Flags and recipes are those of training."""

    optimizer: tyro.conf.Suppress[Optimizer] = field(default_factory=Optimizer)
