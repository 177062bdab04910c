"""Images with their captions, and the pixels of some of them."""

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
FILE = -1  # in place of a row: the image is a file
TAIL = 4096  # bytes of an image that are looked at before it is compared with another


@dataclass(frozen=True)
class Captions(DataLocation):
    """Images with captions: .jsonl .json .csv .tsv .parquet files, COCO's annotations, folders that have a metadata
    file, or a Hugging Face data set. Rows of the same image are one image with several captions."""

    image: str = IMAGE
    """The column with the image or its path. In a metadata file also `file_name`."""
    caption: str = CAPTION
    """The column with a caption or a list of them, or a template such as '{title}: {text}'. In a metadata file also
    `text`."""
    images: Path | None = None
    """The folder that paths start from and stay in. Default: the table's."""
    unreadable: Wrong = "skip"
    """An image that cannot be read: leave it out and say so, or stop."""
    empty: Wrong = "skip"
    """A caption that is blank: leave it out and say so, or stop."""
    max_pixels: int = MAX_PIXELS
    """Images of more pixels are not read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("unreadable", "empty"):
            if getattr(self, name) not in get_args(Wrong):
                raise InputError(f"{name} must be {' or '.join(get_args(Wrong))}, got {getattr(self, name)!r}")
        if self.streaming:
            raise InputError("images are read in any order, a stream only in its own; leave out --data.streaming")
        if self.max_pixels < 1:
            raise InputError(f"max_pixels must be at least 1, got {self.max_pixels}")
        if not self.image or not self.caption or Template(self.caption, "--data.caption").starred:
            raise InputError(f"expected columns, a list of captions without *, got {self.image!r} and {self.caption!r}")

    def train_source(self) -> "CaptionSource":
        return DataLocation.train_source(replace(self, train=listed(self.train)))  # type: ignore[return-value]

    def validation_source(self) -> "CaptionSource | None":
        return DataLocation.validation_source(replace(self, validation=listed(self.validation)))  # type: ignore[return-value]

    def _of_files(self, paths: tuple[Path, ...]) -> "CaptionSource":
        for path in paths:
            if kind_of(path) == ".txt":
                raise InputError(f"{path}: captions need columns; expected .jsonl, .json, .csv, .tsv or .parquet")
        return CaptionSource(self, paths)

    def _of_split(self, split: str) -> "CaptionSource":
        assert self.dataset
        return CaptionSource(self, split=DatasetRows(self.dataset, self.dataset_config, split))


@dataclass(frozen=True)
class CaptionSource:
    """The rows of files, or of a split of a data set."""

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
        names = ("image", "caption", "unreadable", "empty", "invalid", "max_pixels")
        about = {name: getattr(self.data, name) for name in names} | {"images": str(self.data.images)}
        return {"captions": about, **(self.split.identity() if self.split else {"files": stamps(self.paths)})}

    def texts(self, on_progress: OnProgress = ignore_progress) -> Iterator[str]:
        """The captions that are not blank, row by row."""
        for origin in self.origins():
            for item in origin.items(on_progress):
                yield from (text for text in item.captions if not _blank(text))

    def origins(self) -> Iterator[ImageTable | ImageColumn]:
        """Where the rows are, each with the folder of its images."""
        data, images = self.data, self.data.images and self.data.images.expanduser()
        columns = Columns(data.image, data.caption, data.invalid)
        if images and not images.is_dir():
            raise InputError(f"no folder {str(images)!r}; name the one that paths start from with --data.images")
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
    """Images that have captions, in the order in which they first appear."""

    source: CaptionSource
    problems: list[str] = field(default_factory=list)
    """What is left out, where it stands and why: a line for each image or caption."""
    repeated: int = 0
    """Captions that an image already had."""
    digest: str = ""
    part: tuple[int, int] | None = None
    _origins: list[ImageTable | ImageColumn] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _captions: list[list[str]] = field(default_factory=list)
    _places: array = field(default_factory=lambda: array("q"))  # by turns: which origin, and which row of it or FILE

    def __len__(self) -> int:
        return len(self._names)

    def captions(self, number: int) -> list[str]:
        return list(self._captions[number])

    def name(self, number: int) -> str:
        """Its path as the table gives it, or its row."""
        return self._names[number]

    def image(self, number: int) -> "PIL.Image.Image":
        """Decoded to RGB, or Unreadable."""
        return open_image(self._file(number), self.source.data.max_pixels)

    def identity(self) -> dict[str, Any]:
        """What images and captions depend on, as JSON."""
        return {**self.source.identity(), "digest": self.digest, "part": list(self.part or (0, len(self)))}

    def split(self, held: int) -> "tuple[CaptionSet, CaptionSet]":
        """All but the first so many, with what there is to tell; and those."""
        return self._of(held, len(self)), replace(self._of(0, held), problems=[], repeated=0)

    def _of(self, first: int, last: int) -> "CaptionSet":
        names, captions = self._names[first:last], self._captions[first:last]
        places = self._places[2 * first : 2 * last]
        return replace(self, part=(first, last), _names=names, _captions=captions, _places=places)

    def _file(self, number: int) -> bytes | Path:
        origin, row = self._origins[self._places[2 * number]], self._places[2 * number + 1]
        if row != FILE and isinstance(origin, ImageColumn):
            return origin.read(row)
        return (origin.folder or Path()) / self._names[number]


def open_captions(data: Captions) -> tuple[CaptionSet, CaptionSet]:
    """Those to train on, and those to validate on."""
    whole, validation = read_captions(data.train_source()), data.validation_source()
    if validation:
        return whole, read_captions(validation)
    count, percent = len(whole), data.validation_percent
    return whole.split(min(max(round(count * percent / 100), 1), count - 1) if percent else 0)


def read_captions(source: CaptionSource) -> CaptionSet:
    """All of a source. No image is opened: files are looked for, and bytes counted."""
    reading = _CaptionReader(source)
    for origin in source.origins():
        reading.found._origins.append(origin)
        for row, item in enumerate(origin.items()):
            reading.add(item, row)
    return reading.done()


class _CaptionReader:
    """A set while it is read."""

    def __init__(self, source: CaptionSource):
        self.found, self.data = CaptionSet(source), source.data
        self.digest = hashlib.blake2b(digest_size=16)
        self.files: dict[str, int | None] = {}  # their numbers; None for one that is left out
        self.alike: dict[tuple[int, int], list[int]] = {}  # the numbers of images of so many bytes that end so

    def add(self, item: CaptionRow, row: int) -> None:
        texts = [text for text in item.captions if not _blank(text)]
        for _ in range(max(len(item.captions), 1) - len(texts)):
            self.skip("empty", f"{item.where}: the caption of {item.name!r} is empty")
        if not texts:
            return
        try:
            number = self.of_file(item) if isinstance(item.image, str) else self.of_bytes(item, row)
        except UnreadableImage as error:
            self.skip("unreadable", f"{item.where}: cannot read the image {item.name!r}: {error}")
            return
        if number is None:
            return
        captions = self.found._captions[number]
        for text in texts:
            if text in captions:
                self.found.repeated += 1
            else:
                captions.append(text)
                self.digest.update(json.dumps([number, text]).encode())

    def of_file(self, item: CaptionRow) -> int | None:
        file = find(item.image, self.found._origins[-1].folder, item.where)
        if file not in self.files:
            self.files[file] = None
            self.files[file] = self.new(item, FILE, stamp(file))
        return self.files[file]

    def of_bytes(self, item: CaptionRow, row: int) -> int:
        if not item.image:
            raise UnreadableImage("there is none" if item.image is None else "no bytes")
        alike = self.alike.setdefault((len(item.image), hash(bytes(item.image[-TAIL:]))), [])
        for number in alike:
            if self.found._file(number) == item.image:
                return number
        alike.append(self.new(item, row, [len(item.image)]))
        return alike[-1]

    def new(self, item: CaptionRow, row: int, stamp: list[int]) -> int:
        found = self.found
        found._names.append(item.name)
        found._captions.append([])
        found._places.extend((len(found._origins) - 1, row))
        self.digest.update(json.dumps([item.name, *stamp]).encode())
        return len(found) - 1

    def skip(self, flag: Literal["empty", "unreadable"], what: str) -> None:
        if getattr(self.data, flag) == "error":
            raise InputError(f"{what}; mend it, or leave such rows out with --data.{flag} skip")
        self.found.problems.append(what)

    def done(self) -> CaptionSet:
        found = self.found
        if not found:
            folder = next((str(origin.folder) for origin in found._origins if origin.folder), "nowhere")
            left = f"; {len(found.problems):,} left out, the first: {found.problems[0]}" if found.problems else ""
            raise InputError(
                f"{found.source.name}: expected images with captions, got none{left}; "
                f"paths start from {folder}, another folder is set with --data.images"
            )
        found.digest = self.digest.hexdigest()
        return found


def _blank(text: str) -> bool:
    return not text or text.isspace()


def pixels(
    captions: CaptionSet, numbers: Iterable[SupportsInt], processor: ImageProcessor, workers: int | None = None
) -> "tuple[numpy.ndarray, list[tuple[int, str]]]":
    """float32 [B, 3, H, W] of the images with these numbers, by so many threads (default: one for each core); rows that
    cannot be read are zeros, and are told with the reason."""
    import numpy as np

    if processor.shape is None:
        raise InputError(f"images of different shapes make no batch; add a size or a crop to {processor}")
    chosen = [int(number) for number in numbers]
    batch = np.zeros((len(chosen), 3, *processor.shape), np.float32)

    def fill(row: int) -> str | None:
        try:
            batch[row] = processor(captions.image(chosen[row]))
        except UnreadableImage as error:
            return str(error)
        return None

    with ThreadPoolExecutor(workers or os.cpu_count(), "flaxen-images") as pool:
        failed = [(row, reason) for row, reason in enumerate(pool.map(fill, range(len(chosen)))) if reason is not None]
    if failed and captions.source.data.unreadable == "error":
        row, reason = failed[0]
        raise InputError(
            f"cannot read the image {captions.name(chosen[row])!r}: {reason}; "
            "mend it, or leave such images out with --data.unreadable skip"
        )
    return batch, failed
