"""Atomic output files: complete or absent, one writer at a time, and only in place of regular files."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flaxen.atomic import atomic_file, check_output, write_bytes
from flaxen.cli.resumable import ResumableLines
from flaxen.errors import InputError

# Writes "half" under the temporary name of a file, says so, and waits to be killed.
WRITER = """
import sys, time
from pathlib import Path
from flaxen.atomic import atomic_file
with atomic_file(Path(sys.argv[1])) as file:
    file.write("half")
    file.flush()
    print("writing", flush=True)
    time.sleep(60)
"""


def start_writer(path: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    return process


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    write_bytes(path, b"old")
    with pytest.raises(KeyboardInterrupt), atomic_file(path) as file:
        file.write("half")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["out.txt"]
    assert path.read_bytes() == b"old"


def test_second_writer_is_refused_while_the_first_one_lives(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    process = start_writer(path)
    try:
        with pytest.raises(InputError, match="another process is writing"):
            write_bytes(path, b"mine")
        with pytest.raises(InputError, match="another process is writing"):
            ResumableLines(path, {}, 1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    assert len(names(tmp_path)) == 1  # what the killed process left behind
    write_bytes(path, b"mine")
    assert names(tmp_path) == ["out.txt"]
    assert path.read_bytes() == b"mine"


def test_resumable_file_survives_other_commands_until_one_completes(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = ResumableLines(path, {"a": 1}, 2)
    first.write(['{"n": 1}', '{"n": 2}', '{"n": 3}'])
    with pytest.raises(InputError, match="another process is writing"):
        ResumableLines(path, {"a": 1}, 2)
    first.close()
    second = ResumableLines(path, {"a": 2}, 2)
    assert second.items == 0
    second.close()
    again = ResumableLines(path, {"a": 1}, 2)
    assert again.items == 1
    again.write(['{"n": 3}', '{"n": 4}'])
    again.finish()
    assert names(tmp_path) == ["out.jsonl"]
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.parametrize("damage", [b"\0" * 20 + b"\n", b'{"n": \n', b"half"])
def test_damaged_lines_of_a_resumable_file_are_written_again(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "out.jsonl"
    file = ResumableLines(path, {}, 1)
    file.write(['{"n": 1}'])
    file.close()
    with file.partial.open("ab") as partial:
        partial.write(damage + b'{"n": 3}\n')
    file = ResumableLines(path, {}, 1)
    assert file.items == 1
    file.write(['{"n": 2}'])
    file.finish()
    assert path.read_text() == '{"n": 1}\n{"n": 2}\n'


def test_symbolic_links_are_written_through(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("old")
    (tmp_path / "link").symlink_to("real/file")
    (tmp_path / "dangling").symlink_to("real/new")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("link", "dangling"):
        write_bytes(tmp_path / name, b"new")
        assert (tmp_path / name).is_symlink()
    assert names(tmp_path / "real") == ["file", "new"]
    assert (tmp_path / "real" / "file").read_bytes() == (tmp_path / "real" / "new").read_bytes() == b"new"
    with pytest.raises(InputError, match="leads to itself"):
        write_bytes(tmp_path / "loop", b"new")
    assert (tmp_path / "loop").is_symlink()


def test_special_files_and_directories_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    os.mkfifo("pipe")
    Path("link").symlink_to("pipe")
    Path("folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for name, kind in (("pipe", "pipe"), ("link", "pipe"), ("socket", "socket"), ("folder", "directory")):
            before = os.lstat(name)
            with pytest.raises(InputError, match=kind):
                write_bytes(Path(name), b"x")
            after = os.lstat(name)
            assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
    with pytest.raises(InputError, match="does not exist; create it first"):
        write_bytes(Path("nowhere/file"), b"x")
    with pytest.raises(InputError, match="cannot write"):
        write_bytes(Path("pipe/file"), b"x")
    assert names(tmp_path) == ["folder", "link", "pipe", "socket"]


def test_outputs_that_are_also_inputs_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("text")
    (tmp_path / "link").symlink_to("in.txt")
    os.link(source, tmp_path / "hard")
    for name in ("in.txt", "link", "hard", "../" + tmp_path.name + "/in.txt"):
        with pytest.raises(InputError, match="also an input"):
            check_output(tmp_path / name, [source])
    assert check_output(tmp_path / "other", [source, "-", "some/hub-id"]) == tmp_path.resolve() / "other"


@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_file_modes_follow_the_umask_and_existing_files_keep_theirs(tmp_path: Path, umask: int, expected: int) -> None:
    old, path = os.umask(umask), tmp_path / "out"
    try:
        write_bytes(path, b"x")
        assert stat.S_IMODE(path.stat().st_mode) == expected
        path.chmod(0o640)
        write_bytes(path, b"y")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
    finally:
        os.umask(old)


def test_full_disk_names_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"cannot write .*out\.txt: No space left on device; free some space"):
        write_bytes(tmp_path / "out.txt", b"x")
    assert names(tmp_path) == []


def test_unpaired_surrogates_are_written_as_json_escapes(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "out.jsonl") as file:
        file.write(json.dumps({"id": "\ud800"}, ensure_ascii=False))
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {"id": "\ud800"}
