"""Rows that name or hold an image and have its captions: of tables, COCO's annotations, and data sets."""

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
    """The columns that were asked for."""

    image: str = IMAGE
    caption: str = CAPTION
    invalid: Invalid = "error"

    def among(self, columns: list[str], where: str, path: Path | None = None) -> tuple[str, Template]:
        """That of the image and that of the captions. Metadata files have names of their own for them."""
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
    """With folders named by their metadata files."""
    return tuple(_metadata(Path(one).expanduser()) if Path(one).expanduser().is_dir() else one for one in patterns)


def _metadata(folder: Path) -> str:
    for name in METADATA:
        if (folder / name).exists():
            return str(folder / name)
    if any((folder / name).exists() for name in ("state.json", "dataset_dict.json")):
        raise InputError(f"{folder} is a data set of save_to_disk; read it with --data.dataset {folder}")
    raise InputError(f"{folder} has no {' or '.join(METADATA)}; add one with the columns file_name and caption")


class CaptionRow(NamedTuple):
    """A row: its image is a path, the bytes of a file, or missing."""

    where: str
    image: Any
    name: str
    captions: list[str]


@dataclass(frozen=True)
class ImageTable:
    """Images that are files, and a table of them."""

    columns: Columns
    path: Path
    folder: Path

    def items(self, on_progress: OnProgress = ignore_progress) -> Iterator[CaptionRow]:
        columns, path, invalid = self.columns, self.path, self.columns.invalid
        image, caption = columns.image, Template(columns.caption, "--data.caption")

        def choose(there: list[str], where: str) -> list[str]:
            nonlocal image, caption
            image, caption = columns.among(there, where, path)
            return [image, *caption.columns(there, where)]

        coco = _coco(path, invalid)
        table = rows(path, choose, invalid, on_progress) if coco is None else _coco_rows(path, coco, columns)
        for where, row in table:
            name = text_cell(row[image], image, where, invalid, "--data.image")
            yield CaptionRow(where, name, name or "", _texts(caption, row, where, invalid))


class ImageColumn:
    """Images in a column of a data set, read by row."""

    def __init__(self, columns: Columns, dataset: Any, name: str, folder: Path | None):
        self.name, self.folder, self.invalid = name, folder, columns.invalid
        self.column, self.caption = columns.among(dataset.column_names, name, Path(name))
        self.table = dataset.with_format("arrow")  # the bytes as they lie on disk, not decoded
        self.images = self.table.select_columns([self.column])
        kind = str(dataset.features.arrow_schema.field(self.column).type)
        if kind.removeprefix("large_") not in ("string", "binary") and "bytes: binary" not in kind:
            raise InputError(
                f"{name}: expected images, their bytes or their paths in column {self.column!r}, got {kind:.60}; "
                "choose another with --data.image"
            )

    def items(self, on_progress: OnProgress = ignore_progress) -> Iterator[CaptionRow]:
        texts = list(dict.fromkeys(self.caption.columns(self.table.column_names, self.name)))
        number = 0
        needed = list(dict.fromkeys([self.column, *texts]))
        for batch in self.table.select_columns(needed).iter(batch_size=256):
            try:
                others = batch.select(texts).to_pylist()
            except UnicodeDecodeError as error:
                raise InputError(f"{self.name}, after row {number}: {error}; write the table as UTF-8") from None
            for cell, row in zip(batch.column(self.column), others):
                number += 1
                where = f"{self.name}, row {number}"
                image, name = _image(cell)
                captions = _texts(self.caption, row, where, self.invalid)
                yield CaptionRow(where, image, name or f"row {number}", captions)

    def read(self, row: int) -> bytes:
        return bytes(_image(self.images[row].column(0)[0])[0])


def _image(cell: Any) -> tuple[Any, str | None]:
    """The path or a view of the bytes in an Arrow cell, and the image's name."""
    value, name = cell, None
    if hasattr(cell, "keys"):  # {bytes, path}
        value = cell["bytes"] if cell.is_valid else cell
        name = cell["path"].as_py() if cell.is_valid and "path" in cell else None
        if name and not value.is_valid:
            return name, name
    if not value.is_valid:
        return None, name
    if "binary" in str(value.type):
        return memoryview(value.as_buffer()).cast("B"), name  # signed bytes would not equal those of Python
    return value.as_py(), value.as_py()


def read_parquet(path: Path, cache: Path | None) -> Any:
    """The file as a data set: Arrow on disk, of which any row can be read by itself."""
    try:
        import datasets
    except ImportError:
        raise InputError(f"{path}: images in Parquet need `datasets`; pip install 'flaxen[datasets]'") from None
    try:
        return datasets.Dataset.from_parquet(str(path), cache_dir=str(cache) if cache else None)
    except (OSError, ValueError, RuntimeError) as error:
        cause = error.__cause__ or error
        raise InputError(f"cannot read {path} ({str(cause).splitlines()[0]}); fetch it again") from None


def _coco(path: Path, invalid: Invalid) -> dict[str, Any] | None:
    """The whole of COCO's annotations, if the file has them."""
    if kind_of(path) != ".json" or not next(decoded(path, invalid, ignore_progress), "").lstrip().startswith("{"):
        return None
    first = next((line for line in lines(decoded(path, invalid, ignore_progress)) if line.strip()), "")
    for text in (first, None):  # all in one line, or over many; if the first line is a row, the others are not read
        try:
            whole = json.loads("".join(decoded(path, invalid, ignore_progress)) if text is None else text)
        except (ValueError, RecursionError):
            continue
        return whole if isinstance(whole, dict) and {"images", "annotations"} <= whole.keys() else None
    return None


def _coco_rows(path: Path, whole: dict[str, Any], columns: Columns) -> Iterator[Row]:
    texts: dict[Any, list[Any]] = {}
    try:
        for note in whole["annotations"]:
            if columns.caption not in note:
                raise no_column(columns.caption, list(note), f"{path}, annotations", "--data.caption")
            texts.setdefault(note["image_id"], []).append(note[columns.caption])
        for image in whole["images"]:
            found = texts.pop(image["id"], [])
            yield f"{path}, image {image['id']}", {columns.image: image["file_name"], columns.caption: found}
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{path}: expected COCO's images (id, file_name) and annotations (image_id, {columns.caption}), "
            f"got one without {error}"
        ) from None
    for number, found in texts.items():
        yield f"{path}, annotations of image {number}", {columns.image: None, columns.caption: found}


def _texts(caption: Template, row: dict[str, Any], where: str, invalid: Invalid) -> list[str]:
    value = caption.value(row, None, where) if caption.plain else caption.fill(row, None, where, invalid)
    values = value if isinstance(value, list) else [value]
    return [text_cell(one, caption.text, where, invalid, caption.flag) or "" for one in values]


def find(name: str, folder: Path | None, where: str) -> str:
    """The file that a path means, links followed, if it is in the folder."""
    if "://" in name:
        raise InputError(f"{where}: expected the path of an image, got the address {name!r}; download the images")
    if folder is None and not os.path.isabs(name):
        raise InputError(f"{where}: {name!r} is in a folder that is not known; name it with --data.images")
    try:
        file, root = os.path.realpath((folder or Path()) / name), _real(folder or Path("/"))
    except (OSError, ValueError) as error:
        raise UnreadableImage(str(error)) from None
    if os.path.commonpath([file, root]) != root:
        raise InputError(
            f"{where}: {name!r} leads to {file}, outside the folder of the images, {root}; "
            "set --data.images to the folder that all paths start from and stay in"
        )
    return file


@cache
def _real(folder: Path) -> str:
    return os.path.realpath(folder)


def stamp(file: str) -> list[int]:
    """Size and time of a file, if it may be an image."""
    try:
        about = os.stat(file)
    except OSError as error:
        raise UnreadableImage(error.strerror or str(error)) from None
    if not stat.S_ISREG(about.st_mode) or not about.st_size:
        raise UnreadableImage("the file is empty" if stat.S_ISREG(about.st_mode) else "not a file")
    return [about.st_size, about.st_mtime_ns]
