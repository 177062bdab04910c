"""Pictures as arrays of bytes [pictures, height, width, channels], for models that write pixels."""

from pathlib import Path

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
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) != 1:
        raise InputError(f"pictures of several shapes: {', '.join(map(str, sorted(shapes)))}; give --data.image-size")
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _of_file(path: Path, size: int | None) -> np.ndarray:
    kind = path.suffix.lower()
    if kind == ".npy":
        return _checked(np.load(path, mmap_mode="r"), path)
    if kind == ".npz":
        with np.load(path) as file:
            # ImageNet64's files hold `data`, a row of 3 · 64 · 64 numbers per picture, one colour after the other.
            name = "data" if "data" in file.files else file.files[0]
            array = file[name]
        if array.ndim == 2:
            side = round((array.shape[1] / 3) ** 0.5)
            if 3 * side * side != array.shape[1]:
                raise InputError(f"{path}: rows of {array.shape[1]} numbers are no square pictures of three colours")
            array = np.ascontiguousarray(array.reshape(-1, 3, side, side).transpose(0, 2, 3, 1))
        return _checked(array, path)
    if kind == ".parquet":
        return np.stack([_decoded(data, f"{path}, row {n}", size) for n, data in enumerate(_cells(path))])
    if kind in PICTURES:
        return _decoded(path.read_bytes(), str(path), size)[None]
    raise InputError(f"{path}: expected .npz, .npy, .parquet, a picture or a folder of pictures")


def _checked(array: np.ndarray, path: Path) -> np.ndarray:
    if array.dtype != np.uint8 or array.ndim != 4 or not len(array):
        raise InputError(
            f"{path}: expected uint8 of shape (pictures, height, width, channels), got {array.dtype} of {array.shape}"
        )
    return array


def _cells(path: Path) -> list[bytes]:
    """The pictures of a column `image`, as files: bytes, or the {'bytes', 'path'} of Hugging Face."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(path)
    names = [name for name in table.column_names if name in ("image", "img", "picture")]
    if not names:
        raise InputError(f"{path}: expected a column `image`, got {', '.join(table.column_names)}")
    return [cell["bytes"] if isinstance(cell, dict) else cell for cell in table[names[0]].to_pylist()]


def _decoded(data: bytes, where: str, size: int | None) -> np.ndarray:
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
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"{where}: no readable picture ({error})") from None
