"""Streams of bytes, pixels and text: exact splits, the sequences of the original Transformer-VQ, and errors."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from ids import Ids
from vq_goldens import golden

from flaxen.data.pixels import open_pixels
from flaxen.data.stream_store import ByteStream, TextSize, open_streams, pieces, sequences
from flaxen.data.streams import LanguageData
from flaxen.data.tokenizers import ByteTokenizer
from flaxen.errors import InputError

BYTES = ByteTokenizer.plain()


def test_sequences_equal_the_original_pipeline() -> None:
    """From documents to batches: eos appended or not, remainders padded, every sequence starting with eos."""
    original = golden("data_pipeline")
    pad, eos = original.config["pad_id"], original.config["eos_id"]
    for i, case in enumerate(original.config["cases"]):
        tokens, lengths = original[f"docs_{case['docs']}/tokens"], original[f"docs_{case['docs']}/lengths"]
        documents = np.split(tokens, np.cumsum(lengths)[:-1])
        stream = np.concatenate([np.append(d, eos) if case["append_eos"] else d for d in documents]).astype(np.int32)
        expected = {name: original[f"case{i}/{name}"] for name in ("inputs", "targets", "doc_ids", "loss_mask")}
        length, count = case["sequence_len"], expected["inputs"].shape[0] * expected["inputs"].shape[1]
        inputs, targets = sequences(Ids(stream), np.arange(count), length, eos, pad)
        real = np.arange(count) * length < len(stream)
        shape = expected["targets"].shape
        np.testing.assert_array_equal(targets.reshape(shape), expected["targets"])
        # In the original, rows that fill up a batch are padding, even their first input; neither has labels there.
        np.testing.assert_array_equal(inputs[real], expected["inputs"].reshape(count, -1)[real])
        np.testing.assert_array_equal((targets != pad).reshape(shape), expected["loss_mask"] > 0)
        document_ids = np.cumsum(inputs == eos, axis=1)
        np.testing.assert_array_equal(document_ids[real], expected["doc_ids"].reshape(count, -1)[real])


def test_pieces_of_a_sequence_equal_the_sequence() -> None:
    stream = ByteStream(np.arange(100, dtype=np.uint8), 0, 100)
    inputs, targets = sequences(stream, np.array([0, 2]), 40, 1, 0)
    parts = [pieces(stream, np.array([0, 80]) + at, np.full(2, at > 0), 10, 1, 0) for at in range(0, 40, 10)]
    np.testing.assert_array_equal(np.concatenate([p[0] for p in parts], 1)[0], inputs[0])
    np.testing.assert_array_equal(np.concatenate([p[1] for p in parts], 1), targets)
    assert targets[1, 19] == 99 + 3
    assert not targets[1, 20:].any()


def test_splits_are_exact(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    (tmp_path / "a.bin").write_bytes(data.tobytes())
    (tmp_path / "b.gz").write_bytes(gzip.compress(data.tobytes()))
    for name in ("a.bin", "b.gz"):
        opened = open_streams(LanguageData(train=(str(tmp_path / name),), kind="bytes"), BYTES)
        parts = [stream.rows(np.array([0]), len(stream))[0] for stream in opened.splits.values()]
        assert [len(part) for part in parts] == [900, 50, 50]
        np.testing.assert_array_equal(np.concatenate(parts), data.astype(np.int32) + 3)
    by_count = LanguageData(train=(str(tmp_path / "a.bin"),), kind="bytes", shares=(937.0, 63.0, 0.0))
    assert [len(stream) for stream in open_streams(by_count, BYTES).splits.values()] == [937, 63, 0]
    files = {"train": (str(tmp_path / "a.bin"),), "validation": (str(tmp_path / "b.gz"),)}
    for shares, expected in ((None, [1000, 1000, 0]), ((90.0, 5.0, 5.0), [947, 1000, 53])):
        with_validation = LanguageData(**files, kind="bytes", shares=shares)
        assert [len(stream) for stream in open_streams(with_validation, BYTES).splits.values()] == expected
    with_test = LanguageData(train=files["train"], test=files["validation"], kind="bytes")
    assert [len(stream) for stream in open_streams(with_test, BYTES).splits.values()] == [947, 53, 1000]


def test_text_files_are_documents_with_measured_sizes(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n\nbook\n")
    data = LanguageData(
        train=(str(tmp_path / "*.txt"),), unit="file", cache=tmp_path / "cache", validation_percent=34.0
    )
    splits = open_streams(data, BYTES).splits
    assert [len(splits[name]) for name in ("train", "validation", "test")] == [24, 11, 0]
    assert splits["validation"].measured() == TextSize(11, 2, 10)  # eos is a token, but not a byte of text
    assert splits["train"].measured() == TextSize(24, 4, 22)
    text = BYTES.decode(splits["train"].rows(np.array([0]), 24)[0].tolist())
    assert text == "three\n\nbook\ntwo\n\nbook\n"


def test_pixels_are_read_from_all_formats(tmp_path: Path) -> None:
    import pyarrow
    from PIL import Image
    from pyarrow import parquet

    images = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3)).astype(np.uint8)
    np.save(tmp_path / "a.npy", images)
    np.savez(tmp_path / "b.npz", data=images.transpose(0, 3, 1, 2).reshape(6, -1))  # the format of ImageNet64
    (tmp_path / "folder").mkdir()
    for i, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / "folder" / f"{i}.png")
    files = [{"bytes": (tmp_path / "folder" / f"{i}.png").read_bytes(), "path": None} for i in range(6)]
    parquet.write_table(pyarrow.table({"image": files}), tmp_path / "c.parquet")
    for name in ("a.npy", "b.npz", "folder", "c.parquet"):
        np.testing.assert_array_equal(open_pixels((str(tmp_path / name),), None), images)
    assert open_pixels((str(tmp_path / "folder"),), 2).shape == (6, 2, 2, 3)
    opened = open_streams(
        LanguageData(train=(str(tmp_path / "a.npy"),), kind="pixels", shares=(50.0, 50.0, 0.0)), BYTES
    )
    assert opened.shape == (4, 4, 3)
    assert [len(stream) for stream in opened.splits.values()] == [3 * 48, 3 * 48, 0]  # split between images
    np.testing.assert_array_equal(opened.splits["validation"].rows(np.array([48]), 48)[0], images[4].reshape(-1) + 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"train": ("empty.bin",)}, "empty"), ({"train": ("absent.bin",)}, "does not exist"), ({}, "files to train on"),
     ({"train": ("a.txt",), "kind": "pixels"}, "expected .npz")],
)  # fmt: skip
def test_invalid_settings_are_refused(
    changes: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.bin").touch()
    Path("a.txt").write_text("text")
    with pytest.raises(InputError, match=message):
        open_streams(LanguageData(**{"kind": "bytes", **changes}), BYTES)
    for shares in ((50.0, 50.0), (50.0, -10.0, 60.0), (0.0, 0.0, 0.0)):
        with pytest.raises(InputError, match="shares must be three non-negative numbers"):
            LanguageData(shares=shares)
