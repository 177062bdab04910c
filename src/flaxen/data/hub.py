"""Read rows of Hugging Face datasets, from the hub or from a directory written by save_to_disk."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flaxen.data.files import Invalid, OnProgress
from flaxen.data.tables import Choose, Row
from flaxen.errors import InputError, unknown


@dataclass(frozen=True)
class DatasetRows:
    """One split of a dataset, as a table."""

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
        """Load the split with the `datasets` library."""
        datasets, saved = self._library(), self._saved()
        try:
            if saved:
                return datasets.load_from_disk(str(saved))
            return datasets.load_dataset(self.dataset, self.config, split=self.split, streaming=self.streaming)
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failure(error) from error

    def rows(self, choose: Choose, invalid: Invalid, on_progress: OnProgress) -> Iterator[Row]:
        """Iterate over the chosen columns of each row."""
        table = self.load()
        try:
            columns = table.column_names or list(next(iter(table), {}))  # a stream may not know its columns yet
            chosen = choose(columns, self.name)
            number = 0
            for batch in table.select_columns(chosen).iter(batch_size=256):
                for cells in zip(*(batch[name] for name in chosen)):
                    number += 1
                    yield f"{self.name}, row {number}", dict(zip(chosen, cells))
        except InputError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failure(error) from error

    def identity(self) -> dict[str, Any]:
        """Return what the rows depend on, as JSON."""
        saved = self._saved()
        if saved:
            state = saved / "state.json"
            version = [str(saved.resolve()), _json(state).get("_fingerprint"), state.stat().st_mtime_ns]
        else:
            try:  # the builder's ids identify the commit or the files' dates, without downloading data
                builder = self._library().load_dataset_builder(self.dataset, self.config)
            except (OSError, ValueError, RuntimeError) as error:
                raise self._failure(error) from error
            version = [self.dataset, self.config, builder.config_id, builder.hash]
        return {"dataset": version, "split": self.split}

    def _saved(self) -> Path | None:
        """Return the directory of this split if the dataset was written by save_to_disk, else None."""
        path = Path(self.dataset).expanduser()
        if (path / "dataset_dict.json").exists():
            directory, splits = path / self.split, _json(path / "dataset_dict.json").get("splits", [])
        elif (path / "state.json").exists():
            directory, splits = path, [_json(path / "state.json").get("_split") or "train"]
        else:
            return None
        if self.split not in splits:
            raise InputError(
                f"{self.dataset}: {unknown('split', self.split, splits)}; choose another with --data.split"
            )
        return directory

    def _library(self) -> Any:
        try:
            import datasets
        except ImportError:
            raise InputError(
                "reading a dataset requires the datasets package; install it with: pip install 'flaxen[datasets]'"
            ) from None
        return datasets

    def _failure(self, error: Exception) -> InputError:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return InputError(
            f"cannot read the dataset {self.name}: {reason}; check its name, --data.dataset-config, --data.split, "
            "the network, and HF_TOKEN if the dataset is private"
        )


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
