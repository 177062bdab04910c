"""Load images as uint8 arrays [images, height, width, channels], for models that generate pixels."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from flaxen.data.files import find_files
from flaxen.errors import InputError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm")


def open_pixels(places: tuple[str, ...], size: int | None) -> np.ndarray:
    """Load images from arrays, tables, image files and folders as uint8 [images, height, width, channels].

    Files of a folder are sorted by name; `size` crops and scales image files to a square.
    """
    paths: list[Path] = []
    for place in places:
        folder = Path(place).expanduser()
        if folder.is_dir():
            images = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
            if not images:
                raise InputError(f"{folder} contains no images; expected {', '.join(IMAGE_SUFFIXES)}")
            paths += images
        else:
            paths += find_files((place,), any_kind=True)
    parts = [_read_images(path, size) for path in paths]
    _check_shapes(parts)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _check_shapes(parts: list[np.ndarray]) -> None:
    """Raise if the images differ in shape."""
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) != 1:
        raise InputError(
            f"all images must have the same shape, got {', '.join(map(str, sorted(shapes)))}; set --data.image-size"
        )


def _read_images(path: Path, size: int | None) -> np.ndarray:
    """Read the images of one file: several for an array or a table, one for an image file."""
    kind = path.suffix.lower()
    if kind in (".npy", ".npz"):
        return _check_images(_read_array(path), path)
    if kind == ".parquet":
        parts = [_decode(data, f"{path}, row {n}", size)[None] for n, data in enumerate(_cells(path))]
        _check_shapes(parts)
        return np.concatenate(parts)
    if kind in IMAGE_SUFFIXES:
        return _decode(path.read_bytes(), str(path), size)[None]
    raise InputError(f"{path}: expected .npz, .npy, .parquet, an image file or a folder of images")


def _read_array(path: Path) -> np.ndarray:
    """Read the array of a .npy file, or the array of images in a .npz file (a zip archive)."""
    try:
        with path.open("rb") as raw:  # opened here, because np.load leaves a damaged archive open
            if raw.read(2) != b"PK":
                return np.load(path, mmap_mode="r")
            raw.seek(0)
            with np.load(raw) as file:
                name, array = _select_array(file, path)
    except InputError:
        raise
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(
            f"cannot read {path}: {error}; expected images written by numpy.save or savez; download the file again"
        ) from None
    if array.ndim != 2:
        return array
    # ImageNet64 has one row of 3 · 64 · 64 numbers per image, one colour plane after the other.
    side = round((array.shape[1] / 3) ** 0.5)
    if not side or 3 * side * side != array.shape[1]:
        rows = f"rows of {array.shape[1]} numbers"
        raise InputError(f"{path}: expected square RGB images, got {rows} in the array {name!r}")
    return np.ascontiguousarray(array.reshape(-1, 3, side, side).transpose(0, 2, 3, 1))


def _select_array(file: Any, path: Path) -> tuple[str, np.ndarray]:
    """Return the array `data`, as in ImageNet64's files, or the first array that may hold images."""
    rejected = []
    for name in ["data"] if "data" in file else file:
        array = np.asarray(file[name])  # a member that is not an array is read as bytes
        if name == "data" or (array.dtype == np.uint8 and array.ndim in (2, 4)):
            return name, array
        rejected.append(f"{name}: {array.dtype} of shape {array.shape}")
    raise InputError(
        f"{path}: expected an array named `data`, or a uint8 array with 2 or 4 axes, "
        f"got {'; '.join(rejected) or 'no array'}"
    )


def _check_images(array: np.ndarray, path: Path) -> np.ndarray:
    """Return the array if it has the dtype and shape of images, else raise."""
    if array.dtype != np.uint8 or array.ndim != 4 or not array.size:
        raise InputError(
            f"{path}: expected uint8 of shape (images, height, width, channels), "
            f"got {array.dtype} of shape {array.shape}"
        )
    if array.shape[3] not in (1, 3):
        raise InputError(f"{path}: expected images with 1 or 3 channels in the last axis, got shape {array.shape}")
    return array


def _cells(path: Path) -> list[Any]:
    """Read the encoded images of a column `image`: bytes, or the {'bytes', 'path'} structs of Hugging Face."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(
            f"cannot read {path}: {error}; expected Parquet with a column named `image`; download the file again"
        ) from None
    names = [name for name in table.column_names if name in ("image", "img", "picture")]
    if not names:
        raise InputError(f"{path}: expected a column named `image`, got {', '.join(table.column_names) or 'none'}")
    if not len(table):
        raise InputError(f"{path}: the table has no rows; expected one row per image")
    return [cell.get("bytes") if isinstance(cell, dict) else cell for cell in table[names[0]].to_pylist()]


def _decode(data: Any, where: str, size: int | None) -> np.ndarray:
    """Decode an image to uint8 RGB; crop the central square and scale it if `size` is given."""
    import io

    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as file:
            image: Image.Image = file.convert("RGB")
            if size is not None:
                side = min(image.size)
                left, top = (image.width - side) // 2, (image.height - side) // 2
                image = image.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BOX)
            return np.asarray(image, np.uint8)
    except (OSError, TypeError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"{where}: cannot read the image: {error}") from None
