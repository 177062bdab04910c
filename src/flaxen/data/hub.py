"""Rows of Hugging Face data sets: from the hub, or from a directory that save_to_disk wrote."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flaxen.data.files import Invalid, OnProgress
from flaxen.data.tables import Choose, Row
from flaxen.errors import InputError, did_you_mean


@dataclass(frozen=True)
class DatasetRows:
    """A split of a data set as a table."""

    dataset: str
    config: str | None = None
    split: str = "train"
    streaming: bool = False

    @property
    def name(self) -> str:
        return f"{self.dataset}{f'/{self.config}' if self.config else ''}, split {self.split}"

    @property
    def size(self) -> int | None:
        return None

    def load(self) -> Any:
        """The split as `datasets` has it."""
        datasets, saved = self._library(), self._saved()
        try:
            if saved:
                return datasets.load_from_disk(str(saved))
            return datasets.load_dataset(self.dataset, self.config, split=self.split, streaming=self.streaming)
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failure(error) from error

    def rows(self, choose: Choose, invalid: Invalid, on_progress: OnProgress) -> Iterator[Row]:
        table = self.load()
        try:
            columns = table.column_names or list(next(iter(table), {}))  # a stream may not know before it reads
            wanted = choose(columns, self.name)
            number = 0
            for batch in table.select_columns(wanted).iter(batch_size=256):
                for cells in zip(*(batch[name] for name in wanted)):
                    number += 1
                    yield f"{self.name}, row {number}", dict(zip(wanted, cells))
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
        return {"dataset": of_data, "split": self.split}

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
            there = f"{', '.join(splits)}{did_you_mean(self.split, splits)}"
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
