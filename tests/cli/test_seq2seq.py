"""Fine-tuning on the command line: train, evaluate, resume; and how invalid pairs are reported."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import command

import flaxen
from flaxen.hf.safetensors_files import Safetensors

CONFIG = {
    "model_type": "longt5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 1,
    "num_heads": 4, "feed_forward_proj": "gated-gelu", "dropout_rate": 0.1, "tie_word_embeddings": False,
    "encoder_attention_type": "transient-global", "local_radius": 7, "global_block_size": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words and their first letters: a task with exact answers."""
    directory, draw = tmp_path_factory.mktemp("material"), random.Random(0)
    rows = []
    for i in range(120):
        word = "".join(draw.choice("abcd") for _ in range(draw.randint(2, 9)))
        rows.append({"id": f"w{i}", "word": word, "first": word[0], "number": i})
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def flags(material: Path, out: Path, *more: object) -> list[object]:
    return [
        "train", "seq2seq", "--out", out, "--model.config", material / "config.json", "--model.tokenizer", "bytes",
        "--data.train", material / "pairs.jsonl", "--data.cache", material / "cache",
        "--data.source", "first of {word}", "--data.target", "first", "--data.validation-percent", "10",
        "--objective.source-length", "32", "--objective.target-length", "8", "--objective.shapes", "1",
        "--optimizer.name", "adamw", "--training.batch-size", "8", "--training.steps", "8", "--training.log-every", "1",
        "--training.eval-every", "4", "--training.save-every", "3", "--training.keep-best", "exact_match",
        "--generation.examples", "6", "--generation.max-new-tokens", "4", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(
    material: Path,
    tmp_path_factory: pytest.TempPathFactory,
    fast_compile: Callable[[bool], AbstractContextManager[None]],
) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    with fast_compile(True):
        done = command(*flags(material, out, "--optimizer.freeze", "embedding.*", "encoder.layers.mlp.*"))
    assert done.code == 0, done.err
    assert "108 training pairs, 12 validation pairs" in done.err
    assert "of the tokens processed are padding" in done.err
    return out


def test_run_writes_metrics_and_predictions(trained: Path) -> None:
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record for record in records if record["kind"] == "eval"]
    assert [record["step"] for record in evaluations] == [4, 8]
    assert {"loss", "rouge1", "rougeLsum", "bleu", "chrf", "exact_match"} <= evaluations[0].keys()
    for step in (4, 8):
        lines = [json.loads(line) for line in (trained / "predictions" / f"step-{step}.jsonl").read_text().splitlines()]
        assert [line["id"] for line in lines] == [f"w{i}" for i in range(6)]
        assert lines[0].keys() == {"id", "prediction", "reference"}
    assert (trained / "best" / "model.safetensors").exists()
    assert 'task = "seq2seq"' in (trained / "config.toml").read_text()


def test_frozen_weights_stay_bit_for_bit(trained: Path, material: Path, tmp_path: Path) -> None:
    fresh = command(*flags(material, tmp_path / "run", "--training.steps", "1", "--optimizer.learning-rate", "1e-30"))
    assert fresh.code == 0, fresh.err
    before, after = Safetensors(tmp_path / "run" / "model"), Safetensors(trained / "model")
    unchanged = {name for name in before if np.array_equal(before[name], after[name])}
    assert unchanged == {
        "shared.weight",
        *(name for name in before if "encoder" in name and "DenseReluDense.w" in name),
    }
    unknown = command(*flags(material, tmp_path / "other", "--optimizer.freeze", "encodr.*"))
    assert unknown.code == 1
    assert "no weight matches 'encodr.*'" in unknown.message
    assert not (tmp_path / "other").exists()


def test_eval_reproduces_the_last_evaluation_of_training(trained: Path, material: Path, tmp_path: Path) -> None:
    """The loss is over all pairs, the generation metrics over the first --examples."""
    last = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()][-1]
    data = ["--data.train", material / "pairs.jsonl", "--data.validation-percent", "10", "--data.cache",
            material / "cache", "--data.source", "first of {word}", "--data.target", "first",
            "--objective.source-length", "32", "--objective.target-length", "8"]  # fmt: skip
    done = command("eval", "seq2seq", trained / "model", *data, "--loss-only")
    assert done.code == 0, done.err
    assert json.loads(done.out)["loss"] == pytest.approx(last["loss"], rel=1e-5)
    done = command("eval", "seq2seq", trained / "model", *data, "--examples", 6, "--max-new-tokens", 4,
                   "--out", tmp_path / "out.jsonl")  # fmt: skip
    assert done.code == 0, done.err
    assert json.loads(done.out)["chrf"] == pytest.approx(last["chrf"])
    assert (tmp_path / "out.jsonl").read_text() == (trained / "predictions" / "step-8.jsonl").read_text()


def test_preview_replay_and_export(trained: Path, material: Path, tmp_path: Path) -> None:
    shown = command("preview", "seq2seq", *flags(material, tmp_path)[4:12], *flags(material, tmp_path)[12:16],
                    "--objective.batching", "packed", "--objective.source-length", "64")  # fmt: skip
    assert shown.code == 0, shown.err
    assert "input  first of" in shown.out
    assert "┃ first of" in shown.out  # several pairs in one row
    assert command("preview", "seq2seq", "--recipe", trained / "config.toml").code == 0
    replayed = command("replay", trained, "--step", 7)
    assert replayed.code == 0, replayed.err
    recorded = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    loss = next(r["loss"] for r in recorded if r["kind"] == "train" and r["step"] == 7)
    assert f"loss {loss!r}"[:14] in replayed.out
    assert command("export", trained, tmp_path / "exported", "--step", 8).code == 0
    assert flaxen.load(tmp_path / "exported").config.attention == "transient-global"


@pytest.mark.optimised
def test_resumed_run_equals_uninterrupted_run(material: Path, tmp_path: Path) -> None:
    """With packed batches (the runs above use grouped ones). tests/train/test_resume.py kills at many more moments."""
    uninterrupted = command(*flags(material, tmp_path / "whole", "--objective.batching", "packed", "--quiet"))
    assert uninterrupted.code == 0, uninterrupted.err
    out = tmp_path / "killed"
    arguments = [*map(str, flags(material, out, "--objective.batching", "packed", "--quiet"))]
    process = subprocess.Popen([sys.executable, "-m", "flaxen.cli.main", *arguments], env={**os.environ})
    while process.poll() is None and not (out / "checkpoints" / "3").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "model").exists()
    resumed = command(*arguments)
    assert resumed.code == 0, resumed.err

    def without_timings(path: Any) -> Any:
        return [
            {name: value for name, value in json.loads(line).items() if name not in ("tokens_per_second", "mfu")}
            for line in (path / "metrics.jsonl").read_text().splitlines()
        ]

    assert without_timings(out) == without_timings(tmp_path / "whole")
    for name in ("model/model.safetensors", "best/model.safetensors", "predictions/step-8.jsonl"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--data.target", "frist"], "unknown column 'frist' (did you mean 'first'?); available: id, word, first"),
        (["--data.target", "number"], "line 1: expected text in column 'number', got int 0"),
        (["--data.train", "{material}/empty.jsonl"], "line 2: the target is empty"),
        (["--data.train", "{material}/twice.jsonl", "--data.id", "word"], "duplicate id 'ab', already used by pair 1"),
        (["--objective.source-length", "12", "--objective.long", "error"], "more than objective.source_length=12"),
        (["--data.train", "{material}/none.jsonl"], "none.jsonl does not exist"),
        (["--training.keep-best", "rouge9"], "keep_best: unknown metric 'rouge9'"),
        (["--generation.num-beams", "0"], "num_beams"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_are_reported_and_leave_no_files(
    material: Path, tmp_path: Path, change: list[str], message: str
) -> None:
    row = {"word": "ab", "first": "a"}
    (material / "empty.jsonl").write_text("\n".join(map(json.dumps, [row, {**row, "first": ""}])))
    (material / "twice.jsonl").write_text("\n".join(map(json.dumps, [row, row])))
    done = command(*flags(material, tmp_path / "out", *(flag.format(material=material) for flag in change)))
    assert done.code == 1
    assert message in done.message
    assert not (tmp_path / "out").exists()
