"""Read rows of (image, captions) from tables, COCO annotations and Hugging Face datasets."""

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from flaxen.data.files import Invalid, OnProgress, decoded, ignore_progress, kind_of, lines
from flaxen.data.images import UnreadableImage
from flaxen.data.pairs import Template
from flaxen.data.tables import Row, no_column, rows, text_cell
from flaxen.errors import InputError

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
IMAGE, CAPTION = "image", "caption"


@dataclass(frozen=True)
class Columns:
    """Names of the image and caption columns."""

    image: str = IMAGE
    caption: str = CAPTION
    invalid: Invalid = "error"

    def among(self, columns: list[str], where: str, path: Path | None = None) -> tuple[str, Template]:
        """Resolve the image column and the caption template among the columns of a table.

        Metadata files (Hugging Face's ImageFolder) call them `file_name` and `text`.
        """
        image, caption = self.image, self.caption
        if path and path.name.removesuffix(".gz") in METADATA:
            image = "file_name" if image == IMAGE and image not in columns else image
            caption = "text" if caption == CAPTION and caption not in columns and "text" in columns else caption
        if image not in columns:
            raise no_column(image, columns, where, "--data.image")
        template = Template(caption, "--data.caption")
        template.columns(columns, where)
        return image, template


def listed(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Replace each directory by its metadata file."""
    return tuple(
        _find_metadata(Path(pattern).expanduser()) if Path(pattern).expanduser().is_dir() else pattern
        for pattern in patterns
    )


def _find_metadata(folder: Path) -> str:
    for name in METADATA:
        if (folder / name).exists():
            return str(folder / name)
    if any((folder / name).exists() for name in ("state.json", "dataset_dict.json")):
        raise InputError(f"{folder} is a dataset written by save_to_disk; read it with --data.dataset {folder}")
    raise InputError(f"{folder} contains no {' or '.join(METADATA)}; add one with the columns file_name and caption")


class CaptionRow(NamedTuple):
    """A row of a table: its image is a path, the bytes of an image file, or None."""

    where: str
    image: Any
    name: str
    captions: list[str]


@dataclass(frozen=True)
class ImageTable:
    """A table whose rows name image files."""

    columns: Columns
    path: Path
    folder: Path

    def items(self, on_progress: OnProgress = ignore_progress) -> Iterator[CaptionRow]:
        """Iterate over the rows."""
        columns, path, invalid = self.columns, self.path, self.columns.invalid
        image, caption = columns.image, Template(columns.caption, "--data.caption")

        def choose(available: list[str], where: str) -> list[str]:
            nonlocal image, caption
            image, caption = columns.among(available, where, path)
            return [image, *caption.columns(available, where)]

        coco = _read_coco(path, invalid)
        table = rows(path, choose, invalid, on_progress) if coco is None else _coco_rows(path, coco, columns)
        for where, row in table:
            name = text_cell(row[image], image, where, invalid, "--data.image")
            yield CaptionRow(where, name, name or "", _texts(caption, row, where, invalid))


class ImageColumn:
    """Images stored in a column of a dataset; any row can be read on its own."""

    def __init__(self, columns: Columns, dataset: Any, name: str, folder: Path | None):
        self.name, self.folder, self.invalid = name, folder, columns.invalid
        self.column, self.caption = columns.among(dataset.column_names, name, Path(name))
        self.table = dataset.with_format("arrow")  # the encoded bytes; the default format would decode every image
        self.images = self.table.select_columns([self.column])
        kind = str(dataset.features.arrow_schema.field(self.column).type)
        if kind.removeprefix("large_") not in ("string", "binary") and "bytes: binary" not in kind:
            raise InputError(
                f"{name}: expected images, image bytes or image paths in column {self.column!r}, got {kind:.60}; "
                "choose another column with --data.image"
            )

    def items(self, on_progress: OnProgress = ignore_progress) -> Iterator[CaptionRow]:
        """Iterate over the rows."""
        texts = list(dict.fromkeys(self.caption.columns(self.table.column_names, self.name)))
        number = 0
        columns = list(dict.fromkeys([self.column, *texts]))
        for batch in self.table.select_columns(columns).iter(batch_size=256):
            try:
                text_rows = batch.select(texts).to_pylist()
            except UnicodeDecodeError as error:
                raise InputError(f"{self.name}, after row {number}: {error}; convert the table to UTF-8") from None
            for cell, row in zip(batch.column(self.column), text_rows):
                number += 1
                where = f"{self.name}, row {number}"
                image, name = _unpack_image(cell)
                captions = _texts(self.caption, row, where, self.invalid)
                yield CaptionRow(where, image, name or f"row {number}", captions)

    def read(self, row: int) -> bytes:
        """Return the encoded image of one row."""
        return bytes(_unpack_image(self.images[row].column(0)[0])[0])


def _unpack_image(cell: Any) -> tuple[Any, str | None]:
    """Return the image in an Arrow cell, as a path or a view of its bytes, and its name."""
    value, name = cell, None
    if hasattr(cell, "keys"):  # a struct {bytes, path}, as the Image feature of `datasets` stores it
        value = cell["bytes"] if cell.is_valid else cell
        name = cell["path"].as_py() if cell.is_valid and "path" in cell else None
        if name and not value.is_valid:
            return name, name
    if not value.is_valid:
        return None, name
    if "binary" in str(value.type):
        return memoryview(value.as_buffer()).cast("B"), name  # Arrow buffers are signed; Python bytes are not
    return value.as_py(), value.as_py()


def read_parquet(path: Path, cache: Path | None) -> Any:
    """Open a Parquet file as a dataset: Arrow on disk, with random access to rows."""
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"{path}: reading images from Parquet requires the datasets package; "
            "install it with: pip install 'flaxen[datasets]'"
        ) from None
    try:
        return datasets.Dataset.from_parquet(str(path), cache_dir=str(cache) if cache else None)
    except (OSError, ValueError, RuntimeError) as error:
        cause = error.__cause__ or error
        raise InputError(f"cannot read {path}: {str(cause).splitlines()[0]}; download it again") from None


def _read_coco(path: Path, invalid: Invalid) -> dict[str, Any] | None:
    """Parse a file of COCO annotations; None if the file is anything else."""
    if kind_of(path) != ".json" or not next(decoded(path, invalid, ignore_progress), "").lstrip().startswith("{"):
        return None
    first = next((line for line in lines(decoded(path, invalid, ignore_progress)) if line.strip()), "")
    for text in (first, None):  # try the first line alone: in JSON lines it parses, and the rest is not read
        try:
            coco = json.loads("".join(decoded(path, invalid, ignore_progress)) if text is None else text)
        except (ValueError, RecursionError):
            continue
        return coco if isinstance(coco, dict) and {"images", "annotations"} <= coco.keys() else None
    return None


def _coco_rows(path: Path, coco: dict[str, Any], columns: Columns) -> Iterator[Row]:
    """Join COCO images with their annotations; annotations without an image come last."""
    texts: dict[Any, list[Any]] = {}
    try:
        for annotation in coco["annotations"]:
            if columns.caption not in annotation:
                raise no_column(columns.caption, list(annotation), f"{path}, annotations", "--data.caption")
            texts.setdefault(annotation["image_id"], []).append(annotation[columns.caption])
        for image in coco["images"]:
            captions = texts.pop(image["id"], [])
            yield f"{path}, image {image['id']}", {columns.image: image["file_name"], columns.caption: captions}
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{path}: expected COCO images (id, file_name) and annotations (image_id, {columns.caption}), "
            f"got an entry without {error}"
        ) from None
    for image_id, captions in texts.items():
        yield f"{path}, annotations of image {image_id}", {columns.image: None, columns.caption: captions}


def _texts(caption: Template, row: dict[str, Any], where: str, invalid: Invalid) -> list[str]:
    """Return the captions of a row: a caption column may hold one text or a list."""
    value = caption.value(row, None, where) if caption.plain else caption.fill(row, None, where, invalid)
    values = value if isinstance(value, list) else [value]
    return [text_cell(text, caption.text, where, invalid, caption.flag) or "" for text in values]


def find(name: str, folder: Path | None, where: str) -> str:
    """Resolve the path of an image, following links, and check that it stays inside the image folder."""
    if "://" in name:
        raise InputError(f"{where}: expected the path of an image, got the URL {name!r}; download the images first")
    if folder is None and not os.path.isabs(name):
        raise InputError(
            f"{where}: the path {name!r} is relative, but the image folder is unknown; set it with --data.images"
        )
    try:
        file, root = os.path.realpath((folder or Path()) / name), _resolve(folder or Path("/"))
    except (OSError, ValueError) as error:
        raise UnreadableImage(str(error)) from None
    if os.path.commonpath([file, root]) != root:
        raise InputError(
            f"{where}: {name!r} resolves to {file}, outside the image folder {root}; "
            "set --data.images to a folder that contains all images"
        )
    return file


@cache
def _resolve(folder: Path) -> str:
    return os.path.realpath(folder)


def stamp(file: str) -> list[int]:
    """Return the size and modification time of an image file; raise if it is missing, empty or not a regular file."""
    try:
        status = os.stat(file)
    except OSError as error:
        raise UnreadableImage(error.strerror or str(error)) from None
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        raise UnreadableImage("the file is empty" if stat.S_ISREG(status.st_mode) else "not a regular file")
    return [status.st_size, status.st_mtime_ns]
