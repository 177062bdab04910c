"""Pairs of an input text and the text wanted for it, out of the columns of tables."""

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
    id: str
    source: str
    target: str


@dataclass(frozen=True)
class Pairs(DataLocation):
    """Pairs to train on: .jsonl .json .csv .tsv .parquet files, or a Hugging Face data set.

    A column can be a path into nested values: `answers.0.text`. With `*` in place of a number, a row gives one pair for
    each item of that list.
    """

    source: str = "source"
    """The column that the model reads, or a template of columns such as 'summarize: {document}'."""
    target: str = "target"
    """The column that it shall write, or a template."""
    id: str | None = None
    """The column that names a pair in predictions; '#' numbers the pairs. Default: `id` if there is one, else '#'."""
    empty: Empty = "error"
    """A pair whose source or target is blank: refuse it, or leave it out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.empty not in get_args(Empty):
            raise InputError(f"empty must be {' or '.join(get_args(Empty))}, got {self.empty!r}")
        for name in ("source", "target"):
            Template(getattr(self, name), f"--data.{name}")

    def _of_files(self, paths: tuple[Path, ...]) -> "PairSource":
        for path in paths:
            if path.name.removesuffix(".gz").endswith(".txt"):
                raise InputError(f"{path}: pairs need columns; expected .jsonl, .json, .csv, .tsv or .parquet")
        return self._source(TableFiles(paths))

    def _of_split(self, split: str) -> "PairSource":
        assert self.dataset
        return self._source(DatasetRows(self.dataset, self.dataset_config, split, self.streaming))

    def _source(self, table: Table) -> "PairSource":
        return PairSource(table, self.source, self.target, self.id, self.empty, self.invalid)


@dataclass(frozen=True)
class PairSource:
    """The pairs of a table. As documents, a source and its target take turns."""

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
        about = {"source": self.source, "target": self.target, "empty": self.empty, "invalid": self.invalid}
        return {"pairs": about, **self.table.identity()}

    def texts(self, on_progress: OnProgress = ignore_progress) -> Iterator[str]:
        for pair in self.pairs(on_progress):
            yield from pair[1:]

    def pairs(self, on_progress: OnProgress = ignore_progress) -> Iterator[Pair]:
        """In order, in constant memory but for a few bytes per id."""
        source, target = Template(self.source, "--data.source"), Template(self.target, "--data.target")
        name, number = Template(self.id or "id", "--data.id"), 0
        seen: dict[str, int] = {}

        def choose(columns: list[str], where: str) -> list[str]:
            nonlocal name
            if self.id == NUMBER or (self.id is None and "id" not in columns):
                name = Template("", "--data.id")
            return list(
                dict.fromkeys(one for template in (source, target, name) for one in template.columns(columns, where))
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
                        f"{where}: the {blank[0]} is empty; mend the row, or skip such pairs with --data.empty skip"
                    )
                if not name.paths:
                    yield Pair(str(number), *texts)
                    continue
                id = str(name.value(row, item, where)) + ("" if item is None or name.starred else f"/{item}")
                if id in seen:
                    raise InputError(
                        f"{where}: id {id!r} is also the id of pair {seen[id]}; ids name predictions, so they must "
                        f"differ: choose another column with --data.id, or number the pairs with --data.id '{NUMBER}'"
                    )
                seen[id] = number
                yield Pair(id, *texts)


class Template:
    """A column, or text with columns in braces."""

    def __init__(self, text: str, flag: str):
        self.text, self.flag = text, flag
        try:
            fields = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
        except ValueError as error:
            raise InputError(f"{flag} {text!r} is no template: {error}; write {{{{ and }}}} for braces") from None
        if "" in fields:
            raise InputError(f"{flag} {text!r}: name the column within the braces, as in 'summarize: {{document}}'")
        self.plain = not fields
        self.paths = [text] if self.plain and text else fields
        self.starred = any("*" in path.split(".") for path in self.paths)

    def columns(self, columns: list[str], where: str) -> list[str]:
        """The columns that it needs, if they are there."""
        found = []
        for path in self.paths:
            column = path if path in columns else path.split(".")[0]
            if column not in columns:
                raise no_column(column, columns, where, self.flag)
            found.append(column)
        return found

    def fill(self, row: dict[str, Any], item: int | None, where: str, invalid: Invalid) -> str:
        cells = [text_cell(_at(row, path, item, where), path, where, invalid, self.flag) or "" for path in self.paths]
        if self.plain:
            return cells[0]
        if not all(cell and not cell.isspace() for cell in cells):
            return ""
        parts = iter(cells)
        pieces = string.Formatter().parse(self.text)
        return "".join(before + (next(parts) if name is not None else "") for before, name, _, _ in pieces)

    def value(self, row: dict[str, Any], item: int | None, where: str) -> Any:
        return self.text if not self.paths else _at(row, self.paths[0], item, where)


def _items(row: dict[str, Any], templates: tuple[Template, ...], where: str) -> list[int | None]:
    """The numbers that stand for `*` in a row: None without one."""
    lists = {
        path.split(".*")[0]: path
        for template in templates
        for path in template.paths
        if template.starred and ".*" in path
    }
    if not lists:
        return [None]
    sizes = {prefix: _at(row, prefix, None, where) for prefix in lists}
    for prefix, value in sizes.items():
        if not isinstance(value, list):
            raise InputError(f"{where}: expected a list at {prefix!r} for {lists[prefix]!r}, got {value!r:.60}")
    if len({len(value) for value in sizes.values()}) > 1:
        counts = ", ".join(f"{prefix} {len(value)}" for prefix, value in sizes.items())
        raise InputError(f"{where}: lists that go together differ in length: {counts}")
    return list(range(len(next(iter(sizes.values())))))


def _at(row: dict[str, Any], path: str, item: int | None, where: str) -> Any:
    """The value at a path such as answers.0.text; `item` stands for `*`."""
    if path in row:
        return row[path]
    value: Any = row
    for step in path.split("."):
        step = str(item) if step == "*" else step
        try:
            value = value[int(step)] if isinstance(value, list) and re.fullmatch(r"\d+", step) else value[step]
        except (KeyError, IndexError, TypeError):
            raise InputError(f"{where}: nothing at {path!r}: no {step!r} in {value!r:.60}") from None
    return value
