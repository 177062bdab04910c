"""`flaxen verify` reports digests that differ, invalid files, and weights that are not finite."""

import json
from pathlib import Path

import numpy as np
import pytest
from commands import command
from safetensors.numpy import load_file, save_file

import flaxen
from flaxen import manifest


@pytest.fixture(scope="module")
def model(byt5: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("verify") / "model"
    flaxen.load(byt5).save(directory)
    return directory


def copy(model: Path, directory: Path) -> Path:
    target = directory / "model"
    flaxen.load(model).save(target)
    return target


def test_intact_model(model: Path) -> None:
    done = command("verify", model)
    assert done.code == 0
    assert "is intact" in done.out
    assert f"{len(manifest.read(model) or ())} digests match" in done.out


def test_every_file_is_covered(model: Path, tmp_path: Path) -> None:
    target = copy(model, tmp_path)
    for name in manifest.files(target):
        path = target / name
        before = path.read_bytes()
        path.write_bytes(bytes([before[0] ^ 4]) + before[1:])
        done = command("verify", target)
        assert done.code == 1
        assert path.name in done.message
        path.write_bytes(before)
    assert command("verify", target).code == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(model: Path, tmp_path: Path, value: float) -> None:
    target = copy(model, tmp_path)
    path = target / "model.safetensors"
    tensors = load_file(path)
    name = "encoder.final_layer_norm.weight"
    tensors[name][3] = value
    save_file(tensors, path, metadata={"format": "pt"})
    manifest.write(target)  # the digests match: the weights were like this when they were saved
    done = command("verify", target)
    assert done.code == 1
    assert f"tensor {name!r} contains NaN or infinite values" in done.message


def test_directories_without_manifest_and_with_other_files(byt5: Path, model: Path, tmp_path: Path) -> None:
    done = command("verify", byt5)
    assert done.code == 0
    assert "no manifest" in done.out
    target = copy(model, tmp_path)
    (target / "notes.txt").touch()
    done = command("verify", target)
    assert done.code == 0
    assert "notes.txt" in done.err
    (target / manifest.NAME).write_text(json.dumps({"files": {"config.json": 3}}))
    assert "is damaged" in command("verify", target).message
    assert "is not a directory" in command("verify", tmp_path / "nothing").message
