"""flaxen demo language: train a byte-level Transformer-VQ on Python's documentation and sample from it."""

import lzma
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flaxen.cli.settings import LanguageSettings, ModelSettings
from flaxen.cli.train import Train
from flaxen.data.streams import LanguageData
from flaxen.tasks.objective import LanguageObjective
from flaxen.train.run import RunFiles
from flaxen.train.settings import Optimizer, Schedule, Training

PROMPTS = ("The function returns", "If the argument is ")


@dataclass(frozen=True)
class DemoLanguage:
    """Train a small Transformer-VQ model on the bytes of Python's documentation and generate text (about 3 minutes on a
    CPU).

    Example: flaxen demo language --out flaxen-demo-language
    """

    out: Path = Path("flaxen-demo-language")
    """Directory for the corpus and the run. If it already contains a finished run, the demo only shows the results
    again."""
    steps: int = 160
    """Number of training steps."""

    def run(self, given_flags: set[str]) -> None:
        from rich.console import Console
        from rich.table import Table

        from flaxen.cli.demo import _paragraphs, create_directory
        from flaxen.models import vq_lm
        from flaxen.pretrained import load

        console, started = Console(highlight=False, soft_wrap=True), time.monotonic()
        corpus, run = self.out / "corpus.bin", self.out / "run"
        files = RunFiles(run)
        create_directory(self.out, ("corpus.bin", "run"))

        console.print("\n[bold]1. The corpus: documentation from the Python standard library[/bold]")
        paragraphs = list(_paragraphs())
        random.Random(0).shuffle(paragraphs)
        text = "\n".join(paragraphs).encode()
        corpus.write_bytes(text)
        cut = round(0.95 * len(text))
        # Compressed size of the held-out text given the training text: xz of both, minus xz of the training text.
        compressed = 8 * (len(lzma.compress(text)) - len(lzma.compress(text[:cut]))) / (len(text) - cut)
        console.print(
            f"{len(text):,} bytes in {corpus}; the last 5 % are held out. For comparison, xz compresses the held-out "
            f"bytes to {compressed:.2f} bits per byte after compressing the rest."
        )

        console.print("\n[bold]2. Training: predict the next byte[/bold]")
        settings = LanguageSettings(
            out=run,
            model=ModelSettings(preset="vq-tiny"),
            data=LanguageData(train=(str(corpus),), kind="bytes", shares=(95.0, 5.0, 0.0)),
            objective=LanguageObjective(length=2048, update=1024, codebooks="data"),
            optimizer=Optimizer("adamw", learning_rate=3e-3, b2=0.98, clip=0.5),
            schedule=Schedule("cosine", warmup=20, floor=0.1),
            training=Training(
                steps=self.steps, batch_size=8, log_every=50, eval_every=50, eval_examples=24, save_every=100
            ),
        )
        console.print(f"$ flaxen train language --recipe {files.config}", style="dim", markup=False)
        Train(settings).run(set())
        table = Table("step", "bits per byte", "bits per byte (bar)", box=None)
        for record in files.records():
            if record["kind"] == "eval":
                bits = record["bits_per_byte"]
                table.add_row(str(record["step"]), f"{bits:.3f}", "█" * max(1, round(5 * bits)))
        console.print(table)

        console.print("\n[bold]3. Sampled text[/bold], streamed as it is generated")
        model = load(files.model)
        for seed, prompt in enumerate(PROMPTS):
            console.print(f"[bold]{prompt}[/bold]", end="")
            options: dict[str, Any] = {
                "do_sample": True,
                "temperature": 0.7,
                "top_p": 0.9,
                "top_k": 0,
                "max_new_tokens": 240,
                "seed": seed,
            }
            for piece in model.stream(prompt, **options):
                console.print(piece, end="", markup=False)
            console.print("\n")

        memory = model.remember(text[:10_000].decode(errors="ignore"))
        size = vq_lm.state_bytes(memory.state) / 1e6
        console.print(f"[bold]4. Results[/bold] after {time.monotonic() - started:.0f} s")
        console.print(
            f"{files.model}  the trained model\n"
            f"{files.codebooks}  a plot of codebook usage\n"
            f"The model's memory of a text takes {size:.2f} MB, however long the text is.\n\n"
            "Next, on your own file:\n"
            "  flaxen train language --out my-run --model.preset vq-tiny --data.train my-file --data.kind bytes\n"
            f"  flaxen generate {files.model} --text 'The list' --do-sample --stream\n"
            "  flaxen bench language",
            markup=False,
        )
