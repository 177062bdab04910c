"""flaxen preview: what the model will see, before any training."""

from dataclasses import dataclass, field

from flaxen.cli.settings import Start
from flaxen.data.corpus import Corpus
from flaxen.tasks.objective import Objective


@dataclass(frozen=True)
class Preview:
    """Show decoded training examples, and how many there are."""

    model: Start
    data: Corpus = field(default_factory=Corpus)
    objective: Objective = field(default_factory=Objective)
    examples: int = 3
    """How many to show."""
    step: int = 0
    """Of which batch."""
    seed: int = 0

    def run(self, given: set[str]) -> None:
        from rich.console import Console

        from flaxen.cli.build import start
        from flaxen.data.store import open_corpus
        from flaxen.tasks.denoise import Denoise

        config, tokenizer, _ = start(self.model)
        task = Denoise(config, self.objective, tokenizer, *open_corpus(self.data, tokenizer), self.seed)
        console, n = Console(soft_wrap=True, highlight=False, emoji=False), task.lengths
        console.print(
            f"{task.examples:,} training and {task.validation_examples:,} validation examples of {n.raw} tokens; each "
            f"has {n.noise} tokens in {n.spans} hole(s): {n.inputs} tokens in, {n.targets} out", markup=False
        )  # fmt: skip
        console.print(
            f"tokenizer: {tokenizer.size:,} ids, sentinels {', '.join(map(str, tokenizer.sentinels[:3]))}, …; "
            f"model: {config.vocab_size:,} rows", markup=False
        )  # fmt: skip
        batch = task.batch(self.step, self.examples)
        for row in range(self.examples):
            for title, text in zip(("text", "reads", "writes"), task.show(batch, row)):
                console.print(f"[bold]{title:>7}[/bold]  ", end="")
                console.print(text.replace("\n", "⏎ "), markup=False)
            console.print()
