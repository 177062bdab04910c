"""Image-captioning data: read images and their captions, and load batches of pixels."""

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsInt, get_args

from flaxen.data.caption_rows import (
    CAPTION,
    IMAGE,
    CaptionRow,
    Columns,
    ImageColumn,
    ImageTable,
    find,
    listed,
    read_parquet,
    stamp,
)
from flaxen.data.corpus import DataLocation
from flaxen.data.files import OnProgress, ignore_progress, kind_of, named, stamps, stat_of
from flaxen.data.hub import DatasetRows
from flaxen.data.images import MAX_PIXELS, ImageProcessor, UnreadableImage, open_image
from flaxen.data.pairs import Template
from flaxen.errors import InputError

if TYPE_CHECKING:
    import numpy
    import PIL.Image

Wrong = Literal["skip", "error"]
FILE = -1  # row number of an image stored in a file of its own
TAIL = 4096  # bytes at the end of an image that are hashed before two images are compared in full


@dataclass(frozen=True)
class Captions(DataLocation):
    """Images with captions: .jsonl .json .csv .tsv .parquet files, COCO annotations, folders with a metadata file, or
    a Hugging Face dataset. Rows that share an image are merged into one image with several captions."""

    train: tuple[str, ...] = ()
    """Training tables or glob patterns: .jsonl .json .csv .tsv .parquet, COCO annotations, or folders with a metadata
    file."""
    image: str = IMAGE
    """Column with the image or its path. A metadata file (metadata.csv, .jsonl or .parquet) may call it `file_name`
    instead."""
    caption: str = CAPTION
    """Column with a caption or a list of them, or a template such as '{title}: {text}'. A metadata file may call it
    `text` instead."""
    images: Path | None = None
    """Folder that image paths are relative to; a path outside it is an error. Default: the table's folder."""
    unreadable: Wrong = "skip"
    """What to do with an image that cannot be read: skip and report it, or stop with an error."""
    empty: Wrong = "skip"
    """What to do with a blank caption: skip and report it, or stop with an error."""
    max_pixels: int = MAX_PIXELS
    """Maximum image size, in pixels (width times height); larger images count as unreadable."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("unreadable", "empty"):
            if getattr(self, name) not in get_args(Wrong):
                raise InputError(
                    f"data.{name} must be one of {', '.join(get_args(Wrong))}, got {getattr(self, name)!r}"
                )
        if self.streaming:
            raise InputError(
                "--data.streaming cannot be combined with images, which are read in random order; remove it"
            )
        if self.max_pixels < 1:
            raise InputError(f"data.max_pixels must be at least 1, got {self.max_pixels}")
        if not self.image or not self.caption or Template(self.caption, "--data.caption").starred:
            raise InputError(
                f"data.image and data.caption must be column names without *, got {self.image!r} and {self.caption!r}"
            )

    def train_source(self) -> "CaptionSource":
        """Return the training data."""
        return DataLocation.train_source(replace(self, train=listed(self.train)))  # type: ignore[return-value]

    def validation_source(self) -> "CaptionSource | None":
        """Return the validation data if it has files or a split of its own."""
        return DataLocation.validation_source(replace(self, validation=listed(self.validation)))  # type: ignore[return-value]

    def _of_files(self, paths: tuple[Path, ...]) -> "CaptionSource":
        for path in paths:
            if kind_of(path) == ".txt":
                raise InputError(f"{path}: captions require a table; expected .jsonl, .json, .csv, .tsv or .parquet")
        return CaptionSource(self, paths)

    def _of_split(self, split: str) -> "CaptionSource":
        assert self.dataset
        return CaptionSource(self, split=DatasetRows(self.dataset, self.dataset_config, split))


@dataclass(frozen=True)
class CaptionSource:
    """Rows of image and captions, from files or from a split of a dataset."""

    data: Captions
    paths: tuple[Path, ...] = ()
    split: DatasetRows | None = None

    @property
    def name(self) -> str:
        return self.split.name if self.split else named(self.paths)

    @property
    def size(self) -> int | None:
        return None if self.split else sum(stat_of(path).st_size for path in self.paths)

    def identity(self) -> dict[str, Any]:
        """Return what images and captions depend on, as JSON."""
        names = ("image", "caption", "unreadable", "empty", "invalid", "max_pixels")
        settings = {name: getattr(self.data, name) for name in names} | {"images": str(self.data.images)}
        return {"captions": settings, **(self.split.identity() if self.split else {"files": stamps(self.paths)})}

    def texts(self, on_progress: OnProgress = ignore_progress) -> Iterator[str]:
        """Iterate over the captions that are not blank, row by row."""
        for origin in self.origins():
            for item in origin.items(on_progress):
                yield from (text for text in item.captions if not _blank(text))

    def origins(self) -> Iterator[ImageTable | ImageColumn]:
        """Open each table, with the folder of its images."""
        data, images = self.data, self.data.images and self.data.images.expanduser()
        columns = Columns(data.image, data.caption, data.invalid)
        if images and not images.is_dir():
            raise InputError(
                f"{images} does not exist or is not a folder; "
                "set --data.images to the folder that image paths are relative to"
            )
        if self.split:
            directory = Path(self.split.dataset).expanduser()
            folder = images or (directory if directory.is_dir() else None)
            yield ImageColumn(columns, self.split.load(), self.split.name, folder)
        for path in self.paths:
            if kind_of(path) == ".parquet":
                yield ImageColumn(columns, read_parquet(path, data.cache), str(path), images or path.parent)
            else:
                yield ImageTable(columns, path, images or path.parent)


@dataclass(eq=False, repr=False)
class CaptionSet:
    """Images and their captions, in order of first appearance."""

    source: CaptionSource
    problems: list[str] = field(default_factory=list)
    """Skipped images and captions: one message each, with place and reason."""
    repeated: int = 0
    """Number of captions dropped because the image already had them."""
    digest: str = ""
    part: tuple[int, int] | None = None
    _origins: list[ImageTable | ImageColumn] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _captions: list[list[str]] = field(default_factory=list)
    _places: array = field(default_factory=lambda: array("q"))  # alternating: index into _origins, row or FILE

    def __len__(self) -> int:
        return len(self._names)

    def captions(self, number: int) -> list[str]:
        """Return the captions of an image."""
        return list(self._captions[number])

    def name(self, number: int) -> str:
        """Return the path of an image as the table gives it, or its row."""
        return self._names[number]

    def image(self, number: int) -> "PIL.Image.Image":
        """Decode an image to RGB; raise UnreadableImage if that fails."""
        return open_image(self._file(number), self.source.data.max_pixels)

    def identity(self) -> dict[str, Any]:
        """Return what images and captions depend on, as JSON."""
        return {**self.source.identity(), "digest": self.digest, "part": list(self.part or (0, len(self)))}

    def split(self, held: int) -> "tuple[CaptionSet, CaptionSet]":
        """Return (the remaining images, the first `held` images); the list of problems stays with the former."""
        return self._slice(held, len(self)), replace(self._slice(0, held), problems=[], repeated=0)

    def _slice(self, first: int, last: int) -> "CaptionSet":
        names, captions = self._names[first:last], self._captions[first:last]
        places = self._places[2 * first : 2 * last]
        return replace(self, part=(first, last), _names=names, _captions=captions, _places=places)

    def _file(self, number: int) -> bytes | Path:
        """Return an image as encoded bytes or as a path."""
        origin, row = self._origins[self._places[2 * number]], self._places[2 * number + 1]
        if row != FILE and isinstance(origin, ImageColumn):
            return origin.read(row)
        return (origin.folder or Path()) / self._names[number]


def open_captions(data: Captions) -> tuple[CaptionSet, CaptionSet]:
    """Read the training and the validation captions; without separate validation data, split off the first images."""
    train, validation = read_captions(data.train_source()), data.validation_source()
    if validation:
        return train, read_captions(validation)
    count, percent = len(train), data.validation_percent
    # Unless validation_percent is 0, hold out at least one image, but never all of them.
    return train.split(min(max(round(count * percent / 100), 1), count - 1) if percent else 0)


def read_captions(source: CaptionSource) -> CaptionSet:
    """Read all rows of a source. No image is decoded: files are only checked for existence, bytes for length."""
    reader = _CaptionReader(source)
    for origin in source.origins():
        reader.captions._origins.append(origin)
        for row, item in enumerate(origin.items()):
            reader.add(item, row)
    return reader.finish()


class _CaptionReader:
    """Builds a CaptionSet row by row, merging rows that share an image."""

    def __init__(self, source: CaptionSource):
        self.captions, self.data = CaptionSet(source), source.data
        self.digest = hashlib.blake2b(digest_size=16)
        self.files: dict[str, int | None] = {}  # path to image number; None if skipped
        self.similar: dict[tuple[int, int], list[int]] = {}  # (size, hash of the last bytes) to image numbers

    def add(self, item: CaptionRow, row: int) -> None:
        """Add the captions of a row to its image, or record why it is skipped."""
        texts = [text for text in item.captions if not _blank(text)]
        for _ in range(max(len(item.captions), 1) - len(texts)):
            self.skip("empty", f"{item.where}: the caption of {item.name!r} is empty")
        if not texts:
            return
        try:
            number = self.add_file(item) if isinstance(item.image, str) else self.add_bytes(item, row)
        except UnreadableImage as error:
            self.skip("unreadable", f"{item.where}: cannot read the image {item.name!r}: {error}")
            return
        if number is None:
            return
        captions = self.captions._captions[number]
        for text in texts:
            if text in captions:
                self.captions.repeated += 1
            else:
                captions.append(text)
                self.digest.update(json.dumps([number, text]).encode())

    def add_file(self, item: CaptionRow) -> int | None:
        """Return the number of an image that is a file; None if an earlier row found it unreadable."""
        file = find(item.image, self.captions._origins[-1].folder, item.where)
        if file not in self.files:
            self.files[file] = None  # remains if stamp() raises, so that the problem is reported only once
            self.files[file] = self.new(item, FILE, stamp(file))
        return self.files[file]

    def add_bytes(self, item: CaptionRow, row: int) -> int:
        """Return the number of an image given as bytes; equal bytes are the same image."""
        if not item.image:
            raise UnreadableImage("the image is missing" if item.image is None else "the image has no bytes")
        # Python's hash differs between processes, but these are compared only within this one.
        # Images with the same size and the same last bytes are compared in full. Bytes are not kept: `_file` reads
        # those of earlier rows again.
        similar = self.similar.setdefault((len(item.image), hash(bytes(item.image[-TAIL:]))), [])
        for number in similar:
            if self.captions._file(number) == item.image:
                return number
        similar.append(self.new(item, row, [len(item.image)]))
        return similar[-1]

    def new(self, item: CaptionRow, row: int, stamp: list[int]) -> int:
        """Append an image without captions and return its number."""
        captions = self.captions
        captions._names.append(item.name)
        captions._captions.append([])
        captions._places.extend((len(captions._origins) - 1, row))
        self.digest.update(json.dumps([item.name, *stamp]).encode())
        return len(captions) - 1

    def skip(self, flag: Literal["empty", "unreadable"], problem: str) -> None:
        """Record a problem, or raise it if the settings say so."""
        if getattr(self.data, flag) == "error":
            raise InputError(f"{problem}; fix the row, or skip such rows with --data.{flag} skip")
        self.captions.problems.append(problem)

    def finish(self) -> CaptionSet:
        """Return the complete set; raise if it has no images."""
        captions = self.captions
        if not captions:
            folder = next((str(origin.folder) for origin in captions._origins if origin.folder), "an unknown folder")
            skipped = (
                f"; skipped {len(captions.problems):,} rows (first: {captions.problems[0]})"
                if captions.problems
                else ""
            )
            raise InputError(
                f"{captions.source.name}: expected images with captions, got none{skipped}; "
                f"image paths are relative to {folder}; choose another folder with --data.images"
            )
        captions.digest = self.digest.hexdigest()
        return captions


def _blank(text: str) -> bool:
    return not text or text.isspace()


def pixels(
    captions: CaptionSet, numbers: Iterable[SupportsInt], processor: ImageProcessor, workers: int | None = None
) -> "tuple[numpy.ndarray, list[tuple[int, str]]]":
    """Load images as float32 [B, 3, H, W], with `workers` threads (default: one per core).

    Unreadable images become rows of zeros, and are also returned as a list of (row, reason).
    """
    import numpy as np

    if processor.shape is None:
        raise InputError(f"images of different shapes cannot form a batch; add a size or a crop to {processor}")
    indices = [int(number) for number in numbers]
    batch = np.zeros((len(indices), 3, *processor.shape), np.float32)

    def fill(row: int) -> str | None:
        try:
            batch[row] = processor(captions.image(indices[row]))
        except UnreadableImage as error:
            return str(error)
        return None

    # Threads are enough: Pillow releases the GIL while it decodes and resizes.
    with ThreadPoolExecutor(workers or os.cpu_count(), "flaxen-images") as pool:
        failed = [(row, reason) for row, reason in enumerate(pool.map(fill, range(len(indices)))) if reason is not None]
    if failed and captions.source.data.unreadable == "error":
        row, reason = failed[0]
        raise InputError(
            f"cannot read the image {captions.name(indices[row])!r}: {reason}; "
            "fix the image, or skip such images with --data.unreadable skip"
        )
    return batch, failed
