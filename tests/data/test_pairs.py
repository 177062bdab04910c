"""Pairs are read from columns, paths and templates; errors name the row."""

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flaxen.data.pairs import Pair, Pairs, PairSource
from flaxen.errors import InputError

ROWS = [
    {"id": "a", "document": "one two", "summary": "1 2", "n": 1},
    {"id": "b", "document": "three", "summary": "3", "n": 2},
]
NESTED = [
    {"id": "m", "text": "talk", "questions": [{"q": "who?", "a": "Ann"}, {"q": "why?", "a": "so"}]},
    {"id": "n", "text": "more", "questions": [{"q": "when?", "a": "now"}]},
]
COLUMNS = {"source": "document", "target": "summary"}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def pairs_of(path: str, **options: Any) -> list[Pair]:
    source = Pairs(train=(path,), **{**COLUMNS, **options}).train_source()
    assert isinstance(source, PairSource)
    assert list(source.texts()) == [text for pair in source.pairs() for text in pair[1:]]
    return list(source.pairs())


def test_every_format_gives_the_same_pairs(tmp_path: Path) -> None:
    expected = [Pair("a", "one two", "1 2"), Pair("b", "three", "3")]
    jsonl = write(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(Path(jsonl).read_bytes()))
    lines = [",".join(ROWS[0]), *(",".join(map(str, row.values())) for row in ROWS)]
    (tmp_path / "a.csv").write_text("\n".join([*lines, "", ""]))
    (tmp_path / "a.tsv").write_text("\n".join(lines).replace(",", "\t"))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for kind in ("jsonl", "json", "jsonl.gz", "csv", "tsv", "parquet"):
        assert pairs_of(str(tmp_path / f"a.{kind}")) == expected, kind
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    source = Pairs(dataset=str(tmp_path / "saved"), **COLUMNS).train_source()
    assert isinstance(source, PairSource)
    assert list(source.pairs()) == expected


def test_templates_and_nested_paths(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", NESTED)
    pairs = pairs_of(path, source="{questions.*.q} {{of}} {text}", target="questions.*.a")
    assert pairs == [
        Pair("m/0", "who? {of} talk", "Ann"),
        Pair("m/1", "why? {of} talk", "so"),
        Pair("n/0", "when? {of} more", "now"),
    ]
    assert [pair.target for pair in pairs_of(path, source="text", target="questions.0.a")] == ["Ann", "now"]
    pq.write_table(pa.Table.from_pylist(NESTED), tmp_path / "a.parquet")
    assert (
        pairs_of(str(tmp_path / "a.parquet"), source="{questions.*.q} {{of}} {text}", target="questions.*.a") == pairs
    )


def test_ids_are_unique_or_numbered(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{**row, "id": "same", "other": row["n"]} for row in ROWS])
    with pytest.raises(InputError, match=r"line 2: duplicate id 'same', already used by pair 1; .*--data.id"):
        pairs_of(path)
    assert [pair.id for pair in pairs_of(path, id="#")] == ["1", "2"]
    assert [pair.id for pair in pairs_of(path, id="other")] == ["1", "2"]
    nameless = write(tmp_path / "b.jsonl", [{k: v for k, v in row.items() if k != "id"} for row in ROWS])
    assert [pair.id for pair in pairs_of(nameless)] == ["1", "2"]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            {},
            {"target": "sumary"},
            r"unknown column 'sumary' \(did you mean.*; available: id, document, .*--data.target",
        ),
        ({}, {"source": "x: {doc}"}, r"unknown column 'doc'; .*--data.source"),
        ({}, {"target": "n"}, r"line 1: expected text in column 'n', got int 1; .*--data.target"),
        ({"summary": ["3"]}, {}, r"line 2: expected text in column 'summary', got list \['3'\]"),
        ({"summary": "  "}, {}, r"line 2: the target is empty; .*--data.empty skip"),
        ({"document": None}, {}, r"line 2: the source is empty"),
        ({}, {"target": "summary.0.x"}, r"line 1: no value at 'summary.0.x'"),
        ({}, {"source": "{} x"}, r"expected a column name in the braces"),
        ({}, {"source": "{document"}, r"is not a valid template"),
        ({}, {"target": "summary.*.x"}, r"expected a list at 'summary'"),
    ],
)
def test_errors_name_the_row_and_the_option(tmp_path: Path, change: dict, options: dict, message: str) -> None:
    path = write(tmp_path / "a.jsonl", [ROWS[0], {**ROWS[1], **change}])
    with pytest.raises(InputError, match=message):
        pairs_of(path, **options)


def test_lists_of_different_lengths_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"q": ["x", "y"], "a": ["z"]}])
    with pytest.raises(InputError, match=r"expected lists of equal length for \*, got q 2, a 1"):
        pairs_of(path, source="q.*", target="a.*")


def test_empty_pairs_can_be_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{**ROWS[0], "summary": ""}, ROWS[1]])
    assert pairs_of(path, empty="skip") == [Pair("b", "three", "3")]


def test_text_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InputError, match="pairs require a table"):
        pairs_of(str(tmp_path / "a.txt"))


def test_identity_changes_with_texts_but_not_with_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)

    def identity(**options: Any) -> Any:
        return Pairs(train=(path,), **{**COLUMNS, **options}).train_source().identity()

    assert identity() == identity(id="#")  # ids change no token
    assert (
        len({json.dumps(identity(**options)) for options in ({}, {"source": "{n} {document}"}, {"empty": "skip"})}) == 3
    )
