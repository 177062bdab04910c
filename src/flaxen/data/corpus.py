"""What to train on: the documents of files or of a Hugging Face data set, one at a time, in order."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args, runtime_checkable

from flaxen.data.files import Invalid, OnProgress, find_files, ignore_progress
from flaxen.data.hub import DatasetRows
from flaxen.data.tables import text_cell
from flaxen.data.text_files import TextFiles, Unit, choose_column
from flaxen.errors import InputError


@runtime_checkable
class DataSource(Protocol):
    """Documents in order."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def size(self) -> int | None:
        """Bytes on disk, which `on_progress` counts up to; None if that is not known."""

    def texts(self, on_progress: OnProgress = ignore_progress) -> Iterator[str]:
        """The documents that are not blank, in constant memory."""

    def identity(self) -> dict[str, Any]:
        """What the texts depend on, as JSON."""


@dataclass(frozen=True)
class DataLocation:
    """Where data lies: files, or a Hugging Face data set."""

    train: tuple[str, ...] = ()
    """Files or globs: .txt .jsonl .json .csv .tsv .parquet, each but the last also as .gz."""
    validation: tuple[str, ...] = ()
    """Files to validate on, instead of a part of the training data."""
    validation_percent: float = 5.0
    """The first so many percent of the training data validate, unless there are files or a split for it."""
    dataset: str | None = None
    """Instead of files: a data set of the Hugging Face hub, or a directory that save_to_disk wrote."""
    dataset_config: str | None = None
    """The data set's configuration, if it has several."""
    split: str = "train"
    """The data set's split to train on."""
    validation_split: str | None = None
    """The data set's split to validate on."""
    streaming: bool = False
    """Read a data set of the hub as it downloads, without a copy on disk."""
    invalid: Invalid = "error"
    """Bytes that are not UTF-8: refuse them, or read each as U+FFFD."""
    cache: Path | None = None
    """Where tokens are kept (default: flaxen/tokens in $XDG_CACHE_HOME or ~/.cache)."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation_percent < 100:
            raise InputError(f"validation_percent must be at least 0 and below 100, got {self.validation_percent}")
        if self.invalid not in get_args(Invalid):
            raise InputError(f"invalid must be {' or '.join(get_args(Invalid))}, got {self.invalid!r}")
        if self.validation and self.validation_split:
            raise InputError("validation files and validation_split exclude each other; give one of them")
        alone = [name for name in ("dataset_config", "validation_split", "streaming") if getattr(self, name)]
        if alone and not self.dataset:
            raise InputError(f"{alone[0]} belongs to a data set; name one with --data.dataset")

    def train_source(self) -> DataSource:
        """What to train on."""
        # Not checked in __post_init__: default flags stand for flags that are not read yet.
        if bool(self.train) == bool(self.dataset):
            got = "both" if self.train else "neither"
            raise InputError(f"expected files (--data.train) or a data set (--data.dataset), got {got}")
        return self._of_split(self.split) if self.dataset else self._of_files(find_files(self.train))

    def validation_source(self) -> DataSource | None:
        """What to validate on, if it is apart from the training data."""
        if self.validation:
            return self._of_files(find_files(self.validation))
        return self._of_split(self.validation_split) if self.validation_split else None

    def _of_files(self, paths: tuple[Path, ...]) -> DataSource:
        raise NotImplementedError

    def _of_split(self, split: str) -> DataSource:
        raise NotImplementedError


@dataclass(frozen=True)
class Corpus(DataLocation):
    """Text to train on: files, or a Hugging Face data set."""

    column: str | None = None
    """The column that holds the text (default: `text` if there is one, else the first)."""
    unit: Unit = "line"
    """What a document is in .txt: a line, the lines up to an empty one, or the file, such as a book."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit not in get_args(Unit):
            raise InputError(f"unit must be {' or '.join(get_args(Unit))}, got {self.unit!r}")

    def _of_files(self, paths: tuple[Path, ...]) -> TextFiles:
        return TextFiles(paths, self.column, self.unit, self.invalid)

    def _of_split(self, split: str) -> "DatasetSplit":
        assert self.dataset
        return DatasetSplit(self.dataset, self.dataset_config, split, self.streaming, self.column, self.invalid)


@dataclass(frozen=True)
class DatasetSplit(DatasetRows):
    """The documents of a split of a Hugging Face data set."""

    column: str | None = None
    invalid: Invalid = "error"

    def texts(self, on_progress: OnProgress = ignore_progress) -> Iterator[str]:
        column = self.column or ""

        def choose(columns: list[str], where: str) -> list[str]:
            nonlocal column
            column = choose_column(self.column, columns, where)
            return [column]

        for where, row in self.rows(choose, self.invalid, on_progress):
            text = text_cell(row[column], column, where, self.invalid)
            if text and not text.isspace():
                yield text

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"column": self.column, "invalid": self.invalid}
