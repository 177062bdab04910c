"""flaxen generate --file: outputs are in order, and an interrupted command resumes."""

import json
from pathlib import Path

import pytest
from commands import command

import flaxen
from flaxen.cli.prompts import PromptFile, windows
from flaxen.cli.resumable import ResumableLines
from flaxen.errors import InputError
from flaxen.pretrained import Pretrained

PROMPTS = [f"{'word ' * (i % 5 + 1)}{i}" for i in range(21)]


def flags(model: Path, tmp_path: Path) -> list[object]:
    rows = [{"id": f"p{i}", "q": text} for i, text in enumerate(PROMPTS)]
    if not (tmp_path / "in.jsonl").exists():
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["generate", model, "--file", tmp_path / "in.jsonl", "--column", "say {q}", "--out", tmp_path / "out.jsonl",
            "--max-new-tokens", 3, "--batch-size", 1, "--num-beams", 2, "--num-return-sequences", 2]  # fmt: skip


@pytest.mark.parametrize("torn", ["", '{"id": "p8", "te', '{"half of": "a prompt"}\n'])
def test_interrupted_generation_resumes(byt5: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: str) -> None:
    done, real, batch_sizes = 0, Pretrained.generate, list[int]()

    def interrupted(self: Pretrained, prompts: list[str], **options: object) -> list[flaxen.Generated]:
        nonlocal done
        batch_sizes.append(len(prompts))
        if done == 1:
            raise KeyboardInterrupt
        done += 1
        return real(self, prompts, **options)

    monkeypatch.setattr(Pretrained, "generate", interrupted)
    assert command(*flags(byt5, tmp_path)).code == 130
    assert not (tmp_path / "out.jsonl").exists()
    (partial,) = tmp_path.glob(".out.jsonl.*.partial")
    with partial.open("a") as file:
        file.write(torn)
    done, batch_sizes = 2, []
    resumed = command(*flags(byt5, tmp_path))
    assert resumed.code == 0, resumed.err
    assert "resuming after prompt 8 of 21" in resumed.err
    assert batch_sizes == [8, 5]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"p{i // 2}" for i in range(42)]
    assert [line["index"] for line in lines] == [i // 2 for i in range(42)]
    options = {"max_new_tokens": 3, "num_beams": 2, "num_return_sequences": 2}
    expected = real(flaxen.load(byt5), [f"say {text}" for text in PROMPTS], **options)
    assert [line["tokens"] for line in lines] == [output.tokens for output in expected]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_other_settings_start_from_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for key, items in (({"a": 1}, 0), ({"a": 1}, 2), ({"a": 2}, 0)):
        file = ResumableLines(path, key, 1)
        assert file.items == items
        file.write(['{"x": 1}'] * (2 - items))
        file.close()
    file = ResumableLines(path, {"a": 2}, 1)
    file.finish()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl"]


def test_prompts_from_text_files_and_tables(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\r\nthree")
    assert list(PromptFile(tmp_path / "a.txt")) == [(None, "one"), (None, "two"), (None, "three")]
    (tmp_path / "a.csv").write_text("id,text\nx,one\ny,two\n")
    assert list(PromptFile(tmp_path / "a.csv")) == [("x", "one"), ("y", "two")]
    (tmp_path / "b.csv").write_text("id,text\nx,\n")
    with pytest.raises(InputError, match="line 2: the prompt is empty"):
        list(PromptFile(tmp_path / "b.csv"))
    with pytest.raises(InputError, match=r"unknown column 'q'.*--column"):
        list(PromptFile(tmp_path / "a.csv", "q"))
    assert list(windows("abcde", 2)) == [["a", "b"], ["c", "d"], ["e"]]
