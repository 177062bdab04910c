"""Atomic output directories: the old or the new one is always complete, and files of others are never deleted."""

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flaxen import atomic_directory as module
from flaxen import manifest
from flaxen.atomic_directory import atomic_directory, check_directory, recover
from flaxen.errors import InputError
from flaxen.hf.files import locate

# Replaces a directory and kills itself at the n-th rename, whichever function performs it.
KILLED = """
import ctypes, os, signal, sys
from pathlib import Path
from flaxen import atomic_directory as module

target, n, fallback = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "fallback"
calls = 0

def killing(function):
    def wrapped(*arguments, **options):
        global calls
        calls += 1
        if calls == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return wrapped

Path.rename = killing(Path.rename)
module.exchange = (lambda a, b: False) if fallback else killing(module.exchange)
module.shutil.rmtree = killing(module.shutil.rmtree)
with module.atomic_directory(target) as fresh:
    (fresh / "config.json").write_text("new")
    (fresh / "folder").mkdir()
    (fresh / "folder" / "more.json").write_text("new")
"""


def write(target: Path, text: str, **options: bool) -> None:
    with atomic_directory(target, **options) as fresh:
        (fresh / "config.json").write_text(text)
        (fresh / "folder").mkdir()
        (fresh / "folder" / "more.json").write_text(text)


def content(target: Path) -> str:
    """The text of all files of a directory that `write` made; fails if they differ."""
    assert not list(manifest.damage(target))
    (text,) = {(target / name).read_text() for name in ("config.json", "folder/more.json")}
    return text


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="broken"), atomic_directory(tmp_path / "a" / "b" / "model") as fresh:
        (fresh / "config.json").write_text("half")
        raise OSError("broken")
    assert names(tmp_path) == []


def test_failed_replacement_keeps_the_old_directory(tmp_path: Path) -> None:
    target = tmp_path / "model"
    write(target, "old")
    with pytest.raises(KeyboardInterrupt), atomic_directory(target) as fresh:
        (fresh / "config.json").write_text("half")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["model"]
    assert content(target) == "old"
    write(target, "new")
    assert content(target) == "new"
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("way", ["exchange", "fallback"])
@pytest.mark.parametrize("n", range(1, 6))
def test_kill_between_renames_loses_nothing(tmp_path: Path, way: str, n: int) -> None:
    target = tmp_path / "model"
    write(target, "old")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(target), str(n), way], check=False).returncode
    assert killed in (0, -signal.SIGKILL)
    recover(target)  # what the next command does, whether it reads or writes
    assert content(target) in ("old", "new")
    assert content(target) == "new" or killed
    write(target, "newer")
    assert content(target) == "newer"
    assert names(tmp_path) == ["model"]


def test_reading_completes_an_interrupted_replacement(tmp_path: Path) -> None:
    write(tmp_path / "model", "new")
    (tmp_path / "model").rename(tmp_path / ".model.0123abcd.ready")
    assert content(locate(tmp_path / "model")) == "new"


@pytest.mark.parametrize("exchange", [True, False])
def test_both_ways_to_replace_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(module, "exchange", lambda a, b: False)
    write(tmp_path / "model", "old")
    write(tmp_path / "model", "new")
    assert content(tmp_path / "model") == "new"
    assert names(tmp_path) == ["model"]


def test_exchange_is_available_on_linux(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "x").touch()
    if sys.platform == "linux":
        assert module.exchange(tmp_path / "a", tmp_path / "b")
        assert (tmp_path / "b" / "x").exists()


@pytest.mark.parametrize("foreign", ["notes.txt", "src/code.py", ".hidden", "folder/notes.txt", "empty/"])
def test_directory_with_files_of_others_is_not_replaced(tmp_path: Path, foreign: str) -> None:
    target = tmp_path / "p"
    write(target, "old")
    path = target / foreign
    if foreign.endswith("/"):
        path.mkdir()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    with pytest.raises(InputError, match=r"contains files that Flaxen did not write: .*--overwrite"):
        write(target, "new")
    assert path.exists()
    assert content(target) == "old"
    write(target, "new", overwrite=True)
    assert content(target) == "new"
    assert not path.exists()
    assert names(tmp_path) == ["p"]


def test_a_config_alone_does_not_make_a_directory_ours(tmp_path: Path) -> None:
    (tmp_path / "p" / "src").mkdir(parents=True)
    (tmp_path / "p" / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"did not write: config\.json, src"):
        write(tmp_path / "p", "new")
    (tmp_path / "p" / manifest.NAME).write_text("{")  # a damaged manifest proves nothing
    with pytest.raises(InputError, match="did not write"):
        write(tmp_path / "p", "new")
    assert (tmp_path / "p" / "src").is_dir()


def test_links_files_and_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert content(tmp_path / "real") == "new"
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "pipe"):
        with pytest.raises(InputError, match="is a file; expected a directory"):
            write(tmp_path / name, "new")
    with pytest.raises(InputError, match="is not a directory"):
        write(tmp_path / "file" / "model", "new")
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    for path in (Path(), tmp_path / "here"):
        with pytest.raises(InputError, match="contains the current directory"):
            write(path, "new", overwrite=True)


def test_inputs_are_not_replaced(tmp_path: Path) -> None:
    write(tmp_path / "model", "input")
    for out in ("model", "model/new", "."):
        with pytest.raises(InputError, match="overlaps with the input"):
            check_directory(tmp_path / out, True, [tmp_path / "model", "some/hub-id"])


def test_second_writer_is_refused_and_leftovers_are_deleted(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with (
        atomic_directory(target) as fresh,
        pytest.raises(InputError, match="another process is writing"),
        atomic_directory(target),
    ):
        pass
    assert not fresh.exists()
    (tmp_path / ".model.0123abcd.partial").mkdir()
    (tmp_path / ".model.0123abcd.old").mkdir()
    (tmp_path / ".model.notes.partial").mkdir()  # not a name that we use
    write(target, "new")
    assert names(tmp_path) == [".model.notes.partial", "model"]


@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o077, 0o600)])
def test_file_modes_follow_the_umask(tmp_path: Path, umask: int, expected: int) -> None:
    old = os.umask(umask)
    try:
        with atomic_directory(tmp_path / "model") as fresh:
            (fresh / "weights").write_text("x")
            (fresh / "weights").chmod(0o600)  # as the safetensors package does
    finally:
        os.umask(old)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "model").iterdir()}
    assert modes == {expected}


def test_manifest_reveals_every_kind_of_damage(tmp_path: Path) -> None:
    for name, damage, expected in (
        ("flip", lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]), "digest"),
        ("cut", lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes"),
        ("zeros", lambda path: path.write_bytes(bytes(path.stat().st_size)), "digest"),
        ("gone", lambda path: path.unlink(), "missing"),
    ):
        write(tmp_path / name, "text")
        assert not list(manifest.damage(tmp_path / name))
        damage(tmp_path / name / "folder" / "more.json")
        (problem,) = manifest.damage(tmp_path / name)
        assert problem.startswith("folder/more.json")
        assert expected in problem
        shutil.rmtree(tmp_path / name)
