"""Checkpoint files: reading reports what is wrong."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from flaxen.errors import InputError
from flaxen.hf.files import locate, read_json
from flaxen.hf.safetensors_files import Safetensors, write_tensors


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    written = {
        "a": draw.standard_normal((3, 4)).astype(np.float32),
        "b": draw.standard_normal(5).astype(ml_dtypes.bfloat16),
        "c": draw.standard_normal((2, 1)).astype(np.float16),
        "empty": np.zeros((0, 3), np.float32),
    }
    save_file(written, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tensors = Safetensors(tmp_path)
    assert set(tensors) == set(written)
    for name, array in written.items():
        assert tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(tensors[name], np.float32), array.astype(np.float32))


def test_sharded_tensors_equal_the_originals(tmp_path: Path) -> None:
    arrays = {f"t{i}": np.full((10, 10), i, np.float32) for i in range(7)}
    write_tensors(tmp_path, arrays, shard_bytes=900)
    assert len(list(tmp_path.glob("model-*-of-00004.safetensors"))) == 4
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == 2800
    tensors = Safetensors(tmp_path)
    assert {name: float(tensors[name][0, 0]) for name in tensors} == {f"t{i}": i for i in range(7)}
    (tmp_path / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(InputError, match="model-00002-of-00004"):
        Safetensors(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 20, 100, -1])
def test_truncated_file_is_reported(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros((30, 30), np.float32)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        InputError, match=r"model\.safetensors is not a valid safetensors file: .*download or save it again"
    ):
        Safetensors(tmp_path)


def test_unsupported_weight_files_are_reported(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(InputError, match=r"pytorch_model\.bin.*safetensors first"):
        Safetensors(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", ""])
def test_invalid_json_is_reported_with_its_path(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_missing_json_error_lists_the_directory(tmp_path: Path) -> None:
    (tmp_path / "weights.txt").touch()
    with pytest.raises(InputError, match=r"has no config\.json; it contains weights\.txt"):
        read_json(tmp_path / "config.json")


def test_locate_returns_a_directory_or_reports_why_not(tmp_path: Path) -> None:
    assert locate(tmp_path) == tmp_path
    with pytest.raises(InputError, match="does not exist"):
        locate(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        locate(tmp_path / "file")
    with pytest.raises(InputError, match="cannot be downloaded from the hub"):  # HF_HUB_OFFLINE is set in tests
        locate("nobody/nothing")


def test_cached_hub_model_is_found_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds the cache layout of huggingface_hub by hand."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = "0" * 40
    root = tmp_path / "models--some--model"
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    assert locate("some/model").resolve() == snapshot.resolve()
