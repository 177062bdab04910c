"""flaxen demo: pre-train a small T5 on the documentation that ships with Python, in a few minutes on a CPU."""

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
from flaxen.errors import InputError
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
    """Train a small T5 model on Python's documentation and let it fill in missing words (about 3 minutes on a CPU).

    Example: flaxen demo --out flaxen-demo
    """

    out: Path = Path("flaxen-demo")
    """Directory for the corpus, the vocabulary and the run. If it already contains a finished run, the demo only shows
    the results again."""
    steps: int = 3600
    """Number of training steps."""

    def run(self, given_flags: set[str]) -> None:
        from rich.console import Console

        from flaxen.pretrained import load

        console, started = Console(highlight=False, soft_wrap=True), time.monotonic()
        corpus, vocabulary, run = self.out / "corpus.txt", self.out / "vocabulary", self.out / "run"
        files = RunFiles(run)
        create_directory(self.out, ("corpus.txt", "vocabulary", "tokens", "start", "run"))

        console.print("\n[bold]1. The corpus: documentation from the Python standard library[/bold]")
        paragraphs = list(_paragraphs())
        random.Random(0).shuffle(paragraphs)  # so that the first 5 %, the validation data, resemble the rest
        corpus.write_text("\n".join(paragraphs) + "\n", encoding="utf-8")
        words = sum(len(paragraph.split()) for paragraph in paragraphs)
        console.print(f"{len(paragraphs):,} paragraphs, {words:,} words; one paragraph per line of {corpus}")

        console.print("\n[bold]2. The vocabulary[/bold]")
        data = Corpus(train=(str(corpus),), cache=self.out / "tokens")
        console.print(f"$ flaxen vocab {vocabulary} --data.train {corpus} --size 2000", style="dim", markup=False)
        if not vocabulary.exists():
            Vocab(out=vocabulary, data=data, size=2000).run(set())

        console.print("\n[bold]3. Training: restore masked spans of text[/bold]")
        start = self.out / "start"
        if not start.exists():
            _create_initial_model(vocabulary).save(start)
        console.print(
            "The model starts from random weights, except for two patterns that a large model learns in its first\n"
            "few thousand steps: each token attends to its neighbours, and the decoder attends to the sentinel\n"
            "whose text it is restoring."
        )
        settings = DenoiseSettings(
            out=run,
            model=ModelSettings(init=str(start)),
            data=data,
            # Short examples with two masked spans: with fewer sentinels, each is learned sooner.
            objective=DenoiseObjective(input_length=32),
            optimizer=Optimizer("adamw-rms", learning_rate=3e-2),
            schedule=Schedule("cosine"),
            training=Training(steps=self.steps, batch_size=16, log_every=200, eval_every=600, save_every=600),
        )
        flags = f"--recipe {files.config}"
        console.print(f"$ flaxen train denoise {flags}", style="dim", markup=False)
        Train(settings).run(set())
        _print_curve(console, files)

        console.print("\n[bold]4. Missing words in sentences that the model has not seen[/bold]")
        held_out = paragraphs[: round(len(paragraphs) * data.validation_percent / 100)]
        _fill_blanks(console, load(files.model), held_out, paragraphs[len(held_out) :])

        console.print(f"\n[bold]5. Results[/bold] after {time.monotonic() - started:.0f} s")
        console.print(
            f"{files.model}  the trained model in Hugging Face format, which transformers can load\n"
            f"{run}  settings, metrics and checkpoints; interrupted training resumes when you rerun the command\n\n"
            "Next, on your own text:\n"
            "  flaxen vocab my-vocabulary --data.train 'my-texts/*.txt'\n"
            "  flaxen preview denoise --model.preset t5-v1_1-mini --model.tokenizer my-vocabulary "
            "--data.train 'my-texts/*.txt'\n"
            "  flaxen train denoise --out my-run --model.preset t5-v1_1-mini --model.tokenizer my-vocabulary "
            "--data.train 'my-texts/*.txt'\n"
            f"  flaxen generate {files.model} --text 'The function returns the <extra_id_0> of the list.'",
            markup=False,
        )


def create_directory(path: Path, contents: tuple[str, ...]) -> None:
    """Create the directory of a demo; raise if it contains anything else, which the demo could overwrite."""
    foreign = sorted(item.name for item in path.iterdir() if item.name not in contents) if path.is_dir() else []
    if foreign:
        raise InputError(
            f"{path} already exists and contains files that are not part of this demo: {', '.join(foreign[:5])}; "
            "choose another --out"
        )
    path.mkdir(parents=True, exist_ok=True)


def _paragraphs() -> Iterator[str]:
    """Yield paragraphs of prose from Python's help topics and standard-library docstrings, without duplicates."""
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
            letters = sum(character.isalpha() or character == " " for character in paragraph)
            is_prose = len(paragraph) >= 60 and letters >= 0.85 * len(paragraph) and paragraph[-1] in ".:"
            if is_prose and paragraph not in seen:
                seen.add(paragraph)
                yield paragraph


def _docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # some standard-library files are deliberately not valid Python
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [doc for node in ast.walk(tree) if isinstance(node, kinds) and (doc := ast.get_docstring(node))]


def _create_initial_model(vocabulary: Path) -> "Pretrained":
    """Create a small T5 whose attention starts with useful patterns, so that a 3-minute demo has something to show.

    Each encoder head prefers one neighbour (-1, 1, -2 or 2 tokens away). In cross-attention, queries and keys start
    from the same projection, so that a sentinel in the decoder attends to the same sentinel in the encoder.
    """
    import jax.numpy as jnp

    from flaxen.cli.build import load_named_tokenizer
    from flaxen.models.t5 import Config
    from flaxen.pretrained import Pretrained, create
    from flaxen.tree import leaves, map_leaves

    tokenizer = load_named_tokenizer(str(vocabulary))
    rows = -(-tokenizer.size // 128) * 128
    config = Config(vocab_size=rows, activation="gelu_new", gated=True, dropout=0.0, **SIZES)  # type: ignore[arg-type]
    model = create(config, seed=0).model
    # Relative-position buckets for the distances -1, 1, -2 and 2: one per head.
    near = jnp.zeros((config.n_buckets, config.n_heads)).at[jnp.array([1, 17, 2, 18]), jnp.arange(4)].set(5.0)
    # T5's scores are unscaled, so 1 / sqrt(d_head) is folded into the query projection.
    keys = leaves(model)["decoder.layers.cross.k.weight"]
    patterns = {"encoder.bias.weight": near, "decoder.layers.cross.q.weight": keys * config.d_head**-0.5}
    return Pretrained(map_leaves(lambda path, leaf: patterns.get(path, leaf), model), tokenizer)


def _print_curve(console: "Console", files: RunFiles) -> None:
    """Print the validation metrics of each evaluation as a table with bars."""
    from rich.table import Table

    records = files.records()
    records = [record for record in records if record["kind"] == "eval"]
    table = Table("step", "loss", "perplexity", "accuracy", "perplexity (bar)", box=None)
    largest = max(record["perplexity"] for record in records)
    for record in records:
        bar = "█" * max(1, round(40 * record["perplexity"] / largest))
        numbers = f"{record['loss']:.3f}", f"{record['perplexity']:.1f}", f"{100 * record['accuracy']:.1f} %"
        table.add_row(str(record["step"]), *numbers, bar)
    console.print(table)


def _fill_blanks(console: "Console", model: "Pretrained", held_out: list[str], training: list[str]) -> None:
    """Mask one word in each sentence, show what the model predicts, and count how often that is the original word."""
    from rich.table import Table

    draw = random.Random(1)
    sentences = [s for p in held_out for s in re.split(r"(?<=[.:]) ", p) if 40 <= len(s) <= 100]
    puzzles = []
    for sentence in sentences[:300]:
        words = list(re.finditer(r"(?<= )[a-z]{2,}(?= )", sentence))
        if words:
            place = draw.choice(words)
            blank = f"{sentence[: place.start()]}<extra_id_0>{sentence[place.end() :]}"
            puzzles.append((sentence, place, blank))
    assert model.tokenizer is not None
    _, second = model.tokenizer.sentinels[:2]
    answers = []
    for output in model.generate([blank for *_, blank in puzzles], batch_size=64, max_new_tokens=6):
        # The output is "<extra_id_0> answer <extra_id_1> …": cut it at the second sentinel.
        ids = output.tokens[: output.tokens.index(second)] if second in output.tokens else output.tokens
        answers.append(model.tokenizer.decode(ids).strip())
    ((common, _),) = Counter(re.findall(r"[a-z]{2,}", " ".join(training))).most_common(1)
    correct = sum(answer == s[p.start() : p.end()] for (s, p, _), answer in zip(puzzles, answers))
    baseline = sum(common == s[p.start() : p.end()] for s, p, _ in puzzles)
    table = Table("sentence", "model", "original", box=None, title="Six correct and six wrong predictions")
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
        f"\nThe model restored {correct} of {len(puzzles)} missing words. Always predicting the most frequent word, "
        f"'{common}', would restore {baseline}."
    )
