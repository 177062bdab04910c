"""The words of the project: docstrings, comments, messages and pages follow the glossary, and can be searched.

`git ls-files` is not used: the package may be tested outside a clone.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "flaxen").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
# Wordings that stood here once, with the word to use instead.
AVOID = {
    r"\b(go|goes|gone|went) on (from|where|with|behind)\b": "resume, continue",
    r"\b(make|makes|made|making) again\b": "recompute, rebuild",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bby wish\b": "optional",
    r"\bused up\b": "donated",
    r"\bholes?\b": "masked span, noise span",
    r"\bhow-manieth\b": "index",
    r"\bso many\b": "the number's name",
    r"\bit was told\b|\bwere told\b": "given, the settings",
    r"\bleft out\b|\bleaves out\b|\bleave out\b": "skip, omit",
    r"\bis no (whole|directory|file|model|image|number|text|safetensors|valid)\b": "is not a",
    r"\bbeside (it|them|the)\b": "next to, besides, in addition to",
    r"\bthe same command goes\b": "rerun the command to resume",
    r"\bpictures?\b": "image",
}
PLOTS = ("cli/plots.py", "cli/bench.py")  # which draw pictures


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Comments and strings of a source file, or the lines of a page, with their line numbers."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix == ".md":
        yield from enumerate(lines, 1)
        return
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for number, line in enumerate(lines, 1):
        yield number, line.partition("# ")[2]


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_wording(path: Path) -> None:
    if path.name == "CHANGELOG.md" or str(path).endswith(PLOTS):
        return
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group(0)!r}; write: {instead}"
        for number, text in texts(path)
        for pattern, instead in AVOID.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_stand_alone(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            docstring = ast.get_docstring(node) or ""
            assert not re.match(r"(Of|As|That of|Those of|The same) ", docstring), docstring


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_fit_120_columns(path: Path) -> None:
    long = [number for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if len(line) > 120]
    assert not long


def test_no_named_lambdas() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("src", "tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda)
    ]
    assert not found


# Words that people search for, with the file that they should find: the first whose summary line has the word.
SEARCHES = {
    "resume": "train/loop.py",
    "reorder": "nn/cache.py",
    "gradient checkpointing": "nn/stack.py",
    "label smoothing": "nn/loss.py",
    "learning-rate schedule": "train/optim.py",
    "prefetch": "data/prefetch.py",
    "span corruption": "data/span_corruption.py",
    "quantised keys": "nn/vq.py",
    "mixed precision": "nn/matmul.py",
    "packing": "data/pair_store.py",
}


@pytest.mark.parametrize("word", SEARCHES)
def test_search_leads_to_the_file(word: str) -> None:
    summaries = {path: path.read_text(encoding="utf-8").partition("\n")[0].lower() for path in SOURCES}
    hits = [str(path.relative_to(ROOT / "src" / "flaxen")) for path, summary in summaries.items() if word in summary]
    assert hits[:1] == [SEARCHES[word]], hits
