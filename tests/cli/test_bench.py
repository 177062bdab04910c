"""flaxen bench language rejects invalid settings before measuring, and writes results after each measurement."""

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from commands import command

from flaxen.cli import bench
from flaxen.cli.bench import BenchLanguage
from flaxen.errors import InputError

NOTE = """
--------------------
For simplicity, JAX has removed its internal frames from the traceback of the following exception. Set \
JAX_TRACEBACK_FILTERING=off to include these.
"""
TRACE = 'Traceback (most recent call last):\n  File "bench.py", line 1, in main\n    KeyError: source\n'


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Replace measurements by made-up figures and record the requests; those of length 2,048 fail."""
    requests: list[tuple[str, str, int]] = []

    def measure(self: BenchLanguage, name: str, kind: str, length: int) -> dict[str, Any]:
        if requests:  # earlier results are on disk, in case a later measurement is interrupted
            assert len(json.loads(self.out.with_suffix(".json").read_text())) == len(requests)
        requests.append((name, kind, length))
        labels = {"model": name, "kind": kind, "length": length}
        if length == 2048:
            return labels | {"error": f"MemoryError: {kind} [/of]"}  # looks like rich's markup
        names = ("cpu", "wall", "tokens_per_second", "tokens_per_cpu_second", "peak_gb", "compile_cpu", "milliseconds")
        return labels | dict.fromkeys(names, 1.0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(BenchLanguage, "measure", measure)
    return requests


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"models": ("vq", "rnn")}, "--models must be one or more of vq, vq-parallel, full, got rnn"),
        ({"models": ()}, "got none"),
        ({"preset": "vq-mni"}, "did you mean 'vq-mini'"),
        ({"preset": "gpt2-mini"}, "not a Transformer-VQ; available: vq-tiny"),
        ({"fields": ("windw=4",)}, "did you mean 'window'"),
        ({"fields": ("window=0",)}, "window must be at least 1"),
        ({"repeats": 0}, "--repeats must be at least 1, got 0"),
        ({"update": 0}, "--update must be at least 1"),
        ({"cores": -1}, "--cores must be at least 1"),
        ({"lengths": ()}, "one or more integers, each at least 1, got none"),
        ({"lengths": (1024, -256)}, "got 1024 -256"),
        ({"lengths": (1024, 320)}, "--lengths 320 must be a multiple of the model's block length 256.*block=64"),
        ({"lengths": (1024,), "update": 128}, "--update 128 must be a multiple of the model's block"),
        ({"lengths": (512, 1024, 1280), "update": 512}, "--lengths 1280 must be a multiple of --update 512"),
        ({"fields": ("block=64", "attention=full")}, "--fields cannot contain attention=full"),
        ({"out": Path("new/bench.json")}, "an image file such as bench.png, got new/bench.json"),
        ({"out": Path(".")}, "is a directory"),
        ({"out": Path("file/bench.png")}, "cannot write file/bench.png"),
        ({"out": Path("taken.png")}, "taken.json already exists and is not a result of this benchmark"),
    ],
)
def test_invalid_settings_are_rejected_before_measuring(
    flags: dict[str, Any], message: str, measured: list[Any], tmp_path: Path
) -> None:
    """Nothing is measured and no file is left behind."""
    Path("file").touch()
    Path("taken.json").mkdir()
    with pytest.raises(InputError, match=message):
        BenchLanguage(**flags).run(set())
    assert not measured
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken.json"]


def test_read_only_directory_is_reported(measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(bench, "atomic_file", refuse)
    with pytest.raises(InputError, match=r"cannot write bench.png: .*Permission denied"):
        BenchLanguage(out=Path("bench.png")).run(set())
    assert not measured


@pytest.mark.parametrize("drawn", [True, False])
def test_results_are_written_after_each_measurement(
    drawn: bool, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failed measurements are included, and matplotlib is not required."""
    find = importlib.util.find_spec
    if not drawn:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    flags = ("--lengths", "1024", "2048", "4096", "--longest-full", "2048", "--out", "new/one.png")
    done = command("bench", "language", *flags)
    assert done.code == 0, done.err
    records = json.loads(Path("new/one.json").read_text())
    assert [(record["model"], record["kind"], record["length"]) for record in records] == measured
    assert ("full", "train", 4096) not in measured
    assert ("vq-parallel", "decode", 1024) not in measured
    assert "MemoryError: train [/of]" in done.out
    assert Path("new/one.png").exists() == drawn
    assert ("skipped the plot: plotting requires matplotlib" in done.err) != drawn
    assert len(list(Path("new").iterdir())) == 1 + drawn


def test_failed_kinds_leave_their_panels_empty() -> None:
    from flaxen.cli.plots import throughput

    records = [
        {"model": "vq", "kind": "train", "length": 1024, "error": "MemoryError"},
        {"model": "vq", "kind": "decode", "length": 1024, "milliseconds": 1.0},
    ]
    throughput(records, Path("one.png"))
    assert [path.name for path in Path().iterdir()] == ["one.png"]


def test_all_measurements_failing_is_an_error() -> None:
    done = command("bench", "language", "--lengths", "2048")
    assert done.code == 1
    assert "all measurements failed" in done.message
    assert "MemoryError: train" in done.message
    assert not Path("bench-language.png").exists()
    assert all("error" in record for record in json.loads(Path("bench-language.json").read_text()))


@pytest.mark.parametrize(
    ("code", "stderr", "error"),
    [
        (1, f"{TRACE}ValueError: 48 tokens: no multiple{NOTE}", "ValueError: 48 tokens: no multiple"),
        (1, f"{TRACE}ValueError: one\n\nDuring it:\n{TRACE}a.b.CError: two\nand more\n", "a.b.CError: two"),
        (1, f"{TRACE}MemoryError\n", "MemoryError"),
        (1, "WARNING: slow\nno such thing\n\n", "no such thing"),
        (3, " \n", "exit code 3"),
        (-9, "WARNING: slow\n", "killed by SIGKILL, probably out of memory"),
        (-6, "what(): std::bad_alloc\n", "killed by SIGABRT: what(): std::bad_alloc"),
        (-11, "", "killed by SIGSEGV"),
        (-40, "", "killed by signal 40"),
    ],
)
def test_reason_of_a_failed_process(code: int, stderr: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real `measure`
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code, "", stderr))
    record = BenchLanguage().measure("vq", "train", 64)
    assert record == {"model": "vq", "kind": "train", "length": 64, "error": error}
