"""Pictures as arrays of bytes [pictures, height, width, channels], for models that write pixels."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from flaxen.data.files import find_files
from flaxen.errors import InputError

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm")


def open_pixels(places: tuple[str, ...], size: int | None) -> np.ndarray:
    """uint8 [pictures, height, width, channels], in the order of the files' names."""
    paths: list[Path] = []
    for place in places:
        folder = Path(place).expanduser()
        if folder.is_dir():
            found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICTURES)
            if not found:
                raise InputError(f"{folder} holds no picture ({', '.join(PICTURES)})")
            paths += found
        else:
            paths += find_files((place,), any_kind=True)
    parts = [_of_file(path, size) for path in paths]
    _check_shapes(parts)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _check_shapes(parts: list[np.ndarray]) -> None:
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) != 1:
        raise InputError(f"pictures of several shapes: {', '.join(map(str, sorted(shapes)))}; give --data.image-size")


def _of_file(path: Path, size: int | None) -> np.ndarray:
    kind = path.suffix.lower()
    if kind in (".npy", ".npz"):
        return _checked(_array(path), path)
    if kind == ".parquet":
        parts = [_decoded(data, f"{path}, row {n}", size)[None] for n, data in enumerate(_cells(path))]
        _check_shapes(parts)
        return np.concatenate(parts)
    if kind in PICTURES:
        return _decoded(path.read_bytes(), str(path), size)[None]
    raise InputError(f"{path}: expected .npz, .npy, .parquet, a picture or a folder of pictures")


def _array(path: Path) -> np.ndarray:
    """Of a .npy file, or of a .npz, which is a zip archive, the one that holds pictures."""
    try:
        with path.open("rb") as raw:  # numpy leaves a damaged archive open
            if raw.read(2) != b"PK":
                return np.load(path, mmap_mode="r")
            raw.seek(0)
            with np.load(raw) as file:
                name, array = _chosen(file, path)
    except InputError:
        raise
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(
            f"{path} cannot be read ({error}); expected pictures as numpy's save or savez writes them; fetch it again"
        ) from None
    if array.ndim != 2:
        return array
    # ImageNet64's rows have 3 · 64 · 64 numbers per picture, one colour after the other.
    side = round((array.shape[1] / 3) ** 0.5)
    if not side or 3 * side * side != array.shape[1]:
        rows = f"rows of {array.shape[1]} numbers"
        raise InputError(f"{path}: {rows} are no square pictures of three colours, in the array {name!r}")
    return np.ascontiguousarray(array.reshape(-1, 3, side, side).transpose(0, 2, 3, 1))


def _chosen(file: Any, path: Path) -> tuple[str, np.ndarray]:
    """`data`, as ImageNet64's files have it, or the first array that may hold pictures."""
    others = []
    for name in ["data"] if "data" in file else file:
        array = np.asarray(file[name])  # what is no array comes as bytes
        if name == "data" or (array.dtype == np.uint8 and array.ndim in (2, 4)):
            return name, array
        others.append(f"{name}, {array.dtype} of {array.shape}")
    raise InputError(
        f"{path}: expected an array `data`, or one of uint8 with 2 or 4 axes; got {'; '.join(others) or 'no array'}"
    )


def _checked(array: np.ndarray, path: Path) -> np.ndarray:
    if array.dtype != np.uint8 or array.ndim != 4 or not array.size:
        raise InputError(
            f"{path}: expected uint8 of shape (pictures, height, width, channels), got {array.dtype} of {array.shape}"
        )
    if array.shape[3] not in (1, 3):
        raise InputError(f"{path}: expected pictures of 1 or 3 colours, the last axis; got {array.shape}")
    return array


def _cells(path: Path) -> list[Any]:
    """The pictures of a column `image`, as files: bytes, or the {'bytes', 'path'} of Hugging Face."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(
            f"{path} cannot be read ({error}); expected parquet with a column `image`; fetch it again"
        ) from None
    names = [name for name in table.column_names if name in ("image", "img", "picture")]
    if not names:
        raise InputError(f"{path}: expected a column `image`, got {', '.join(table.column_names) or 'none'}")
    if not len(table):
        raise InputError(f"{path}: expected a row for each picture, got no rows")
    return [cell.get("bytes") if isinstance(cell, dict) else cell for cell in table[names[0]].to_pylist()]


def _decoded(data: Any, where: str, size: int | None) -> np.ndarray:
    import io

    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as file:
            picture: Image.Image = file.convert("RGB")
            if size is not None:
                side = min(picture.size)
                left, top = (picture.width - side) // 2, (picture.height - side) // 2
                picture = picture.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BOX)
            return np.asarray(picture, np.uint8)
    except (OSError, TypeError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"{where}: no readable picture ({error})") from None
