"""flaxen preview TASK: show training examples exactly as the model will see them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Generic, TypeVar

import tyro

from flaxen.cli.settings import Settings

S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Preview(Generic[S]):
    """Show decoded training examples and how many there are.

    Example: flaxen preview denoise --model.preset byt5-small --data.train 'texts/*.txt'
    """

    settings: Annotated[S, tyro.conf.arg(name="")]
    recipe: Path | None = None
    """TOML file with settings; flags override it. Examples are in recipes/ in the Flaxen repository. Default: none."""
    examples: int = 3
    """Number of examples to show."""
    step: int = 0
    """Training step, counted from 0, from whose batch the examples are taken."""

    def run(self, given_flags: set[str]) -> None:
        from rich.console import Console

        from flaxen.cli.build import open_setup, open_task
        from flaxen.tasks.task import report_skipped

        task, size = open_task(self.settings, open_setup(self.settings.model)), self.settings.training.batch_size
        console = Console(soft_wrap=True, highlight=False, emoji=False)
        for note in (*task.notes(size), task.vocabulary()):
            console.print(note, markup=False)
        batch = task.batch(self.step, size)
        report_skipped(task.skipped_examples(batch), set())
        for row in range(min(self.examples, size)):
            for title, text in task.format_example(batch, row).items():
                console.print(f"[bold]{title:>7}[/bold]  ", end="")
                console.print(text.replace("\n", "⏎ "), markup=False)
            console.print()
