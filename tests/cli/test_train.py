"""Training on the command line: from a text to a model, resuming, inspecting; and how wrong input is reported."""

import json
import math
import re
import shutil
from contextlib import closing
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from commands import Done, child, command

import flaxen
from flaxen import families
from flaxen.data.corpus import Corpus
from flaxen.data.store import open_corpus
from flaxen.data.tokenizers import ByteTokenizer
from flaxen.data.vocabulary import train_bpe
from flaxen.models.t5 import Config
from flaxen.tasks.denoise import Denoise
from flaxen.tasks.objective import DenoiseObjective
from flaxen.train.checkpoint import Checkpoints

pytestmark = pytest.mark.optimised

CONFIG = {
    "model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2,
    "dropout_rate": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("material")
    (directory / "text.txt").write_text("\n".join(topics[name] for name in sorted(topics))[:20_000])
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


DATA = ("--data.train", "{material}/text.txt", "--data.cache", "{material}/cache")
TEXT = (*DATA, "--objective.input-length", "32", "--objective.mean-span", "3")
FLAGS = (
    "--model.config", "{material}/config.json", "--model.tokenizer", "bytes", *TEXT, "--optimizer.name", "adamw",
    "--training.batch-size", "8", "--training.steps", "6", "--training.seed", "3", "--training.log-every", "1",
    "--training.eval-every", "3", "--training.save-every", "2",
)  # fmt: skip


def expand(material: Path, flags: tuple[str, ...]) -> list[object]:
    return [flag.format(material=material) for flag in flags]


def arguments(material: Path, out: Path, *more: object) -> list[object]:
    """Return the flags of the run that most tests start from. Later flags override earlier ones."""
    return ["train", "denoise", "--out", out, *expand(material, FLAGS), *more]


@pytest.fixture(scope="module")
def run(material: Path) -> Path:
    """A complete run. Tests that change it work on a copy."""
    done = command(*arguments(material, material / "run"))
    assert done.code == 0, done.err
    assert "trained 6 steps" in done.err
    return material / "run"


def unfinished(run: Path, out: Path) -> Path:
    """Copy the run in the state it would have if it had been killed after its second checkpoint."""
    shutil.copytree(run, out)
    shutil.rmtree(out / "checkpoints" / "6")
    shutil.rmtree(out / "model")
    return out


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in lines if record["kind"] == kind]


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def contents(directory: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}


def steps_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


# --- A run -----------------------------------------------------------------------------------------------------------


def test_files_of_a_complete_run(run: Path) -> None:
    names = ["checkpoints", "config.toml", "lock", "metrics.jsonl", "model", "run.json", "setup"]
    assert sorted(path.name for path in run.iterdir()) == names
    assert steps_in(run) == ["4", "6"]
    assert [record["step"] for record in records(run, "train")] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in records(run, "eval")] == [3, 6]
    metrics = {"loss", "perplexity", "accuracy", "bits_per_byte"}
    for record in records(run, "train"):
        assert metrics | {"gradient_norm", "learning_rate"} <= set(record)
    for record in records(run, "eval"):
        assert set(record) == {"step", "kind"} | metrics
    resolved = json.loads((run / "run.json").read_text())["resolved"]
    assert (resolved["steps"], resolved["model"]["d_model"], resolved["example"]["inputs"]) == (6, 16, 32)


def test_config_of_a_run_is_a_recipe_that_reproduces_it(run: Path, tmp_path: Path) -> None:
    done = command("train", "denoise", "--recipe", run / "config.toml", "--out", tmp_path / "again", "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert weights(tmp_path / "again") == weights(run)
    assert records(tmp_path / "again", "eval") == records(run, "eval")


def test_print_config_equals_the_config_of_the_run(material: Path, run: Path, tmp_path: Path) -> None:
    done = command(*arguments(material, run, "--print-config"))
    assert (done.code, done.out) == (0, (run / "config.toml").read_text())


def test_transformers_computes_the_same_logits(run: Path) -> None:
    ours = flaxen.load(run / "model")
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(run / "model").eval()
    draw = np.random.default_rng(0)
    ids, decoder_ids = draw.integers(3, 259, (3, 20)), draw.integers(3, 259, (3, 9))
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(ids), decoder_input_ids=torch.tensor(decoder_ids)).logits.numpy()
    np.testing.assert_allclose(ours.logits(ids, decoder_ids), expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    assert ours.tokenizer is not None
    assert tokenizer("a text").input_ids == ours.tokenizer.encode("a text")


def test_rerunning_a_complete_run_changes_nothing(material: Path, run: Path) -> None:
    before = contents(run)
    done = command(*arguments(material, run))
    assert (done.code, done.message) == (0, "resuming from step 6 of 6 the run is already complete (6 steps)")
    assert contents(run) == before


def test_settings_that_do_not_affect_results_may_change_on_resume(material: Path, run: Path, tmp_path: Path) -> None:
    """The training text may also be moved."""
    out = unfinished(run, tmp_path / "run")
    shutil.copy(material / "text.txt", tmp_path / "moved.txt")
    free = ["--training.log-every", 2, "--training.keep", 1, "--tracking.tensorboard", "--tracking.name", "other"]
    done = command(*arguments(material, out, *free, "--data.train", tmp_path / "moved.txt"))
    assert done.code == 0, done.err
    assert weights(out) == weights(run)
    assert [record["step"] for record in records(out, "train")] == [1, 2, 3, 4, 6]
    assert records(out, "eval") == records(run, "eval")
    assert steps_in(out) == ["6"]
    (events,) = out.glob("events.*")
    for tag in (b"train/loss", b"eval/accuracy"):
        assert tag in events.read_bytes()


@pytest.mark.parametrize("size", [5, 32])
def test_eval_equals_the_evaluation_of_the_run(size: int, material: Path, run: Path) -> None:
    """To 1e-5 for any batch size: only the order of summation differs."""
    done = command("eval", "denoise", run / "model", *expand(material, TEXT), "--seed", 3, "--batch-size", size)
    assert done.code == 0, done.err
    expected = {name: value for name, value in records(run, "eval")[-1].items() if name not in ("step", "kind")}
    assert json.loads(done.out) == pytest.approx(expected, rel=1e-5)


def test_eval_needs_no_training_text(material: Path, run: Path, tmp_path: Path) -> None:
    (tmp_path / "held out.txt").write_text((material / "text.txt").read_text()[:3000])
    held_out = ["--data.validation", tmp_path / "held out.txt", "--data.cache", tmp_path, *expand(material, TEXT[4:])]
    done = command("eval", "denoise", run / "model", *held_out)
    assert done.code == 0, done.err
    assert math.isfinite(json.loads(done.out)["loss"])


def test_training_starts_from_a_transformers_checkpoint(material: Path, byt5: Path, tmp_path: Path) -> None:
    """The first loss equals the one of transformers to 1e-5."""
    out = tmp_path / "run"
    flags = ["--model.init", byt5, *expand(material, TEXT), "--training.batch-size", 4, "--training.steps", 2]
    flags += ["--optimizer.name", "adamw", "--training.log-every", 1, "--quiet"]
    done = command("train", "denoise", "--out", out, *flags)
    assert done.code == 0, done.err
    corpus = Corpus((str(material / "text.txt"),), cache=material / "cache")
    tokenizer = ByteTokenizer()
    task = Denoise(
        families.T5, Config(), DenoiseObjective(32, mean_span=3.0), tokenizer, *open_corpus(corpus, tokenizer), 0
    )
    batch = {name: torch.tensor(array.astype(np.int64)) for name, array in task.batch(0, 4).items()}
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(byt5).eval()
    with torch.no_grad():
        expected = float(theirs(**batch).loss)
    assert records(out, "train")[0]["loss"] == pytest.approx(expected, rel=1e-5)
    trained = flaxen.load(out / "model")
    assert (trained.config.n_layers, trained.config.n_decoder_layers, trained.config.vocab_size) == (4, 1, 384)
    assert weights(out) != (byt5 / "model.safetensors").read_bytes()


# --- Preview and replay ----------------------------------------------------------------------------------------------


CODES = "[bold]x[/bold] :smile: y "


@pytest.fixture(scope="module")
def diverged(material: Path) -> Done:
    """A run with a huge learning rate, whose loss is not finite at the second step."""
    wild = ["--optimizer.learning-rate", "1e30", "--optimizer.clip", 0, "--training.eval-every", 0]
    more = ["--training.save-every", 1, "--training.keep", 9, "--quiet"]
    return command(*arguments(material, material / "diverged", *wild, *more))


@pytest.fixture(scope="module")
def inspected(material: Path, run: Path, diverged: Done) -> dict[str, Done]:
    """Results of all commands that only read a run, made in one process."""
    (material / "codes.txt").write_text(f"{CODES}\n" * 100)
    shown = ["--data.train", material / "codes.txt", *expand(material, TEXT[2:])]
    before = contents(run)
    commands: dict[str, list[object]] = {
        "preview": ["preview", *expand(material, FLAGS[:4]), *shown, "--examples", 2],
        "replay 5": ["replay", run, "--step", 5],
        "replay 2": ["replay", run, "--step", 2, "--examples", 1, "--weights", 3],
        "too late": ["replay", run, "--step", 7],
        "no run": ["replay", material, "--step", 1],
        "diverged": ["replay", material / "diverged", "--step", 2],
    }
    done = dict(zip(commands, child(*commands.values())))
    assert contents(run) == before
    return done


def test_preview(inspected: dict[str, Done]) -> None:
    done = inspected["preview"]
    assert (done.code, done.err) == (0, "")
    # 100 lines of 26 tokens, the first 5 of which are validation data, in rows of 34.
    assert "72 training and 3 validation examples of 34 tokens; each has 5 tokens in 2 masked span" in done.out
    assert "32 input tokens, 8 target tokens" in done.out
    assert "384 ids, sentinels 258, 257, 256, …; model: 384 rows" in done.out
    assert [done.out.count(f"{title}  ") for title in ("   text", "  input", " target")] == [2, 2, 2]
    # The text is printed verbatim: no markup, no emoji.
    assert all(text.rstrip() in CODES * 100 for text in re.findall("   text  (.*)", done.out))
    assert done.out.count("‹0›") == done.out.count("‹1›") == 4


@pytest.mark.parametrize(
    ("step", "start"), [(5, "checkpoint 4, steps to compute: 1"), (2, "step 0, steps to compute: 2")]
)
def test_replay_reproduces_loss_and_gradient_norm_exactly(
    step: int, start: str, run: Path, inspected: dict[str, Done]
) -> None:
    done, record = inspected[f"replay {step}"], records(run, "train")[step - 1]
    assert (done.code, done.err) == (0, "")
    assert start in done.out
    numbers = f"loss {record['loss']!r}, gradient norm {record['gradient_norm']!r}"
    assert f"step {step}: {numbers}, learning rate {record['learning_rate']!r}" in done.out
    assert "all gradients are finite" in done.out
    shown = (done.out.count("   text  "), done.out.count(".weight"))
    assert shown == ((2, 12) if step == 5 else (1, 3))


def test_invalid_replays_are_reported(material: Path, inspected: dict[str, Done]) -> None:
    late, none = inspected["too late"], inspected["no run"]
    assert (late.code, late.err) == (1, "flaxen: --step must be between 1 and 6, got 7\n")
    assert (none.code, none.err) == (1, f"flaxen: {material} is not a run directory: it has no config.toml\n")


def test_non_finite_loss_stops_the_run(material: Path, diverged: Done, inspected: dict[str, Done]) -> None:
    out = material / "diverged"
    assert diverged.code == 1
    assert diverged.err.startswith("flaxen: training diverged at step 2: the loss is ")
    assert f"flaxen replay {out} --step 2\n" in diverged.err
    assert steps_in(out) == ["1"]
    assert not (out / "model").exists()
    assert [record["step"] for record in records(out, "train")] == [1]
    replayed = inspected["diverged"]
    assert (replayed.code, replayed.err) == (0, "")
    assert "starting from checkpoint 1, steps to compute: 1" in replayed.out
    assert re.search(r"step 2: .*\b(nan|inf)\b", replayed.out)
    assert "gradients have non-finite entries" in replayed.out


# --- Bad input -------------------------------------------------------------------------------------------------------

BAD = {
    "no such file": (["--data.train", "{tmp}/txet.txt"], 1, "{tmp}/txet.txt does not exist (did you mean 'text.txt'?)"),
    "empty corpus": (["--data.train", "{tmp}/empty.txt"], 1, "{tmp}/empty.txt contains no documents"),
    "smaller than an example": (["--data.train", "{tmp}/short.txt"], 1, "fewer than the 34 of one example"),
    "a binary file": (["--data.train", "{tmp}/binary.txt"], 1, "{tmp}/binary.txt looks like a binary file"),
    "not UTF-8": (["--data.train", "{tmp}/latin.txt"], 1, "latin.txt, line 2: byte 5 (0xe9) is not UTF-8"),
    "no sentinels": (["--model.tokenizer", "{tmp}/bare"], 1, "the tokenizer has no sentinels"),
    "no tokenizer": (["--model.tokenizer", "{tmp}/empty"], 1, "has no tokenizer; expected tokenizer.json"),
    "too many holes": (
        ["--objective.input-length", "256", "--objective.noise-density", "0.5", "--objective.mean-span", "1"],
        1, "have 127 masked spans, but the tokenizer has only 100 sentinels; reduce objective.input_length or increase",
    ),
    "pieces": (["--training.accumulate", "3"], 2, "batch_size=8 must be a multiple of training.accumulate=3"),
    "steps and epochs": (["--training.epochs", "2"], 2, "training.steps cannot be combined with training.epochs"),
    "two starts": (["--model.preset", "t5-small"], 2, "exactly one of model.init, model.preset and model.config"),
    "a flag": (["--training.stepz", "2"], 2, "--training.steps"),
    "warmup": (["--schedule.warmup", "6"], 1, "schedule.warmup=6 must be less than the 6 steps of the run"),
    "metric": (["--training.keep-best", "los"], 1, "unknown metric 'los' (did you mean 'loss'?); available: loss, per"),
    "tracker": (["--tracking.wandb", "project"], 1, "requires wandb; install it with: pip install 'wandb'"),
    "recipe": (["--recipe", "{tmp}/none.toml"], 1, "{tmp}/none.toml does not exist; --recipe"),
    "a file as output": (["--out", "{tmp}/text.txt"], 1, "{tmp}/text.txt is a file"),
    "something else there": (["--out", "{tmp}/thesis"], 1, "is not a Flaxen run directory (it contains thesis.tex)"),
    "checkpoints of a run": (["--out", "{tmp}/orphan"], 1, "is not a Flaxen run directory (it contains checkpoints)"),
}  # fmt: skip


@pytest.fixture
def bad(material: Path, tmp_path: Path) -> Path:
    """A directory of unusable inputs and outputs."""
    shutil.copy(material / "text.txt", tmp_path / "text.txt")
    (tmp_path / "empty.txt").write_text("\n \n\n")
    (tmp_path / "short.txt").write_text("short\ntext\n")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "latin.txt").write_bytes(b"fine\n\xe9t\xe9\n")
    for name in ("empty", "bare", "thesis", "orphan/checkpoints/4"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "thesis" / "thesis.tex").write_text("mine")
    return tmp_path


def assert_rejected(done: Done, code: int, words: str) -> None:
    assert done.code == code, done.err
    assert words in done.message
    assert "Traceback" not in done.err
    assert done.out == ""
    if code == 1:
        assert done.err.startswith("flaxen: ")


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_message_and_leaves_nothing(case: str, material: Path, bad: Path) -> None:
    flags, code, words = BAD[case]
    if case == "no sentinels":
        for name, content in train_bpe([(bad / "text.txt").read_text()], 300, sentinels=0).items():
            (bad / "bare" / name).write_bytes(content)
    before = contents(bad)
    done = command(*arguments(material, bad / "run", *(flag.format(tmp=bad) for flag in flags)))
    assert_rejected(done, code, words.format(tmp=bad))
    assert contents(bad) == before
    assert not list((material / "cache").glob("*.partial"))


def train_new_model(material: Path, out: Path, *start: object) -> list[object]:
    return ["train", "denoise", "--out", out, *start, *expand(material, TEXT), "--training.steps", 2]


def test_unknown_preset_is_reported(material: Path, tmp_path: Path) -> None:
    done = command(
        *train_new_model(material, tmp_path / "run", "--model.preset", "t5-smal", "--model.tokenizer", "bytes")
    )
    assert_rejected(done, 1, "unknown preset 't5-smal' (did you mean 't5-small'?)")
    assert list(tmp_path.iterdir()) == []


def test_mismatched_checkpoint_is_reported(material: Path, run: Path, tmp_path: Path) -> None:
    """By its model_type, or by its weights, which are only read when training starts."""
    for name in ("kind", "weights"):
        shutil.copytree(run / "model", tmp_path / name)
    config = json.loads((run / "model" / "config.json").read_text())
    (tmp_path / "kind" / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    (tmp_path / "weights" / "config.json").write_text(json.dumps({**config, "num_layers": 2}))
    before = contents(tmp_path)
    for name, words in (("kind", "model_type 'bert' is not supported"), ("weights", "encoder.block.1.")):
        done = command(*train_new_model(material, tmp_path / "run", "--model.init", tmp_path / name))
        assert_rejected(done, 1, words)
    assert contents(tmp_path) == before


def test_mismatched_checkpoints_of_a_run_are_reported(material: Path, run: Path, tmp_path: Path) -> None:
    out = unfinished(run, tmp_path / "run")
    shutil.rmtree(out / "checkpoints")
    with closing(Checkpoints(out / "checkpoints")) as others:
        others.save(4, {"model": {"embedding": {"weight": jnp.zeros((384, 32))}}, "step": jnp.zeros((), jnp.int32)}, {})
    before = contents(out)
    done = command(*arguments(material, out))
    assert_rejected(done, 1, f"checkpoint 4 in {out / 'checkpoints'} belongs to another model or optimizer")
    assert "missing in the checkpoint" in done.message
    after = contents(out)
    assert after.pop(out / "config.toml") != before.pop(out / "config.toml")  # which records the new path
    assert after == before


def test_changed_settings_are_named(material: Path, run: Path) -> None:
    before = contents(run)
    flags = ["--training.steps", 7, "--training.seed", 4, "--optimizer.b1", 0.8, "--model.remat"]
    done = command(*arguments(material, run, *flags))
    assert_rejected(done, 1, f"cannot resume the run in {run} with changed settings or data:")
    for line in (
        "model.remat: was False, is True",
        "optimizer.b1: was 0.9, is 0.8",
        "training.seed: was 3, is 4",
        "training.steps: was 6, is 7",
    ):
        assert f"  {line}\n" in done.err
    assert done.err.count(": was ") == 4
    assert contents(run) == before


def test_changed_data_is_named(material: Path, run: Path, tmp_path: Path) -> None:
    before = contents(run)
    (tmp_path / "text.txt").write_text((material / "text.txt").read_text() + " and more")
    done = command(*arguments(material, run, "--data.train", tmp_path / "text.txt"))
    assert_rejected(done, 1, "training_data: was '")
    assert contents(run) == before


def test_run_in_use_by_another_process_is_reported(material: Path, run: Path) -> None:
    import fcntl

    with (run / "lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert_rejected(command(*arguments(material, run)), 1, f"another process is training in {run}")


def test_full_disk_loses_nothing(material: Path, run: Path, tmp_path: Path) -> None:
    """A file size limit simulates a full disk: neither the tokens nor a checkpoint fit.

    Earlier checkpoints stay intact, and without the limit the same command completes the run.
    """
    out = unfinished(run, tmp_path / "run")
    before = contents(out / "checkpoints")
    fresh = arguments(material, tmp_path / "new", "--data.cache", tmp_path / "cache", "--quiet")
    tokens, checkpoint = child(fresh, arguments(material, out, "--quiet"), limit=10_000)

    assert_rejected(tokens, 1, f"not enough space in {tmp_path / 'cache'} for the tokens of {material / 'text.txt'}")
    assert not (tmp_path / "new").exists()
    assert list((tmp_path / "cache").iterdir()) == []

    assert_rejected(checkpoint, 1, f"cannot write a checkpoint to {out / 'checkpoints'}: ")
    assert "File too large" in checkpoint.err
    assert "Complete checkpoints: 4. If the disk is full" in checkpoint.err
    assert contents(out / "checkpoints") == before
    assert not (out / "model").exists()

    done = command(*arguments(material, out, "--quiet"))
    assert done.code == 0, done.err
    assert weights(out) == weights(run)
    assert [record["step"] for record in records(out, "train")] == [1, 2, 3, 4, 5, 6]
