"""Images from files: which of several arrays is used, and errors for damaged or empty files."""

import gzip
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from flaxen.data.pixels import open_pixels
from flaxen.data.stream_store import open_streams
from flaxen.data.streams import LanguageData
from flaxen.data.tokenizers import ByteTokenizer
from flaxen.errors import InputError

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3)).astype(np.uint8)
ROWS = IMAGES.transpose(0, 3, 1, 2).reshape(6, -1)  # one colour after the other
LABELS = np.arange(6)


def saved(write: Callable[..., None], *arrays: Any, **named: Any) -> bytes:
    file = io.BytesIO()
    write(file, *arrays, **named)
    return file.getvalue()


def table(**columns: Any) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def png(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "png")
    return file.getvalue()


def zipped(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def damaged(data: bytes, first: int, last: int) -> bytes:
    return data[:first] + b"\xff" * (last - first) + data[last:]


@pytest.mark.parametrize(
    "data",
    [
        saved(np.savez, labels=LABELS, images=IMAGES),
        saved(np.savez, labels=LABELS, rows=ROWS),
        saved(np.savez_compressed, mask=IMAGES[:1], data=ROWS),
        saved(np.savez, mask=LABELS.astype(np.uint8), images=IMAGES, data2=ROWS[:1]),
        saved(np.save, IMAGES),  # a .npy file named .npz
    ],
)
def test_array_that_holds_images_is_selected(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(data)
    np.testing.assert_array_equal(open_pixels((str(path),), None), IMAGES)


NPY, NPZ, PARQUET = saved(np.save, IMAGES), saved(np.savez_compressed, images=IMAGES), table(image=[png(4)] * 20)
EXPECTED = "cannot read .*; expected images written by numpy.save or savez"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("empty.npy", b"", EXPECTED),
        ("text.npy", b"no array at all", EXPECTED),
        ("header.npy", NPY[:40], EXPECTED),
        ("cut.npy", NPY[:-9], EXPECTED),
        ("numbers.npy", saved(np.save, LABELS), "expected uint8 of shape .* got int64 of shape"),
        ("none.npy", saved(np.save, IMAGES[:, :0]), r"expected uint8 of shape .* got uint8 of shape \(6, 0, 4, 3\)"),
        ("empty.npz", b"", EXPECTED),
        ("text.npz", b"no archive", EXPECTED),
        ("cut.npz", NPZ[:-9], EXPECTED),
        ("damaged.npz", damaged(NPZ, 100, 130), EXPECTED),
        ("packed.npz", damaged(NPZ, 50, 70), EXPECTED),
        ("objects.npz", saved(np.savez, data=np.array([{}])), EXPECTED),
        ("nothing.npz", saved(np.savez), "expected an array named `data`.*got no array"),
        ("labels.npz", saved(np.savez, labels=LABELS, x=IMAGES / 255.0),
         r"uint8 array with 2 or 4 axes, got labels: int64 of shape \(6,\); x: float64 of shape \(6, 4, 4, 3\)"),
        ("letter.npz", zipped(letter=b"hello"), r"got letter: \|S5 of shape \(\)"),
        ("data.npz", zipped(data=b"hello"), "expected uint8 of shape"),
        ("odd.npz", saved(np.savez, x=ROWS[:, :47]), "expected square RGB images, got rows of 47 numbers .* 'x'"),
        ("thin.npz", saved(np.savez, data=ROWS[:, :0]), "expected square RGB images, got rows of 0 numbers"),
        ("colours.npy", saved(np.save, np.zeros((2, 4, 4, 5), np.uint8)), "expected images with 1 or 3 channels"),
        ("empty.parquet", b"", "cannot read .*expected Parquet with a column named `image`"),
        ("text.parquet", b"no table, no table", "expected Parquet with a column named `image`"),
        ("cut.parquet", PARQUET[:-30], "expected Parquet with a column named `image`"),
        ("damaged.parquet", damaged(PARQUET, 4, 60), "expected Parquet with a column named `image`"),
        ("rows.parquet", table(image=pyarrow.array([], pyarrow.binary())), "the table has no rows"),
        ("columns.parquet", table(label=[1]), "expected a column named `image`, got label"),
        ("names.parquet", table(image=["a.png"]), "row 0: cannot read the image"),
        ("null.parquet", table(image=[png(4), None]), "row 1: cannot read the image"),
        ("paths.parquet", table(image=[{"path": "a.png"}]), "row 0: cannot read the image"),
        ("shapes.parquet", table(image=[png(4), png(5)]), "must have the same shape, got .*--data.image-size"),
    ],
)  # fmt: skip
def test_damaged_or_unsuitable_files_are_refused(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InputError, match=f"(?s){message}") as error:
        open_pixels((str(path),), None)
    assert name in str(error.value) or "same shape" in message


@pytest.mark.parametrize(("first", "last"), [(0, 2), (14, 20), (-8, -4), (-4, 0)])
def test_damaged_gzip_is_refused(first: int, last: int, tmp_path: Path) -> None:
    """Damage to the magic number, the content, the checksum, and a missing end."""
    data = gzip.compress(b"some text " * 100)
    path = tmp_path / "a.gz"
    path.write_bytes(data[:first] if not last else damaged(data, first % len(data), last % len(data)))
    with pytest.raises(InputError, match=r"cannot read .*a\.gz"):
        open_streams(LanguageData(train=(str(path),), kind="bytes"), ByteTokenizer.plain())
