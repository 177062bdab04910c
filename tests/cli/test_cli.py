"""The command in a process of its own: outputs, exit codes and error messages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import command

import flaxen


def run(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `flaxen …` in a new process, which takes seconds to start."""
    program = [sys.executable, "-m", "flaxen.cli.main", *map(str, arguments)]
    env = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(program, capture_output=True, text=True, input=stdin, check=False, env=env)


def test_generate_equals_the_library(byt5: Path) -> None:
    done = run("generate", byt5, "--text", "one", "two", "--json", "--num-beams", 3, "--max-new-tokens", 5)
    assert done.returncode == 0, done.stderr
    ours = [json.loads(line) for line in done.stdout.splitlines()]
    expected = flaxen.load(byt5).generate(["one", "two"], num_beams=3, max_new_tokens=5)
    assert [line["tokens"] for line in ours] == [output.tokens for output in expected]
    assert [line["index"] for line in ours] == [0, 1]
    assert set(ours[0]) == {"text", "tokens", "logprobs", "score", "index"}


def test_table_and_standard_input_generate_the_same(byt5: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"q": "one"}\n{"q": "two"}\n')
    (tmp_path / "in.txt").write_text("one\ntwo\n")
    options = ("--max-new-tokens", 4, "--json")
    first = run("generate", byt5, "--file", tmp_path / "in.jsonl", "--column", "q", "--out", tmp_path / "out", *options)
    assert (first.returncode, first.stdout) == (0, ""), first.stderr
    second = run("generate", byt5, "--file", "-", *options, stdin=(tmp_path / "in.txt").read_text())
    assert (tmp_path / "out").read_text() == second.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "in.txt", "out"]


def test_info(byt5: Path) -> None:
    done = run("info", byt5)
    assert done.returncode == 0, done.stderr
    assert "384" in done.stdout
    assert "ByteTokenizer" in done.stdout
    assert "60,506,624" in command("info", "t5-small").out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["generate", "{model}", "--text", "x", "--num-beam", "2"], 2, "--num-beams"),
        (["generate", "{model}", "--text", "x", "--num-beams", "two"], 2, "num-beams"),
        (["generate", "{model}", "--text", "x", "--dtype", "float16"], 2, "bfloat16"),
        (["genrate"], 2, "generate"),
        (["generate", "{model}"], 1, "exactly one of --text, --image and --file is required"),
        (["generate", "{model}", "--text", ""], 1, "prompt 0 is empty"),
        (["generate", "{model}", "--text", "</s>"], 1, "only special tokens"),
        (["generate", "{model}", "--text", "x", "--temperature", "0.5"], 1, "do_sample"),
        (["generate", "{model}", "--text", "x", "--stream", "--json"], 1, "--stream"),
        (["generate", "{tmp}/none", "--text", "x"], 1, "does not exist"),
        (["generate", "{tmp}", "--text", "x"], 1, "has no config.json"),
        (["generate", "{model}", "--file", "{tmp}/none.txt"], 1, "none.txt"),
        (["generate", "{model}", "--file", "{tmp}/bad.jsonl", "--out", "{tmp}/out"], 1, "line 2"),
        (["generate", "{model}", "--file", "{tmp}/binary"], 1, "not UTF-8"),
        (["generate", "{model}", "--file", "{tmp}/gap.txt", "--out", "{tmp}/out"], 1, "line 2: the prompt is empty"),
        (["info", "{tmp}"], 1, "has no config.json"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_input_is_one_clear_message(
    byt5: Path, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"txet": "x"}\n')
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x80")
    (tmp_path / "gap.txt").write_text("one\n\nthree\n")
    done = command(*(argument.format(model=byt5, tmp=tmp_path) for argument in arguments))
    assert done.code == code
    assert words in done.message
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


def test_process_exits_with_code_and_message(tmp_path: Path) -> None:
    done = run("info", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "has no config.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_completion_script() -> None:
    done = run("--tyro-print-completion", "bash")
    assert done.returncode == 0
    assert "complete" in done.stdout
