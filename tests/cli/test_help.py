"""Help pages list exactly the flags that are parsed, in 80 columns, and every text stands alone."""

import re
import shlex
from typing import Any

import pytest
import tyro

from flaxen.cli import help
from flaxen.cli.main import COMMANDS, SECTIONS, main

NAMES = list(COMMANDS)


def kind_of(name: str) -> Any:
    command = COMMANDS[name]
    return command.kind[command.narrowed()] if command.settings else command.kind


def page(name: str) -> str:
    return help.page(name, kind_of(name), COMMANDS[name].description)


@pytest.mark.parametrize("name", NAMES)
def test_flags_are_those_that_are_parsed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tyro.cli(kind_of(name), args=["--help"])
    lines = [line[2:] for line in capsys.readouterr().out.splitlines()]  # without the frame of tyro's boxes
    parsed = {
        flag for line in lines if line.startswith("--") for flag in re.findall(r"(?:^|, )(--[a-z][-a-z0-9.]*)", line)
    }
    flags = [flag for flag in help.flags(kind_of(name)) if not flag.positional]
    listed = {spelling for flag in flags for spelling in flag.spellings}
    assert parsed == listed


@pytest.mark.parametrize("name", NAMES)
def test_layout(name: str) -> None:
    found = page(name)
    assert max(map(len, found.splitlines())) <= help.WIDTH
    assert f"Usage: flaxen {name}" in found
    assert f"\nExample:\n  flaxen {name} " in found
    assert "(default: None)" not in found
    assert "Default:" not in found


@pytest.mark.parametrize("name", NAMES)
def test_example_is_a_valid_command(name: str) -> None:
    example = shlex.split(COMMANDS[name].description.partition("Example:")[2])
    words = ["flaxen", *name.split()]
    assert example[: len(words)] == words
    tyro.cli(kind_of(name), args=example[len(words) :])


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_has_a_text_of_its_own(name: str) -> None:
    for flag in help.flags(kind_of(name)):
        assert re.match(r"[A-Z.`'$]", flag.help), f"{flag.name}: {flag.help!r}"
        assert not flag.help.startswith(("Of ", "As ")), f"{flag.name}: {flag.help!r}"
        assert flag.help.endswith((".", ")", "…")), f"{flag.name}: {flag.help!r}"


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name.split()[0] for name in NAMES} == {first for firsts in SECTIONS.values() for first in firsts}
    monkeypatch.setattr("sys.argv", ["flaxen"])
    with pytest.raises(SystemExit) as exit:
        main()
    out = capsys.readouterr().out
    assert exit.value.code == 0
    assert all(f"\n  {name} " in out for name in NAMES)


def test_a_group_of_commands_alone_lists_its_members(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["flaxen", "train"])
    with pytest.raises(SystemExit) as exit:
        main()
    out = capsys.readouterr().out
    assert exit.value.code == 2
    assert "\n  train denoise " in out
    assert "\n  eval denoise " not in out


def test_unknown_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for words, suggestion in ((["train", "denoize"], "train denoise"), (["tran", "denoise"], "train")):
        monkeypatch.setattr("sys.argv", ["flaxen", *words, "--out", "run"])
        with pytest.raises(SystemExit) as exit:
            main()
        assert exit.value.code == 2
        assert f"(did you mean '{suggestion}'?)" in capsys.readouterr().err


def test_unknown_flags(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["flaxen", "train", "denoise", "--out", "run", "--training.stepz=2"])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2
    assert capsys.readouterr().err == (
        "flaxen: unknown flag --training.stepz (did you mean '--training.steps'?)\n"
        "Run 'flaxen train denoise --help' for help.\n"
    )


def test_defaults_come_from_a_recipe(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.toml").write_text("[model]\npreset = 't5-small'\n[training]\nsteps = 123\n")
    monkeypatch.setattr("sys.argv", ["flaxen", "train", "denoise", "--recipe", str(tmp_path / "recipe.toml"), "--help"])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 0
    assert re.search(r"--training.steps INT\n .*\(default: 123\)", capsys.readouterr().out)
