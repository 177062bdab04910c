"""Recipes are what they say: their headers are complete, and the command of a header gives their settings."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from flaxen.cli.recipe import read
from flaxen.cli.tasks import TASKS
from flaxen.train.run import flat

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
each = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def header(path: Path) -> dict[str, str]:
    """What the comment at the top says under each title; indented lines go on with the one before."""
    found: dict[str, str] = {}
    title = ""
    for line in path.read_text().split("\n\n[")[0].splitlines():
        if begins := re.fullmatch(r"# (\w+) {2,}(\S.*)", line):
            title = begins[1]
            found[title] = begins[2]
        elif title and line.startswith("#   "):
            found[title] += " " + line.removeprefix("#").strip()
        else:
            title = ""
    return found


def test_there_are_recipes() -> None:
    assert {
        "t5-small",
        "byt5-small",
        "cpu-mini",
        "longt5-summarize",
        "cpu-qmsum",
        "vit-gpt2-captions",
        "cpu-vq",
        "vq-enwik8",
    } <= {path.stem for path in RECIPES}


@each
def test_header_is_complete(path: Path) -> None:
    assert list(header(path)) == ["command", "hardware", "duration", "expected"]


@each
def test_reads_as_settings(path: Path, tmp_path: Path) -> None:
    whole = tmp_path / path.name
    whole.write_text(f'out = "run"\n{path.read_text()}')  # a recipe leaves it to the command
    task = header(path)["command"].split()[2]
    settings = read(TASKS[task].settings, whole)
    assert settings.model.preset or settings.model.init
    assert settings.training.steps or settings.training.epochs


@each
def test_command_of_the_header_gives_its_settings(path: Path) -> None:
    program, *flags = shlex.split(header(path)["command"])
    assert program == "flaxen"
    command = [sys.executable, "-m", "flaxen.cli.main", *flags, "--print-config"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    printed, written = flat(tomllib.loads(found)), flat(tomllib.loads(path.read_text()))
    assert {name: printed[name] for name in written} == written
    assert printed["data.train"]
    assert printed["out"]
