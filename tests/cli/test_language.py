"""flaxen train, eval and generate with a Transformer-VQ; interrupted runs resume bit for bit."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from commands import Done, command

from flaxen.data.tokenizers import load_tokenizer
from flaxen.train.settings import RATES
from flaxen.tree import leaves

SMALL = ("d_model=32", "d_k=8", "d_v=32", "n_layers=2", "n_codes=16", "block=16", "window=16")
FIELDS = ("--model.preset", "vq-tiny", "--model.fields", *SMALL)
DATA = ("--data.train", "text.bin", "--data.kind", "bytes", "--objective.length", "64", "--objective.update", "32")
NOISE = ("dropout=0.1", "position_drop=0.1", "layer_drop=0.1", "embedding_dropout=0.1")


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    words = np.random.default_rng(0).choice(["one ", "two ", "three ", "many\n"], 3000)
    (tmp_path / "text.bin").write_bytes("".join(words).encode())
    return tmp_path


def run(*arguments: str) -> Done:
    done = command(*arguments)
    assert done.code == 0, done.err
    return done


def fails(arguments: tuple[str, ...], message: str) -> None:
    done = command(*arguments)
    assert done.code in (1, 2), done.out
    assert message in done.message


def train(out: str, *flags: str) -> tuple[str, ...]:
    return ("train", "language", "--out", out, *FIELDS, *DATA, "--training.batch-size", "4", *flags)


def test_train_evaluate_and_generate(text: Path) -> None:
    """Evaluation does not depend on batch size or update length, and generation from a saved memory is exact."""
    run(*train("run", "--training.steps", "60", "--optimizer.learning-rate", "1e-2", "--objective.codebooks", "data"))
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["kind"] == "eval"][-1]
    assert last["bits_per_byte"] == pytest.approx(last["loss"] / math.log(2))
    assert last["bits_per_byte"] < 4
    assert Path("run/codebooks.png").read_bytes()[:4] == b"\x89PNG"
    evaluate = ("eval", "language", "run/model", *DATA)
    values = json.loads(run(*evaluate, "--batch-size", "3", "--tokenizer", "bytes").out)
    assert values["split"] == "validation"
    smaller = json.loads(
        run(*evaluate, "--objective.update", "8").out
    )  # shorter than the model's block, which is then reduced
    assert smaller["loss"] == pytest.approx(values["loss"], rel=1e-5)
    assert values["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert json.loads(run(*evaluate, "--split", "test").out)["loss"] != values["loss"]
    carried = json.loads(run(*evaluate, "--objective.continued", "--batch-size", "1").out)
    assert carried["loss"] != values["loss"]
    assert carried["loss"] < 1.05 * values["loss"]
    sampled = run("generate", "run/model", "--text", "one two", "--do-sample", "--max-new-tokens", "24", "--top-k", "5")
    assert len(sampled.out.rstrip("\n")) >= 10
    run("generate", "run/model", "--text", "one two", "--save-memory", "memory.npz")
    direct = run("generate", "run/model", "--text", "one two", "--max-new-tokens", "16", "--stream").out
    assert run("generate", "run/model", "--memory", "memory.npz", "--max-new-tokens", "16").out == direct
    run(*train("other", "--training.steps", "1"))
    fails(("generate", "other/model", "--memory", "memory.npz"), "different weights")
    fails(
        ("generate", "run/model", "--text", "a", "--save-memory", "m.npz", "--do-sample"),
        "cannot be combined with --out",
    )
    complete = Path("memory.npz").read_bytes()
    Path("memory.npz").write_bytes(complete[: len(complete) // 2])
    fails(("generate", "run/model", "--memory", "memory.npz"), "cannot read a memory")
    np.save("memory.npy", np.zeros(3))
    fails(("generate", "run/model", "--memory", "memory.npy"), "cannot read a memory")
    fails(("generate", "run", "--text", "a"), "did you mean run/model?")
    shown = run("preview", "language", *FIELDS, *DATA).out
    assert "one " in shown or "two " in shown
    assert "sentinels" not in shown


def test_samples_do_not_depend_on_batching(text: Path) -> None:
    """Neither the batch size nor the position of a prompt within its batch or window changes its samples."""
    run(*train("run", "--training.steps", "1"))
    Path("same.txt").write_text("one\n" * 20)
    generate = ("generate", "run/model", "--file", "same.txt", "--do-sample", "--top-k", "0", "--max-new-tokens", "12")
    outputs = [run(*generate, "--batch-size", size, "--json").out.splitlines() for size in ("2", "16")]
    assert [json.loads(line)["tokens"] for line in outputs[0]] == [json.loads(line)["tokens"] for line in outputs[1]]
    assert [json.loads(line)["index"] for line in outputs[0]] == list(range(20))
    assert len({str(json.loads(line)["tokens"]) for line in outputs[0]}) == 20
    for flags, message in (
        (("--batch-size", "0"), "--batch-size must be at least 1"),
        (("--column", "x"), "--column requires a table"),
    ):
        fails((*generate, *flags), message)


def test_special_tokens_in_a_prompt_are_text(text: Path) -> None:
    """As in the training data, "</s>" is read as four bytes."""
    import flaxen

    run(*train("run", "--training.steps", "1"))
    pretrained = flaxen.load("run/model")
    prompt = "a </s> b <pad>"
    assert pretrained.encode([prompt]) == [[1, *(byte + 3 for byte in prompt.encode())]]
    parts = [pretrained.remember("a </s>"), pretrained.remember(prompt)]
    assert pretrained.remember(" b <pad>", parts[0]).unread == parts[1].unread == (ord(">") + 3,)
    at_once, in_parts = parts[1].state, pretrained.remember(" b <pad>", parts[0]).state
    np.testing.assert_array_equal(np.asarray(at_once.caches[0].codes), np.asarray(in_parts.caches[0].codes))


@pytest.mark.parametrize("name", ["adafactor", "lion", "muon"])
def test_optimizers_have_a_default_learning_rate(name: str, text: Path) -> None:
    run(*train("run", "--training.steps", "1", "--optimizer.name", name))
    record = Path("run/config.toml").read_text()
    assert f"learning_rate = {RATES[name]}" in record


def test_damaged_checkpoint_is_reported_and_skipped(text: Path) -> None:
    flags = ("--training.steps", "4", "--training.save-every", "2")
    run(*train("run", *flags))
    before = parameters("run")
    parts = [path for path in Path("run/checkpoints/4").rglob("*") if path.is_file() and "/d/" in str(path)]
    for part in parts:
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    fails(("export", "run", "exported"), "checkpoints/4 is damaged")
    assert not Path("exported").exists()
    fails(train("run", *flags, "--training.on-damage", "stop"), "checkpoints/4 is damaged")
    assert "using checkpoint 2 instead of 4" in run(*train("run", *flags)).err
    assert all((before[name] == value).all() for name, value in parameters("run").items())


def parameters(out: str, model: str = "model") -> dict[str, np.ndarray]:
    import flaxen

    return {path: np.asarray(leaf) for path, leaf in leaves(flaxen.load(Path(out, model)).model).items()}


@pytest.mark.optimised
def test_resumed_run_equals_uninterrupted_run(text: Path) -> None:
    """Includes codebooks, carried state and dropout; checkpoints are saved in the middle of sequences."""
    flags = ("--training.steps", "30", "--training.save-every", "3", "--training.log-every", "1")
    flags += ("--training.accumulate", "2", "--model.fields", *SMALL, *NOISE, "--optimizer.restart", "0.05")
    run(*train("whole", *flags))
    program = [sys.executable, "-m", "flaxen.cli.main", *train("killed", *flags)]
    for steps in (4, 13):
        process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        metrics = Path("killed/metrics.jsonl")
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None:
            if metrics.exists() and len(metrics.read_text().splitlines()) >= steps:
                break
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    run(*train("killed", *flags))
    uninterrupted, resumed = parameters("whole"), parameters("killed")
    for path, array in uninterrupted.items():
        np.testing.assert_array_equal(resumed[path], array, err_msg=path)
    traces = [
        [json.loads(line)["loss"] for line in Path(out, "metrics.jsonl").read_text().splitlines()]
        for out in ("whole", "killed")
    ]
    assert traces[0] == traces[1]


def test_pixel_models_train_and_sample_images(text: Path) -> None:
    """Losses are reported in bits per dimension, and every sample is a complete image."""
    from PIL import Image

    draw = np.random.default_rng(0)
    images = np.zeros((40, 4, 4, 3), np.uint8)
    images[:] = draw.integers(0, 2, (40, 1, 1, 3)) * 255
    np.save("pictures.npy", images)
    data = ("--data.train", "pictures.npy", "--data.kind", "pixels", "--objective.length", "48")
    run("train", "language", "--out", "run", *FIELDS, "absolute=true", *data, "--training.steps", "20",
        "--training.batch-size", "4")  # fmt: skip
    last = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["bits_per_dim"] == pytest.approx(last["loss"] / math.log(2))
    # At this temperature about one id in a hundred would be special if they were not excluded.
    run("generate", "run/model", "--sample-images", "5", "--out", "drawn", "--do-sample", "--temperature", "50")
    assert sorted(path.name for path in Path("drawn").iterdir()) == [
        *(f"000{i}.png" for i in range(5)),
        "flaxen_manifest.json",
        "grid.png",
    ]
    for name, size in (("0000", (4, 4)), ("grid", (16, 11))):
        with Image.open(f"drawn/{name}.png") as image:
            assert image.size == size
    drawing = ("generate", "run/model", "--sample-images")
    run(*drawing, "2", "--out", "drawn", "--do-sample", "--nucleus", "0.9")  # replaces the five
    assert sorted(path.name for path in Path("drawn").iterdir()) == [
        "0000.png",
        "0001.png",
        "flaxen_manifest.json",
        "grid.png",
    ]
    for flags, message in (
        (("5",), "a directory as --out"),
        (("-1", "--out", "x"), "--sample-images must be at least 1"),
        (("2", "--out", "x", "--num-beams", "2"), "--num-beams cannot be combined with --sample-images"),
        (("2", "--out", "x", "--no-do-sample"), "--no-do-sample cannot be combined with --sample-images"),
        (("2", "--out", "x", "--json"), "--json cannot be combined with --sample-images"),
        (("2", "--out", "pictures.npy"), "already exists and is a file; expected a directory"),
    ):
        fails((*drawing, *flags), message)
    assert not Path("x").exists()


def test_word_metrics_and_merged_adapters(text: Path) -> None:
    """With a vocabulary, losses are also reported per byte and per word. A merged adapter has the same loss as in
    training, and changes only its target weights."""
    Path("text.txt").write_bytes(Path("text.bin").read_bytes())
    run("vocab", "vocab", "--data.train", "text.txt", "--size", "23", "--sentinels", "0")
    data = ("--data.train", "text.txt", "--objective.length", "64", "--objective.update", "32")
    run("train", "language", "--out", "run", *FIELDS, "--model.tokenizer", "vocab", *data, "--training.steps", "10")
    values = json.loads(run("eval", "language", "run/model", *data).out)
    # The first 5 % of the lines are the validation data. The tokens of a line include its end token.
    lines = [line for line in Path("text.txt").read_text().splitlines() if line.strip()]
    held = lines[: round(len(lines) * 0.05)]
    tokens = sum(len(load_tokenizer(Path("vocab")).encode(line)) for line in held)
    nats, words = values["loss"] * tokens, sum(len(line.split()) for line in held)
    assert values["word_perplexity"] == pytest.approx(math.exp(nats / words), rel=1e-5)
    assert values["bits_per_byte"] == pytest.approx(nats / math.log(2) / sum(map(len, held)), rel=1e-5)
    tested = json.loads(run("eval", "language", "run/model", *data, "--data.test", "text.txt", "--split", "test").out)
    assert tested["loss"] != values["loss"]
    fails(("eval", "language", "run/model", *data, "--split", "test"), "no data to evaluate on")
    fails(train("x", "--model.tokenizer", "vocab"), "reads raw bytes")
    adapter = ("--lora.rank", "2", "--lora.targets", "*.q", "*.o", "--optimizer.learning-rate", "1e-2")
    run("train", "language", "--out", "adapted", "--model.init", "run/model", *data, *adapter, "--training.steps", "10")
    last = json.loads(Path("adapted/metrics.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "eval"
    run("merge", "run/model", "adapted/model", "merged")
    merged = json.loads(run("eval", "language", "merged", *data).out)
    assert merged["loss"] == pytest.approx(last["loss"], rel=1e-4)
    assert merged["loss"] < values["loss"]
    before, after = parameters("run"), parameters("merged", "")
    changed = {path.split(".")[-2] for path, array in before.items() if not np.array_equal(after[path], array)}
    assert changed == {"q", "o"}


def test_bench_writes_results_and_plot(text: Path) -> None:
    """A real measurement of one short sequence."""
    bench = ("bench", "language", "--models", "vq", "--lengths", "64", "--repeats", "1", "--fields", *SMALL)
    done = run(*bench, "--out", "bench.png")
    records = json.loads(Path("bench.json").read_text())
    assert [(record["kind"], record["length"]) for record in records] == [("train", 64), ("decode", 64)]
    assert all(record["tokens_per_cpu_second"] > 0 and record["state_bytes"] > 0 for record in records)
    assert Path("bench.png").stat().st_size > 10_000
    assert "train" in done.out


def test_full_attention_trains_and_generates(text: Path) -> None:
    run(*train("run", "--objective.update", "64", "--training.steps", "3", "--model.fields", *SMALL, "attention=full"))
    assert not Path("run/codebooks.png").exists()
    run("generate", "run/model", "--text", "one two", "--max-new-tokens", "8")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--objective.update", "48"), "must be a multiple of objective.update"),
        (("--objective.length", "48", "--objective.update", "24"), "multiple of the model's block"),
        (("--model.fields", "window=0"), "window must be at least 1"),
        (("--model.fields", "d_model=33"), "must be even"),
        (("--model.fields", "windw=4"), "did you mean 'window'"),
        (("--model.fields", "attention=full", *SMALL), "cannot be combined with full attention"),
        (("--data.train", "empty.bin"), "empty"),
        (("--data.validation", "empty.bin"), "empty"),
        (("--data.shares", "100", "0", "0", "--training.keep-best", "loss"), "requires validation data"),
        (("--data.validation-percent", "50"), "use data.shares"),
        (("--data.unit", "file"), "data.unit has no effect with data.kind bytes"),
        (("--data.column", "text"), "data.column has no effect with data.kind bytes"),
        (("--model.fields", "reference=true", "form=parallel", "--model.compute", "bfloat16"), "form must be scan"),
        (("--model.fields", "compute=bfloat16"), "use --model.compute"),
        (("--model.fields", "vocab_size=100"), "determined by the tokenizer"),
    ],
)
def test_invalid_settings_are_rejected(flags: tuple[str, ...], message: str, text: Path) -> None:
    Path("empty.bin").touch()
    fails(train("run", "--training.steps", "2", *flags), message)
    assert not Path("run").exists()


def test_missing_or_mismatched_checkpoints_are_errors(text: Path) -> None:
    """A missing checkpoint never means random weights, and the tokenizer must fit the model."""
    for arguments in (("eval", "language", "absent", *DATA), ("generate", "absent", "--text", "a")):
        fails(arguments, "absent")
    run(*train("run", "--training.steps", "1"))
    fails(("eval", "language", "run/model", *DATA, "--objective.commit", "7"), "unknown flag --objective.commit")
    fails(("eval", "language", "run/model", "--data.validation", "text.bin", "--split", "test"), "--data.test")
    config = json.loads(Path("run/model/config.json").read_text())
    start = ("--model.preset", "None", "--model.fields", "--model.init", "run/model")
    fails(train("more", *start, "--objective.codebooks", "data"), "already has codebooks")
    fails(train("more", *start, "--model.fields", "d_model=64"), "only block and form")
    run(*train("more", *start, "--model.fields", "block=8", "--training.steps", "1"))
    tokenizer = Path("run/model/tokenizer_config.json")
    tokenizer.write_text(tokenizer.read_text().replace('"extra_ids": 0', '"extra_ids": 4'))
    fails(("generate", "run/model", "--text", "a"), "the tokenizer has 263 ids, but the model has only 259")
    Path("run/model/model.safetensors").unlink()
    fails(("generate", "run/model", "--text", "a"), "model.safetensors")
    assert config["model_type"] == "transformer_vq"


@pytest.mark.parametrize("normalise", ["tokens", "positions"])
def test_update_with_only_padding_has_no_loss(normalise: str, text: Path) -> None:
    """Its record omits the loss rather than writing NaN."""
    Path("short.bin").write_bytes(b"twenty-four bytes of it.")
    run(*train("run", "--data.train", "short.bin", "--data.shares", "100", "0", "0", "--training.steps", "4",
               "--training.log-every", "1", "--objective.normalise", normalise))  # fmt: skip
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert ["loss" in record for record in records] == [True, False, True, False]
    assert "NaN" not in Path("run/metrics.jsonl").read_text()
