"""Text data settings: documents from files or from a Hugging Face dataset, read one at a time, in order."""

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
    """A sequence of documents that can be read repeatedly, in the same order."""

    @property
    def name(self) -> str:
        """Name of the source in messages."""

    @property
    def size(self) -> int | None:
        """Bytes on disk, the final value that `on_progress` receives; None if unknown."""

    def texts(self, on_progress: OnProgress = ignore_progress) -> Iterator[str]:
        """Iterate over the documents that are not blank, in constant memory."""

    def identity(self) -> dict[str, Any]:
        """Return what the texts depend on, as JSON; the key of the token cache."""


@dataclass(frozen=True)
class DataLocation:
    """Where data comes from: files or a Hugging Face dataset."""

    train: tuple[str, ...] = ()
    """Training files or glob patterns: .txt .jsonl .json .csv .tsv (each also with .gz) or .parquet."""
    validation: tuple[str, ...] = ()
    """Validation files or glob patterns, used instead of held-out training data."""
    validation_percent: float = 5.0
    """Percentage of the training data to hold out for validation, taken from the start; ignored if there are validation
    files or a validation split."""
    dataset: str | None = None
    """Dataset to read instead of files: a Hugging Face hub id, or a directory written by save_to_disk. Default:
    none."""
    dataset_config: str | None = None
    """Configuration (subset) of the dataset. Default: the dataset's default."""
    split: str = "train"
    """Split of the dataset to train on."""
    validation_split: str | None = None
    """Split of the dataset to validate on. Default: held-out training data."""
    streaming: bool = False
    """Stream the dataset from the hub instead of downloading it first."""
    invalid: Invalid = "error"
    """What to do with bytes that are not valid UTF-8: stop with an error, or replace them with U+FFFD."""
    cache: Path | None = None
    """Directory of the token cache. Default: flaxen/tokens in $XDG_CACHE_HOME or ~/.cache."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation_percent < 100:
            raise InputError(f"data.validation_percent must be at least 0 and below 100, got {self.validation_percent}")
        if self.invalid not in get_args(Invalid):
            raise InputError(f"data.invalid must be one of {', '.join(get_args(Invalid))}, got {self.invalid!r}")
        if self.validation and self.validation_split:
            raise InputError("--data.validation cannot be combined with --data.validation-split")
        dataset_only = [name for name in ("dataset_config", "validation_split", "streaming") if getattr(self, name)]
        if dataset_only and not self.dataset:
            raise InputError(f"data.{dataset_only[0]} has no effect without a dataset; set one with --data.dataset")

    def train_source(self) -> DataSource:
        """Return the training data."""
        # Not checked in __post_init__: the command line builds the defaults before it reads the flags.
        if bool(self.train) == bool(self.dataset):
            got = "both" if self.train else "neither"
            raise InputError(f"exactly one of --data.train and --data.dataset is required, got {got}")
        return self._of_split(self.split) if self.dataset else self._of_files(find_files(self.train))

    def validation_source(self) -> DataSource | None:
        """Return the validation data if it is separate from the training data."""
        if self.validation:
            return self._of_files(find_files(self.validation))
        return self._of_split(self.validation_split) if self.validation_split else None

    def _of_files(self, paths: tuple[Path, ...]) -> DataSource:
        raise NotImplementedError

    def _of_split(self, split: str) -> DataSource:
        raise NotImplementedError


@dataclass(frozen=True)
class Corpus(DataLocation):
    """Text to train on: files or a Hugging Face dataset."""

    column: str | None = None
    """Column that holds the text. Default: `text` if it exists, else the first column."""
    unit: Unit = "line"
    """What counts as one document in a .txt file: a line, a paragraph (ended by a blank line), or the whole file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit not in get_args(Unit):
            raise InputError(f"data.unit must be one of {', '.join(get_args(Unit))}, got {self.unit!r}")

    def _of_files(self, paths: tuple[Path, ...]) -> TextFiles:
        return TextFiles(paths, self.column, self.unit, self.invalid)

    def _of_split(self, split: str) -> "DatasetSplit":
        assert self.dataset
        return DatasetSplit(self.dataset, self.dataset_config, split, self.streaming, self.column, self.invalid)


@dataclass(frozen=True)
class DatasetSplit(DatasetRows):
    """The documents in one column of a split of a Hugging Face dataset."""

    column: str | None = None
    invalid: Invalid = "error"

    def texts(self, on_progress: OnProgress = ignore_progress) -> Iterator[str]:
        """Iterate over the documents that are not blank."""
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
        """Return what the texts depend on, as JSON."""
        return super().identity() | {"column": self.column, "invalid": self.invalid}
