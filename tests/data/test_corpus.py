"""A corpus is read from files or from a dataset; errors name what cannot be read."""

import builtins
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flaxen.data.corpus import Corpus, DatasetSplit
from flaxen.errors import InputError


def test_invalid_combinations_of_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    files = (str(tmp_path / "a.txt"),)
    with pytest.raises(InputError, match="got neither"):
        Corpus().train_source()
    with pytest.raises(InputError, match="got both"):
        Corpus(train=files, dataset="x").train_source()
    for options, message in [
        ({"validation_percent": -1.0}, "validation_percent"),
        ({"validation_percent": 100.0}, "validation_percent must be at least 0 and below 100, got 100"),
        ({"validation_percent": float("nan")}, "validation_percent"),
        ({"train": files, "streaming": True}, "data.streaming has no effect without a dataset"),
        ({"train": files, "validation_split": "test"}, "data.validation_split has no effect without a dataset"),
        (
            {"dataset": "x", "validation_split": "test", "validation": files},
            "--data.validation cannot be combined with --data.validation-split",
        ),
    ]:
        with pytest.raises(InputError, match=message):
            Corpus(**options)
    assert Corpus(train=files).validation_source() is None
    held = Corpus(dataset="x", validation=files).validation_source()
    assert held is not None
    assert list(held.texts()) == ["a"]
    assert Corpus(dataset="x", validation_split="test").validation_source() == DatasetSplit("x", split="test")


def test_datasets_written_by_save_to_disk(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"id": [1, 2, 3], "text": ["a", None, "b"]})
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=rows, test=rows.select([2])).save_to_disk(tmp_path / "two")
    one, two = (Corpus(dataset=str(tmp_path / name)) for name in ("one", "two"))
    for train in (one.train_source(), two.train_source()):
        assert list(train.texts()) == ["a", "b"]
        assert json.loads(json.dumps(train.identity())) == train.identity()
    held = Corpus(dataset=two.dataset, validation_split="test").validation_source()
    assert held is not None
    assert list(held.texts()) == ["b"]
    assert held.identity() != two.train_source().identity()
    with pytest.raises(InputError, match=r"unknown split 'tset' \(did you mean 'test'\?\); available: train, test"):
        Corpus(dataset=two.dataset, split="tset").train_source().identity()
    with pytest.raises(InputError, match=r"unknown column 'txt' \(did you mean 'text'\?\); available: id, text"):
        list(Corpus(dataset=one.dataset, column="txt").train_source().texts())
    with pytest.raises(InputError, match="row 1: expected text in column 'id', got int 1"):
        list(Corpus(dataset=one.dataset, column="id").train_source().texts())


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    """A directory of data files is loaded like a dataset on the hub, without network access."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    content = "".join(json.dumps({"id": i, "text": f"row {i}"}) + "\n" for i in range(600))
    (tmp_path / "set" / "train.jsonl").write_text(content)
    rows = Corpus(dataset=str(tmp_path / "set"), streaming=streaming).train_source()
    first = rows.identity()
    assert list(rows.texts()) == [f"row {i}" for i in range(600)]
    assert json.loads(json.dumps(first)) == first == rows.identity()
    (tmp_path / "set" / "train.jsonl").write_text(content.replace("599", "600"))
    assert rows.identity() != first
    wrong = Corpus(dataset=str(tmp_path / "set"), split="tran", streaming=streaming).train_source()
    with pytest.raises(InputError, match=r"cannot read the dataset .*split tran"):
        list(wrong.texts())
    with pytest.raises(InputError, match=r"cannot read the dataset nobody/nothing, split train.*check its name"):
        Corpus(dataset="nobody/nothing", streaming=streaming).train_source().identity()


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.split(".")[0] in ("datasets", "pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    files = Corpus(train=(str(tmp_path / "a.parquet"),)).train_source()
    monkeypatch.setattr(builtins, "__import__", refuse)
    for extra, broken in {"parquet": files, "datasets": DatasetSplit("some/name")}.items():
        with pytest.raises(InputError, match=rf"pip install 'flaxen\[{extra}\]'"):
            list(broken.texts())
