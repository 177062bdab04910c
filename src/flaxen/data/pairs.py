"""Sequence-to-sequence data: pairs of a source and a target text, from the columns of tables."""

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from flaxen.data.corpus import DataLocation
from flaxen.data.files import Invalid, OnProgress, ignore_progress
from flaxen.data.hub import DatasetRows
from flaxen.data.tables import Table, TableFiles, no_column, text_cell
from flaxen.errors import InputError

Empty = Literal["error", "skip"]
NUMBER = "#"


class Pair(NamedTuple):
    """A source text, its target text, and an id that names the pair in predictions."""

    id: str
    source: str
    target: str


@dataclass(frozen=True)
class Pairs(DataLocation):
    """Source/target pairs to train on: .jsonl .json .csv .tsv .parquet files or a Hugging Face dataset.

    A column can be a path into nested values: `answers.0.text`. With `*` in place of a number, a row yields one pair
    per item of that list.
    """

    train: tuple[str, ...] = ()
    """Training files or glob patterns: .jsonl .json .csv .tsv (each also with .gz) or .parquet."""
    source: str = "source"
    """Column with the input text, or a template of columns such as 'summarize: {document}'."""
    target: str = "target"
    """Column with the text to generate, or a template of columns."""
    id: str | None = None
    """Column with the id that identifies each pair in predictions, or '#' to number the pairs. Default: `id` if it
    exists, else '#'."""
    empty: Empty = "error"
    """What to do with a pair whose source or target is blank: stop with an error, or skip it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.empty not in get_args(Empty):
            raise InputError(f"data.empty must be one of {', '.join(get_args(Empty))}, got {self.empty!r}")
        for name in ("source", "target"):
            Template(getattr(self, name), f"--data.{name}")

    def _of_files(self, paths: tuple[Path, ...]) -> "PairSource":
        for path in paths:
            if path.name.removesuffix(".gz").endswith(".txt"):
                raise InputError(f"{path}: pairs require a table; expected .jsonl, .json, .csv, .tsv or .parquet")
        return self._source(TableFiles(paths))

    def _of_split(self, split: str) -> "PairSource":
        assert self.dataset
        return self._source(DatasetRows(self.dataset, self.dataset_config, split, self.streaming))

    def _source(self, table: Table) -> "PairSource":
        return PairSource(table, self.source, self.target, self.id, self.empty, self.invalid)


@dataclass(frozen=True)
class PairSource:
    """The pairs of a table. As a DataSource, its documents alternate between source and target."""

    table: Table
    source: str
    target: str
    id: str | None = None
    empty: Empty = "error"
    invalid: Invalid = "error"

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def size(self) -> int | None:
        return self.table.size

    def identity(self) -> dict[str, Any]:
        """Return what the texts depend on, as JSON: not the ids, which change no text."""
        settings = {"source": self.source, "target": self.target, "empty": self.empty, "invalid": self.invalid}
        return {"pairs": settings, **self.table.identity()}

    def texts(self, on_progress: OnProgress = ignore_progress) -> Iterator[str]:
        """Iterate over the texts: source, target, source, target, …"""
        for pair in self.pairs(on_progress):
            yield from pair[1:]

    def pairs(self, on_progress: OnProgress = ignore_progress) -> Iterator[Pair]:
        """Iterate over the pairs; memory use is constant except for the ids, which are checked for duplicates."""
        source, target = Template(self.source, "--data.source"), Template(self.target, "--data.target")
        name, number = Template(self.id or "id", "--data.id"), 0
        seen: dict[str, int] = {}

        def choose(columns: list[str], where: str) -> list[str]:
            nonlocal name
            if self.id == NUMBER or (self.id is None and "id" not in columns):
                name = Template("", "--data.id")
            return list(
                dict.fromkeys(
                    column for template in (source, target, name) for column in template.columns(columns, where)
                )
            )

        for where, row in self.table.rows(choose, self.invalid, on_progress):
            for item in _items(row, (source, target, name), where):
                number += 1
                texts = [template.fill(row, item, where, self.invalid) for template in (source, target)]
                blank = [flag for flag, text in zip(("source", "target"), texts) if not text or text.isspace()]
                if blank and self.empty == "skip":
                    continue
                if blank:
                    raise InputError(
                        f"{where}: the {blank[0]} is empty; fix the row, or skip such pairs with --data.empty skip"
                    )
                if not name.paths:
                    yield Pair(str(number), *texts)
                    continue
                id = str(name.value(row, item, where)) + ("" if item is None or name.starred else f"/{item}")
                if id in seen:
                    raise InputError(
                        f"{where}: duplicate id {id!r}, already used by pair {seen[id]}; "
                        f"choose another column with --data.id, or number the pairs with --data.id '{NUMBER}'"
                    )
                seen[id] = number
                yield Pair(id, *texts)


class Template:
    """A column name, or a text with column names in braces. `flag` is the option to name in errors."""

    def __init__(self, text: str, flag: str):
        self.text, self.flag = text, flag
        try:
            fields = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
        except ValueError as error:
            raise InputError(
                f"{flag} {text!r} is not a valid template: {error}; write {{{{ and }}}} for literal braces"
            ) from None
        if "" in fields:
            raise InputError(
                f"{flag} {text!r}: expected a column name in the braces, such as 'summarize: {{document}}'"
            )
        self.plain = not fields
        self.paths = [text] if self.plain and text else fields
        self.starred = any("*" in path.split(".") for path in self.paths)

    def columns(self, columns: list[str], where: str) -> list[str]:
        """Return the columns that the template needs; raise if one does not exist."""
        needed = []
        for path in self.paths:
            column = path if path in columns else path.split(".")[0]
            if column not in columns:
                raise no_column(column, columns, where, self.flag)
            needed.append(column)
        return needed

    def fill(self, row: dict[str, Any], item: int | None, where: str, invalid: Invalid) -> str:
        """Return the text of a row; empty if any of its columns is blank."""
        cells = [text_cell(_at(row, path, item, where), path, where, invalid, self.flag) or "" for path in self.paths]
        if self.plain:
            return cells[0]
        if not all(cell and not cell.isspace() for cell in cells):
            return ""
        parts = iter(cells)
        pieces = string.Formatter().parse(self.text)
        return "".join(before + (next(parts) if name is not None else "") for before, name, _, _ in pieces)

    def value(self, row: dict[str, Any], item: int | None, where: str) -> Any:
        """Return the raw value of the first column, of any type."""
        return self.text if not self.paths else _at(row, self.paths[0], item, where)


def _items(row: dict[str, Any], templates: tuple[Template, ...], where: str) -> list[int | None]:
    """Return the indices that `*` takes in a row; [None] if no template has a `*`."""
    lists = {
        path.split(".*")[0]: path
        for template in templates
        for path in template.paths
        if template.starred and ".*" in path
    }
    if not lists:
        return [None]
    values = {prefix: _at(row, prefix, None, where) for prefix in lists}
    for prefix, value in values.items():
        if not isinstance(value, list):
            raise InputError(f"{where}: expected a list at {prefix!r} for {lists[prefix]!r}, got {value!r:.60}")
    if len({len(value) for value in values.values()}) > 1:
        counts = ", ".join(f"{prefix} {len(value)}" for prefix, value in values.items())
        raise InputError(f"{where}: expected lists of equal length for *, got {counts}")
    return list(range(len(next(iter(values.values())))))


def _at(row: dict[str, Any], path: str, item: int | None, where: str) -> Any:
    """Look up a path such as answers.0.text; `item` replaces `*`."""
    if path in row:
        return row[path]
    value: Any = row
    for step in path.split("."):
        step = str(item) if step == "*" else step
        try:
            value = value[int(step)] if isinstance(value, list) and re.fullmatch(r"\d+", step) else value[step]
        except (KeyError, IndexError, TypeError):
            raise InputError(f"{where}: no value at {path!r}: {step!r} is missing in {value!r:.60}") from None
    return value
