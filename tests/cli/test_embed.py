"""flaxen embed: embeddings of a file are in order, and an interrupted command resumes bit for bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import command

import flaxen
from flaxen.cli.resumable import ResumableArray
from flaxen.pretrained.embedding import Embedder

TEXTS = [f"{'word ' * (i % 5 + 1)}{i}" for i in range(21)]


def flags(model: Path, tmp_path: Path, out: str) -> list[object]:
    if not (tmp_path / "in.jsonl").exists():
        rows = [{"id": f"p{i}", "q": text} for i, text in enumerate(TEXTS)]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["embed", model, "--file", tmp_path / "in.jsonl", "--column", "say {q}", "--out", tmp_path / out,
            "--batch-size", 1]  # fmt: skip


@pytest.mark.parametrize("torn", [b"", b"\0" * 7, b"\0" * 4 * 32])
@pytest.mark.parametrize("name", ["out.npy", "out.jsonl"])
def test_resumed_file_equals_uninterrupted_file(
    byt5: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, torn: bytes
) -> None:
    uninterrupted = command(*flags(byt5, tmp_path, f"whole-{name}"))
    assert uninterrupted.code == 0, uninterrupted.err
    done, real, batch_sizes = 0, Embedder.__call__, list[int]()

    def interrupted(self: Embedder, texts: Any) -> list[np.ndarray]:
        nonlocal done
        batch_sizes.append(len(texts))
        if done == 1:
            raise KeyboardInterrupt
        done += 1
        return real(self, texts)

    monkeypatch.setattr(Embedder, "__call__", interrupted)
    assert command(*flags(byt5, tmp_path, name)).code == 130
    assert not (tmp_path / name).exists()
    (partial,) = tmp_path.glob(f".{name}.*.partial")
    with partial.open("ab") as file:
        file.write(torn.replace(b"\0", b"x") if name.endswith("l") else torn)
    done, batch_sizes = 2, []
    resumed = command(*flags(byt5, tmp_path, name))
    assert resumed.code == 0, resumed.err
    assert "resuming after text 8 of 21" in resumed.err
    assert "21 embeddings of dimension 32" in resumed.err
    assert batch_sizes == [8, 5]
    assert (tmp_path / name).read_bytes() == (tmp_path / f"whole-{name}").read_bytes()
    assert not list(tmp_path.glob(".*.partial"))


def test_files_equal_the_library(byt5: Path, tmp_path: Path) -> None:
    for name in ("out.npy", "out.jsonl"):
        assert command(*flags(byt5, tmp_path, name), "--normalise").code == 0
    expected = flaxen.load(byt5).embed([f"say {text}" for text in TEXTS], normalise=True)
    array = np.load(tmp_path / "out.npy")
    assert (array.shape, array.dtype) == ((21, 32), np.float32)
    np.testing.assert_allclose(array, expected, rtol=0, atol=1e-6)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"p{i}" for i in range(21)]
    assert [line["index"] for line in lines] == list(range(21))
    np.testing.assert_array_equal(np.array([line["embedding"] for line in lines], np.float32), array)


def test_texts_on_the_command_line(byt5: Path) -> None:
    done = command("embed", byt5, "--text", "one", "", "--pooling", "none", "--length", 3)
    assert done.code == 0, done.err
    one, empty = (np.array(json.loads(line)["embedding"]) for line in done.out.splitlines())
    assert (one.shape, empty.shape) == ((3, 32), (1, 32))
    assert "truncated 1 texts to 3 tokens" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "exactly one of --text and --file is required"),
        (["--text", "a", "--column", "q"], "--column requires a table"),
        (["--text", "a", "--out", "x.txt"], "must end in .npy or .jsonl, got x.txt"),
        (["--text", "a", "--out", "x.npy", "--pooling", "none"], "use a .jsonl file"),
        (["--text", "a", "--batch-size", 0], "batch_size must be at least 1"),
        (["--text", "a", "--subfolder", "text_encoder"], "no subfolder 'text_encoder'"),
        (["--file", "nothing.txt"], "nothing.txt does not exist"),
    ],
    ids=str,
)
def test_invalid_flags_are_reported(byt5: Path, arguments: list, words: str) -> None:
    done = command("embed", byt5, *arguments)
    assert done.code == 1
    assert words in done.message


def test_other_settings_start_from_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "out.npy"
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    for key, items in (({"a": 1}, 0), ({"a": 1}, 2), ({"a": 2}, 0)):
        file = ResumableArray(path, key, 1, 4, 2)
        assert file.items == items
        file.write(rows[items : 2 + items])
        file.close()
    file = ResumableArray(path, {"a": 1}, 1, 4, 2)
    assert file.items == 4
    file.finish()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.npy"]
    np.testing.assert_array_equal(np.load(path), rows)
