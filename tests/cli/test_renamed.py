"""Old names of settings keep working in flags, recipes and run directories."""

import dataclasses
from pathlib import Path

import pytest

from flaxen.cli import recipe
from flaxen.cli.renamed import RENAMED, current_flags, current_settings
from flaxen.cli.settings import Seq2SeqSettings
from flaxen.errors import InputError
from flaxen.tasks.objective import DenoiseObjective, Seq2SeqObjective


def test_old_flags_report_the_new_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    old = ["--writing.num-beams", "4", "--objective.smoothing=0.1", "--pictures", "3", "--writings", "writing"]
    new = ["--generation.num-beams", "4", "--objective.label-smoothing=0.1", "--sample-images", "3"]
    new += ["--writings", "writing"]
    assert current_flags(old) == new
    messages = capsys.readouterr().err.splitlines()
    assert messages[:2] == [
        "flaxen: --writing.num-beams is now called --generation.num-beams",
        "flaxen: --objective.smoothing is now called --objective.label-smoothing",
    ]
    assert len(messages) == 3
    assert current_flags(new) == new


def test_old_recipes_are_read_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.toml"
    path.write_text(
        "out = 'run'\n[model]\npreset = 't5-small'\n[objective]\nsmoothing = 0.1\n[writing]\nexamples = 7\n"
    )
    settings = recipe.read(Seq2SeqSettings, path)
    assert (settings.objective.label_smoothing, settings.generation.examples) == (0.1, 7)
    assert f"{path}: writing is now called generation" in capsys.readouterr().err


def test_old_run_directories_are_read_silently(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = {"task": "denoise", "objective": {"density": 0.3}}
    assert current_settings(recorded, "config.toml")["objective"] == {"noise_density": 0.3}
    assert recorded["objective"] == {"density": 0.3}
    assert capsys.readouterr().err == ""


def test_old_and_new_name_together_are_an_error() -> None:
    with pytest.raises(InputError, match="sets both writing and generation"):
        current_settings({"writing": {}, "generation": {}}, "recipe.toml")


@pytest.mark.parametrize("new", [new for old, new in RENAMED.items() if old.startswith("objective.")])
def test_new_names_exist(new: str) -> None:
    kinds = (DenoiseObjective, Seq2SeqObjective)
    assert new.split(".")[1] in {field.name for kind in kinds for field in dataclasses.fields(kind)}
