"""What to train on: the documents of files or of a Hugging Face data set, one at a time, in order."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args, runtime_checkable

from flaxen.data.readers import Invalid, Report, TextFiles, Unit, checked, choose_column, find_files, silent
from flaxen.errors import InputError, nearest


@runtime_checkable
class Source(Protocol):
    """Documents in order."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def size(self) -> int | None:
        """Bytes on disk, which `report` counts up to; None if that is not known."""

    def texts(self, report: Report = silent) -> Iterator[str]:
        """The documents that are not blank, in constant memory."""

    def identity(self) -> dict[str, Any]:
        """What the texts depend on, as JSON."""


@dataclass(frozen=True)
class Corpus:
    """Text to train on: files, or a Hugging Face data set."""

    train: tuple[str, ...] = ()
    """Files or globs: .txt .jsonl .json .csv .tsv .parquet, each but the last also as .gz."""
    validation: tuple[str, ...] = ()
    """Files to validate on, instead of a part of the training documents."""
    validation_percent: float = 5.0
    """The first so many percent of the documents validate, unless there are files or a split for it."""
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
    column: str | None = None
    """The column that holds the text (default: `text` if there is one, else the first)."""
    unit: Unit = "line"
    """What a document is in .txt: a line, or the lines up to an empty one."""
    invalid: Invalid = "error"
    """Bytes that are not UTF-8: refuse them, or read each as U+FFFD."""
    cache: Path | None = None
    """Where tokens are kept (default: flaxen/tokens in $XDG_CACHE_HOME or ~/.cache)."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation_percent < 100:
            raise InputError(f"validation_percent must be at least 0 and below 100, got {self.validation_percent}")
        for name, values in (("unit", get_args(Unit)), ("invalid", get_args(Invalid))):
            if getattr(self, name) not in values:
                raise InputError(f"{name} must be {' or '.join(values)}, got {getattr(self, name)!r}")
        if self.validation and self.validation_split:
            raise InputError("validation files and validation_split exclude each other; give one of them")
        alone = [name for name in ("dataset_config", "validation_split", "streaming") if getattr(self, name)]
        if alone and not self.dataset:
            raise InputError(f"{alone[0]} belongs to a data set; name one with --data.dataset")

    def train_source(self) -> Source:
        """What to train on."""
        # Not checked in __post_init__: a default Corpus() stands for flags that are not read yet.
        if bool(self.train) == bool(self.dataset):
            got = "both" if self.train else "neither"
            raise InputError(f"expected files (--data.train) or a data set (--data.dataset), got {got}")
        return self._split(self.split) if self.dataset else self._files(self.train)

    def validation_source(self) -> Source | None:
        """What to validate on, if it is apart from the training documents."""
        if self.validation:
            return self._files(self.validation)
        return self._split(self.validation_split) if self.validation_split else None

    def _files(self, patterns: tuple[str, ...]) -> TextFiles:
        return TextFiles(find_files(patterns), self.column, self.unit, self.invalid)

    def _split(self, split: str) -> "DatasetSplit":
        assert self.dataset
        return DatasetSplit(self.dataset, self.dataset_config, split, self.streaming, self.column, self.invalid)


@dataclass(frozen=True)
class DatasetSplit:
    """The documents of a split of a Hugging Face data set."""

    dataset: str
    config: str | None = None
    split: str = "train"
    streaming: bool = False
    column: str | None = None
    invalid: Invalid = "error"

    @property
    def name(self) -> str:
        return f"{self.dataset}{f'/{self.config}' if self.config else ''}, split {self.split}"

    @property
    def size(self) -> int | None:
        return None

    def texts(self, report: Report = silent) -> Iterator[str]:
        datasets = self._library()
        saved = self._saved()
        try:
            if saved:
                rows = datasets.load_from_disk(str(saved))
            else:
                rows = datasets.load_dataset(self.dataset, self.config, split=self.split, streaming=self.streaming)
            columns = rows.column_names or list(next(iter(rows), {}))  # a stream may not know before it reads
            column = choose_column(self.column, columns, self.name)
            batches = rows.select_columns([column]).iter(batch_size=256)
            for number, value in enumerate((value for batch in batches for value in batch[column]), 1):
                text = checked(value, column, f"{self.name}, row {number}", self.invalid)
                if text and not text.isspace():
                    yield text
        except InputError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failure(error) from error

    def identity(self) -> dict[str, Any]:
        saved = self._saved()
        if saved:
            state = saved / "state.json"
            of_data = [str(saved.resolve()), _json(state).get("_fingerprint"), state.stat().st_mtime_ns]
        else:
            try:  # the builder's ids stand for the commit or the files' dates; nothing is downloaded for them
                builder = self._library().load_dataset_builder(self.dataset, self.config)
            except (OSError, ValueError, RuntimeError) as error:
                raise self._failure(error) from error
            of_data = [self.dataset, self.config, builder.config_id, builder.hash]
        return {"dataset": of_data, "split": self.split, "column": self.column, "invalid": self.invalid}

    def _saved(self) -> Path | None:
        """The directory in which save_to_disk keeps this split, if the data set is one of its directories."""
        path = Path(self.dataset).expanduser()
        if (path / "dataset_dict.json").exists():
            found, splits = path / self.split, _json(path / "dataset_dict.json").get("splits", [])
        elif (path / "state.json").exists():
            found, splits = path, [_json(path / "state.json").get("_split") or "train"]
        else:
            return None
        if self.split not in splits:
            there = f"{', '.join(splits)}{nearest(self.split, splits)}"
            raise InputError(
                f"{self.dataset} has no split {self.split!r}; there are: {there}; choose with --data.split"
            )
        return found

    def _library(self) -> Any:
        try:
            import datasets
        except ImportError:
            raise InputError("reading a data set needs `datasets`; pip install 'flaxen[datasets]'") from None
        return datasets

    def _failure(self, error: Exception) -> InputError:
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return InputError(
            f"cannot read the data set {self.name} ({said}); check its name, --data.dataset-config, --data.split "
            "and the network, or HF_TOKEN for a private one"
        )


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
