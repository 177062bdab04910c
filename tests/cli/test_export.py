"""flaxen export: any checkpoint of a run can be saved in Hugging Face format."""

import json
import shutil
import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from PIL import Image
from tests.commands import command

import flaxen
from flaxen.cli.main import main

CONFIG = {
    "model_type": "t5",
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 1,
    "num_heads": 2,
    "dropout_rate": 0.0,
}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["flaxen", *map(str, arguments)])
    monkeypatch.setattr("flaxen.train.loop.peak", lambda: None)
    main()


def test_exports_any_checkpoint_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "text.txt").write_text(topics["if"] * 4)
    run(
        monkeypatch, "train", "denoise", "--out", tmp_path / "run", "--quiet",
        "--model.config", tmp_path / "config.json",
        "--model.tokenizer", "bytes", "--data.train", tmp_path / "text.txt", "--data.cache", tmp_path / "tokens",
        "--objective.input-length", 32, "--training.batch-size", 2, "--training.steps", 3, "--training.save-every", 1,
    )  # fmt: skip
    run(monkeypatch, "export", tmp_path / "run", tmp_path / "last")
    run(monkeypatch, "export", tmp_path / "run", tmp_path / "second", "--step", 2)
    last, second, final = (
        (path / "model.safetensors").read_bytes()
        for path in (tmp_path / "last", tmp_path / "second", tmp_path / "run" / "model")
    )
    assert last == final != second
    assert flaxen.load(tmp_path / "second").tokenizer is not None
    with pytest.raises(SystemExit):
        run(monkeypatch, "export", tmp_path / "run", tmp_path / "none", "--step", 1)
    assert "no checkpoint for step 1; available: 2, 3" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


TRAINING = (
    "--training.batch-size", 2, "--training.steps", 2, "--training.save-every", 1, "--training.keep", 2, "--quiet",
)  # fmt: skip
RUNS: dict[str, tuple[object, ...]] = {
    "denoise": (
        "--model.config", "config.json", "--model.tokenizer", "bytes", "--data.train", "text.txt",
        "--objective.input-length", 32, "--data.cache", "cache",
    ),
    "lora": (
        "--model.init", "start", "--data.train", "*.txt", "--objective.input-length", 32, "--lora.rank", 2,
        "--optimizer.name", "adamw", "--optimizer.learning-rate", 1e-3, "--data.cache", "cache",
    ),
    "seq2seq": (
        "--model.init", "start", "--data.train", "table.jsonl", "--data.source", "image", "--data.target", "caption",
        "--model.dropout", 0.25,
    ),
    "caption": (
        "--model.preset", "vit-mini+gpt2-mini", "--model.image-size", 32, "--model.tokenizer", "bytes", "--data.train",
        "table.jsonl",
    ),
    "language": ("--model.preset", "vq-tiny", "--data.train", "text.txt", "--data.kind", "bytes"),
}  # fmt: skip


@pytest.mark.parametrize("kind", RUNS)
def test_runs_are_self_contained(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run started with relative paths can be replayed from elsewhere, and exported after everything else is gone."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setattr("flaxen.train.loop.peak", lambda: None)
    Path("config.json").write_text(json.dumps(CONFIG))
    Path("text.txt").write_text(topics["if"] * 4)
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save("image.png")
    Path("table.jsonl").write_text((json.dumps({"image": "image.png", "caption": "dark"}) + "\n") * 8)
    if "start" in RUNS[kind]:
        start = flaxen.create(flaxen.models.t5.Config(vocab_size=384, d_model=16, d_head=4, d_ff=24, n_heads=4))
        flaxen.Pretrained(start.model, flaxen.families.T5.bytes()).save("start")
    task = "denoise" if kind == "lora" else kind
    done = command("train", task, "--out", "run", *RUNS[kind], *TRAINING)
    assert done.code == 0, done.err

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = command("replay", "../home/run", "--step", 2)
    assert done.code == 0, done.err
    (tmp_path / "home" / "run").rename("run")
    shutil.rmtree(tmp_path / "home")
    done = command("export", "run", "exported")
    assert done.code == 0, done.err
    assert contents(Path("exported")) == contents(Path("run/model"))
    done = command("export", "run", "run/other")
    assert (done.code, "overlaps with the input run" in done.err) == (1, True)
    assert not Path("run/other").exists()


def test_moved_run_with_its_data_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are recorded as absolute ones; a project that was moved as a whole is not a changed setting."""
    monkeypatch.setattr("flaxen.train.loop.peak", lambda: None)
    (tmp_path / "old").mkdir()
    monkeypatch.chdir(tmp_path / "old")
    Path("config.json").write_text(json.dumps(CONFIG))
    Path("text.txt").write_text(topics["if"] * 4)
    flags = ["train", "denoise", "--out", "run", *RUNS["denoise"], *TRAINING]
    assert command(*flags).code == 0
    (tmp_path / "old").rename(tmp_path / "new")
    monkeypatch.chdir(tmp_path / "new")
    shutil.rmtree("run/checkpoints/2")
    done = command(*flags)
    assert done.code == 0, done.err
    Path("other.json").write_text(json.dumps(CONFIG))
    done = command(*[flag if flag != "config.json" else "other.json" for flag in flags])
    assert (done.code, "model.config: was" in done.err) == (1, True)
