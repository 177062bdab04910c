"""flaxen export: any checkpoint of a run can be saved in Hugging Face format."""

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

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
