"""Recipes: headers are complete, and the command in a header has the settings of the recipe."""

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
    """Parse the comment at the top into title -> text; indented lines continue the previous one."""
    sections: dict[str, str] = {}
    title = ""
    for line in path.read_text().split("\n\n[")[0].splitlines():
        if match := re.fullmatch(r"# (\w+) {2,}(\S.*)", line):
            title = match[1]
            sections[title] = match[2]
        elif title and line.startswith("#   "):
            sections[title] += " " + line.removeprefix("#").strip()
        else:
            title = ""
    return sections


def test_expected_recipes_exist() -> None:
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
def test_recipe_is_valid_settings(path: Path, tmp_path: Path) -> None:
    recipe = tmp_path / path.name
    recipe.write_text(f'out = "run"\n{path.read_text()}')  # required, but a recipe leaves it to the command line
    task = header(path)["command"].split()[2]
    settings = read(TASKS[task].settings, recipe)
    assert settings.model.preset or settings.model.init
    assert settings.training.steps or settings.training.epochs


@each
def test_command_in_the_header_has_the_recipes_settings(path: Path) -> None:
    program, *flags = shlex.split(header(path)["command"])
    assert program == "flaxen"
    command = [sys.executable, "-m", "flaxen.cli.main", *flags, "--print-config"]
    config = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    printed, written = flat(tomllib.loads(config)), flat(tomllib.loads(path.read_text()))
    assert {name: printed[name] for name in written} == written
    assert printed["data.train"]
    assert printed["out"]
