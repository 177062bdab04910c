"""A run directory belongs to one run, and to one process at a time."""

import fcntl
import json
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flaxen.errors import InputError
from flaxen.train.run import Run, check_directory, check_fingerprint, flat, read_config

CONFIG: dict[str, Any] = {
    "out": "somewhere",
    "model": {"preset": "t5-small"},
    "data": {"train": ["a.txt"]},
    "training": {"steps": 10, "seed": 0, "log_every": 5, "keep": 2},
    "tracking": {"tensorboard": False},
}
FACTS: dict[str, Any] = {"training_data": "abc[0:100]", "model": {"d_model": 16, "eos_ids": (1,)}, "steps": 10}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with closing(Run(tmp_path / "new" / "run", CONFIG, FACTS)) as opened:
        yield opened


def changed(**parts: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {**value, **parts.get(name, {})} if isinstance(value, dict) else value for name, value in CONFIG.items()
    }


def test_flat_joins_nested_names() -> None:
    assert flat({"a": 1, "b": {"c": [2], "d": {"e": None}}, "f": {}}) == {"a": 1, "b.c": [2], "b.d.e": None}


def test_new_run_records_settings_and_environment(run: Run) -> None:
    assert sorted(path.name for path in run.directory.iterdir()) == ["config.toml", "lock", "run.json"]
    assert read_config(run.directory) == tomllib.loads((run.directory / "config.toml").read_text()) == CONFIG
    record = json.loads((run.directory / "run.json").read_text())
    assert record["resolved"] == {**FACTS, "model": {"d_model": 16, "eos_ids": [1]}}
    assert {"command", "started", "python", "platform", "cores", "versions"} < set(record)
    assert record["versions"]["jax"]


def test_only_one_process_at_a_time(run: Run) -> None:
    with pytest.raises(InputError, match="another process is training in"):
        Run(run.directory, CONFIG, FACTS)
    run.close()
    with (run.directory / "lock").open("w") as file:  # as another process would
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(InputError, match="another process is training in"):
            Run(run.directory, CONFIG, FACTS)
    Run(run.directory, CONFIG, FACTS).close()


def test_refused_run_releases_the_lock(run: Run) -> None:
    run.close()
    with pytest.raises(InputError, match="steps: was 10, is 11"):
        Run(run.directory, CONFIG, {**FACTS, "steps": 11})
    Run(run.directory, CONFIG, FACTS).close()


def test_records_after_the_checkpoint_are_deleted(run: Run) -> None:
    run.forget_after(0)  # there are no records yet
    assert not run.metrics.exists()
    for step in (2, 4, 4, 6):
        run.record({"step": step, "kind": "train", "loss": step / 3})
    complete = run.metrics.read_bytes()
    run.forget_after(6)
    assert run.metrics.read_bytes() == complete
    run.metrics.write_bytes(complete + b'{"step": 6, "ki')  # a line cut off by a kill
    run.forget_after(4)
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [2, 4, 4]
    assert complete.startswith(run.metrics.read_bytes())
    run.record({"step": 5, "kind": "train"})
    run.forget_after(0)
    assert run.metrics.read_bytes() == b""


@pytest.mark.parametrize("name", ["notes.txt", "model", "checkpoints", "metrics.jsonl", ".git"])
def test_other_directories_are_refused(name: str, tmp_path: Path) -> None:
    """Without config.toml, even files of a run are refused, because they could belong to any run."""
    (tmp_path / name).mkdir()
    for attempt in (check_directory, lambda *given: Run(*given, FACTS)):
        with pytest.raises(InputError, match=rf"is not a Flaxen run directory \(it contains {name}\)"):
            attempt(tmp_path, CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_unexpected_file_in_a_run_is_refused(run: Run) -> None:
    for name in ("checkpoints", "model", "best", "metrics.jsonl", "events.out.tfevents.1", ".model.1234.partial"):
        (run.directory / name).touch()
    check_directory(run.directory, CONFIG)
    (run.directory / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"\(it contains thesis\.tex\)"):
        check_directory(run.directory, CONFIG)


def test_file_is_refused_and_empty_directory_accepted(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        check_directory(tmp_path / "file", CONFIG)
    (tmp_path / "empty").mkdir()
    Run(tmp_path / "empty", CONFIG, FACTS).close()


def test_run_killed_at_the_very_start_can_be_restarted(tmp_path: Path) -> None:
    for name in ("lock", "run.json", ".config.toml.partial"):
        (tmp_path / name).touch()
    with closing(Run(tmp_path, CONFIG, FACTS)):
        assert read_config(tmp_path) == CONFIG


def test_changed_settings_are_refused_by_name(run: Run) -> None:
    run.close()
    now = changed(training={"steps": 20, "seed": 1, "accumulate": 2}, model={"preset": "t5-base"})
    del now["training"]["keep"]
    with pytest.raises(InputError) as error:
        Run(run.directory, now, FACTS)
    lines = [line.strip() for line in str(error.value).splitlines()[1:-1]]
    assert lines == [
        "model.preset: was 't5-small', is 't5-base'",
        "training.accumulate: was not set, is 2",
        "training.seed: was 0, is 1",
        "training.steps: was 10, is 20",
    ]
    assert f"--model.init {run.directory / 'model'}" in str(error.value)


def test_settings_that_do_not_affect_training_may_change(run: Run) -> None:
    run.close()
    free = changed(training={"log_every": 1, "keep": 9, "keep_best": "loss", "eval_every": 3, "save_every": 4})
    free |= {"out": "elsewhere", "data": {"train": ["moved/a.txt"]}, "tracking": {"wandb": "project"}}
    Run(run.directory, free, FACTS).close()
    assert read_config(run.directory) == free


def test_changed_data_and_model_are_refused_by_name(run: Run) -> None:
    check_fingerprint(run.directory, FACTS)
    with pytest.raises(InputError) as error:
        check_fingerprint(
            run.directory, {**FACTS, "training_data": "abd[0:100]", "model": {"d_model": 32, "eos_ids": (1,)}}
        )
    assert "training_data: was 'abc[0:100]', is 'abd[0:100]'" in str(error.value)
    assert "model.d_model: was 16, is 32" in str(error.value)
    assert "eos_ids" not in str(error.value)


def test_missing_or_invalid_config_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a run directory"):
        read_config(tmp_path)
    (tmp_path / "config.toml").write_text("[")
    with pytest.raises(InputError, match=r"config\.toml is not valid TOML"):
        read_config(tmp_path)
