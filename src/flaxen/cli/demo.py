"""flaxen demo: from the text in a Python installation to a model that fills blanks, in a few minutes on a CPU."""

import ast
import random
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flaxen.cli.settings import DenoiseSettings, ModelSettings
from flaxen.cli.train import Train
from flaxen.cli.vocab import Vocab
from flaxen.data.corpus import Corpus
from flaxen.tasks.objective import DenoiseObjective
from flaxen.train.run import RunFiles
from flaxen.train.settings import Optimizer, Schedule, Training

if TYPE_CHECKING:
    from rich.console import Console

    from flaxen.pretrained import Pretrained

SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "__pycache__"}
SIZES = {"d_model": 128, "d_head": 32, "d_ff": 256, "n_layers": 2, "n_decoder_layers": 2, "n_heads": 4}


@dataclass(frozen=True)
class Demo:
    """Train a small T5 on text that Python carries, watch it learn, and let it fill blanks (about 3 minutes)."""

    out: Path = Path("flaxen-demo")
    """Directory for the corpus, the vocabulary and the run. Run again to see its results again."""
    steps: int = 3600
    """Of training."""

    def run(self, given: set[str]) -> None:
        from rich.console import Console

        from flaxen.pretrained import load

        console, started = Console(highlight=False, soft_wrap=True), time.monotonic()
        corpus, vocabulary, run = self.out / "corpus.txt", self.out / "vocabulary", self.out / "run"
        files = RunFiles(run)
        self.out.mkdir(parents=True, exist_ok=True)

        console.print("\n[bold]1. A corpus: the documentation that Python carries[/bold]")
        paragraphs = list(_paragraphs())
        random.Random(0).shuffle(paragraphs)  # so that the first 5 %, which validate, are like the rest
        corpus.write_text("\n".join(paragraphs) + "\n", encoding="utf-8")
        words = sum(len(paragraph.split()) for paragraph in paragraphs)
        console.print(f"{len(paragraphs):,} paragraphs, {words:,} words, one on each line of {corpus}")

        console.print("\n[bold]2. A vocabulary[/bold]")
        data = Corpus(train=(str(corpus),), cache=self.out / "tokens")
        console.print(f"$ flaxen vocab {vocabulary} --data.train {corpus} --size 2000", style="dim", markup=False)
        if not vocabulary.exists():
            Vocab(out=vocabulary, data=data, size=2000).run(set())

        console.print("\n[bold]3. Training: write what was cut out of a text[/bold]")
        start = self.out / "start"
        if not start.exists():
            _head_start(vocabulary).save(start)
        console.print(
            "It starts from random weights and two habits, which a large model finds in its first thousands of steps:\n"
            "a hole looks at its neighbours, and the writer looks for the hole of the same number."
        )
        settings = DenoiseSettings(
            out=run,
            model=ModelSettings(init=str(start)),
            data=data,
            # Short examples with two holes: the fewer sentinels there are, the sooner each is understood.
            objective=DenoiseObjective(input_length=32),
            optimizer=Optimizer("adamw-rms", learning_rate=3e-2),
            schedule=Schedule("cosine"),
            training=Training(steps=self.steps, batch_size=16, log_every=200, eval_every=600, save_every=600),
        )
        flags = f"--recipe {files.config}"
        console.print(f"$ flaxen train denoise {flags}", style="dim", markup=False)
        Train(settings).run(set())
        _curve(console, files)

        console.print("\n[bold]4. Blanks in sentences that it has not seen[/bold]")
        held_out = paragraphs[: round(len(paragraphs) * data.validation_percent / 100)]
        _fill(console, load(files.model), held_out, paragraphs[len(held_out) :])

        console.print(f"\n[bold]5. What you have[/bold] after {time.monotonic() - started:.0f} s")
        console.print(
            f"{files.model}  a checkpoint in Hugging Face's form: transformers loads it too\n"
            f"{run}  settings, metrics, checkpoints; kill the training at any moment and run it again\n\n"
            "Next, on text of your own:\n"
            "  flaxen vocab my-vocabulary --data.train 'my-texts/*.txt'\n"
            "  flaxen preview --model.preset t5-v1_1-mini --model.tokenizer my-vocabulary "
            "--data.train 'my-texts/*.txt'\n"
            "  flaxen train denoise --out my-run --model.preset t5-v1_1-mini --model.tokenizer my-vocabulary "
            "--data.train 'my-texts/*.txt'\n"
            f"  flaxen generate {files.model} --text 'The function returns the <extra_id_0> of the list.'",
            markup=False,
        )


def _paragraphs() -> Iterator[str]:
    """Prose out of Python's help topics and the docstrings of its standard library, each paragraph once."""
    from pydoc_data.topics import topics

    seen = set()
    texts = [topics[name] for name in sorted(topics)]
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(root).parts):
            texts += _docstrings(path)
    for text in texts:
        for block in re.split(r"\n\s*\n", text):
            paragraph = " ".join(block.split())
            letters = sum(one.isalpha() or one == " " for one in paragraph)
            prose = len(paragraph) >= 60 and letters >= 0.85 * len(paragraph) and paragraph[-1] in ".:"
            if prose and paragraph not in seen:
                seen.add(paragraph)
                yield paragraph


def _docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # some files of the library are wrong on purpose
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [doc for node in ast.walk(tree) if isinstance(node, kinds) and (doc := ast.get_docstring(node))]


def _head_start(vocabulary: Path) -> "Pretrained":
    """A small T5 with a preference for near neighbours, and with queries that look for keys of their own kind."""
    import jax.numpy as jnp

    from flaxen.cli.build import load_named_tokenizer
    from flaxen.models.t5 import Config
    from flaxen.pretrained import Pretrained, create
    from flaxen.tree import leaves, map_leaves

    tokenizer = load_named_tokenizer(str(vocabulary))
    rows = -(-tokenizer.size // 128) * 128
    config = Config(vocab_size=rows, activation="gelu_new", gated=True, dropout=0.0, **SIZES)  # type: ignore[arg-type]
    model = create(config, seed=0).model
    # Buckets of the distances -1, 1, -2 and 2: one for each head.
    near = jnp.zeros((config.n_buckets, config.n_heads)).at[jnp.array([1, 17, 2, 18]), jnp.arange(4)].set(5.0)
    keys = leaves(model)["decoder.layers.cross.k.weight"]
    habits = {"encoder.bias.weight": near, "decoder.layers.cross.q.weight": keys * config.d_head**-0.5}
    return Pretrained(map_leaves(lambda path, leaf: habits.get(path, leaf), model), tokenizer)


def _curve(console: "Console", files: RunFiles) -> None:
    """The validation records as a table with bars."""
    from rich.table import Table

    records = files.records()
    records = [record for record in records if record["kind"] == "eval"]
    table = Table("step", "loss", "perplexity", "accuracy", "perplexity, as a bar", box=None)
    largest = max(record["perplexity"] for record in records)
    for record in records:
        bar = "█" * max(1, round(40 * record["perplexity"] / largest))
        numbers = f"{record['loss']:.3f}", f"{record['perplexity']:.1f}", f"{100 * record['accuracy']:.1f} %"
        table.add_row(str(record["step"]), *numbers, bar)
    console.print(table)


def _fill(console: "Console", model: "Pretrained", held_out: list[str], training: list[str]) -> None:
    """Blank a word of each sentence, show what the model puts there, and count how often it is the one."""
    from rich.table import Table

    draw = random.Random(1)
    sentences = [s for p in held_out for s in re.split(r"(?<=[.:]) ", p) if 40 <= len(s) <= 100]
    puzzles = []
    for sentence in sentences[:300]:
        places = list(re.finditer(r"(?<= )[a-z]{2,}(?= )", sentence))
        if places:
            place = draw.choice(places)
            blank = f"{sentence[: place.start()]}<extra_id_0>{sentence[place.end() :]}"
            puzzles.append((sentence, place, blank))
    assert model.tokenizer is not None
    _, second = model.tokenizer.sentinels[:2]
    answers = []
    for one in model.generate([blank for *_, blank in puzzles], batch_size=64, max_new_tokens=6):
        ids = one.tokens[: one.tokens.index(second)] if second in one.tokens else one.tokens
        answers.append(model.tokenizer.decode(ids).strip())
    ((common, _),) = Counter(re.findall(r"[a-z]{2,}", " ".join(training))).most_common(1)
    right = sum(answer == s[p.start() : p.end()] for (s, p, _), answer in zip(puzzles, answers))
    always = sum(common == s[p.start() : p.end()] for s, p, _ in puzzles)
    table = Table(
        "sentence with its blank", "model", "original", box=None, title="six that it got, six that it did not"
    )
    pairs = list(zip(puzzles, answers))
    hits = [answer == place[0] for (_, place, _), answer in pairs]
    shown = [pair for pair, hit in zip(pairs, hits) if hit][:6] + [pair for pair, hit in zip(pairs, hits) if not hit][
        :6
    ]
    for (sentence, place, _), answer in shown:
        word = sentence[place.start() : place.end()]
        mark = "[green]" if answer == word else "[yellow]"
        table.add_row(f"{sentence[: place.start()]}____{sentence[place.end() :]}", f"{mark}{answer}[/]", word)
    console.print(table)
    console.print(
        f"\n{right} of {len(puzzles)} blanks filled with the very word of the original; always saying "
        f"'{common}', the commonest word, would fill {always}."
    )
