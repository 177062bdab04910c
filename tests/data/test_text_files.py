"""Documents are read from files unchanged and in order; errors name the file and the line."""

import codecs
import gzip
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flaxen.data import files, tables
from flaxen.data.files import find_files
from flaxen.data.text_files import TextFiles
from flaxen.errors import InputError

ODD = "a\u2028b\x85c\x0bd\x0ce\x1cf"  # str.splitlines splits at each of these


def source(*paths: Path | str, **options: Any) -> TextFiles:
    return TextFiles(find_files(map(str, paths)), **options)


def read(path: Path, content: bytes | str, **options: Any) -> list[str]:
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return list(source(path, **options).texts())


def small_blocks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (files, tables):
        monkeypatch.setattr(module, "BLOCK", size)


def table(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "A.TXT"])
def test_each_line_is_a_document(tmp_path: Path, name: str, end: str) -> None:
    lines = ["\ufeff one", "", " \t ", "<pad> </s>", ODD, "\u3000", "last"]
    assert read(tmp_path / name, end.join(lines)) == [" one", "<pad> </s>", ODD, "last"]
    assert read(tmp_path / name, end.join([*lines, ""])) == [" one", "<pad> </s>", ODD, "last"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_each_paragraph_is_a_document(tmp_path: Path, end: str) -> None:
    text = end.join(["", "one", " two", " ", "", "three", "", "four"])
    assert read(tmp_path / "a.txt", text, unit="paragraph") == ["one\n two", "three", "four"]


@pytest.mark.parametrize("block", [1, 2, 3, 5, 64])
def test_block_size_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    small_blocks(monkeypatch, block)
    assert read(tmp_path / "a.txt", "\ufeffé1\r\n€\r\r\n𝄞\n\rz") == ["é1", "€", "𝄞", "z"]
    rows = [{"text": "é [1, {"}, {"text": 'a "]" b\n', "n": 1.5e3, "ok": True}, {"text": None}, {"text": "z" * 50}]
    expected = [row["text"] for row in rows if row["text"]]
    assert read(tmp_path / "a.json", json.dumps(rows, ensure_ascii=False)) == expected
    assert read(tmp_path / "a.json", " \n" + json.dumps(rows, indent=1) + "\n ") == expected
    with pytest.raises(InputError, match=r"a\.txt, line 4: byte 8 \(0xff\)"):
        read(tmp_path / "a.txt", b"\xc3\xa91\r\n2\r\r\xff\n")
    with pytest.raises(InputError, match=r"a\.txt, line 2: byte 2 \(0xe2\)"):
        read(tmp_path / "a.txt", b"1\r\xe2\x82x")


def test_files_are_read_in_order(tmp_path: Path) -> None:
    for name in ("b1.txt", "b2.txt", "a.txt", "sub"):
        (tmp_path / name).mkdir() if name == "sub" else (tmp_path / name).write_text(name)
    (tmp_path / "sub" / "c.txt").write_text("c")
    (tmp_path / "[x].txt").write_text("x")
    files = source(tmp_path / "b*.txt", tmp_path / "a.txt", tmp_path / "[x].txt", tmp_path / "**/c.txt")
    assert list(files.texts()) == ["b1.txt", "b2.txt", "a.txt", "x", "c"]


def test_long_lines_take_linear_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 4096)  # many blocks: joining them one by one would copy 50 GB
    started = time.process_time()
    words = b"word " * 4_000_000
    assert read(tmp_path / "a.txt", words) == [words.decode()]
    assert read(tmp_path / "a.json", b'[{"text": "' + words + b'"}]') == [words.decode()]
    assert read(tmp_path / "a.csv", b'text\n"' + words + b'"') == [words.decode()]
    assert time.process_time() - started < 5  # seconds; it takes half a second


def test_json_lines_and_arrays(tmp_path: Path) -> None:
    rows = [{"id": 1, "text": ODD}, {"id": 2, "text": None}, {"id": 3, "text": ""}, {"id": 4, "text": "a\r\nb\0"}]
    content = "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    for name in ("a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz"):
        assert read(tmp_path / name, content) == [ODD, "a\r\nb\0"]
    assert read(tmp_path / "a.json", json.dumps(rows)) == [ODD, "a\r\nb\0"]
    assert read(tmp_path / "a.json", "[]") == read(tmp_path / "a.json", "") == read(tmp_path / "a.jsonl", "\n") == []
    assert read(tmp_path / "a.jsonl", '{"body": "x", "title": "y"}') == ["x"]
    assert read(tmp_path / "a.jsonl", '{"body": "x", "title": "y"}', column="title") == ["y"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n\n{"text": "b"', r"line 3: expected a JSON object on each line.*'\{\"text\": \"b\"'"),
        ('{"text": "a"}\n["b"]', r"line 2: expected an object such as \{\"text\": …\}, got \['b'\]"),
        ('{"text": "a"}\n{"text": 5}', "line 2: expected text in column 'text', got int 5; choose another"),
        ('{"texts": "a", "id": 1}', r"line 1: unknown column 'text' \(did you mean 'texts'\?\); available: texts, id"),
        ('{"text": "a"}\n{"txt": "b"}', r"line 2: unknown column 'text' \(did you mean 'txt'\?\); available: txt"),
        ('{"text": "a"}\n{}', "line 2: unknown column 'text'; available: none"),
        ('{"text": "\\ud800"}', "line 1: .*unpaired surrogate.*--data.invalid replace"),
        ("{" * 100_000, "line 1: expected a JSON object"),
        ('[{"text": "a"}, {"text": "b"', "element 2 of the array.*truncated"),
        ('[{"text": "a"}, {"text": "b', "element 2 of the array.*truncated"),
        ('[{"text": "a"}', "element 2 of the array.*the end of the file"),
        ('[{"text": "a"}, {"text" "b"}' + " " * 100 + "]", "element 2 of the array"),
        ('[{"text": "a"}, "b"]', "element 2: expected an object"),
        ('[{"text": "a"}]\n[{"text": "b"}]', "expected nothing after the array"),
    ],
)
def test_broken_json_is_named(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"a\.json.*{message}"):
        read(tmp_path / "a.json", content, column="text")


def test_unpaired_surrogates_can_be_replaced(tmp_path: Path) -> None:
    assert read(tmp_path / "a.jsonl", '{"text": "a\\ud800b\\ud834\\udd1e"}', invalid="replace") == ["a\ufffdb𝄞"]


@pytest.mark.parametrize(("name", "comma"), [("a.csv", ","), ("a.csv.gz", ","), ("a.tsv", "\t")])
def test_csv_and_tsv(tmp_path: Path, name: str, comma: str) -> None:
    rows = ["id,text,more", '1,"a\nb, ""c""",x', "", "2,,x", "3", f"4,{'y' * 200_000},x", f'5,{ODD} 5" x,']
    content = "\r\n".join(rows).replace(",", comma)
    assert read(tmp_path / name, "\ufeff" + content) == [f'a\nb{comma} "c"', "y" * 200_000, f'{ODD} 5" x']
    assert read(tmp_path / name, content, column="more") == ["x", "x", "x"]
    assert read(tmp_path / name, f"first{comma}second\na{comma}b") == ["a"]
    assert read(tmp_path / name, "") == []
    with pytest.raises(
        InputError, match=r"a\.[ct]sv.*unknown column 'texts' \(did you mean 'text'\?\); available: id, text, more"
    ):
        read(tmp_path / name, content, column="texts")
    with pytest.raises(InputError, match=r"line 3: expected at most 1 cells, as in the header, got 2; quote"):
        read(tmp_path / name, f"text\na\nb{comma} c")
    with pytest.raises(InputError, match=r"line 3: unexpected end of data; quote"):
        read(tmp_path / name, 'text\na\n"b\nc\n')


def test_parquet(tmp_path: Path) -> None:
    texts = [f"{ODD} {i}" for i in range(1000)] + [None, "", " "]
    path = table(tmp_path / "a.parquet", id=list(range(1003)), text=texts)
    assert list(source(path).texts()) == texts[:1000]
    coded = pa.array(["a", "b", "a"]).dictionary_encode()
    path = table(tmp_path / "b.parquet", first=coded, second=pa.array(["x", "y", "z"], pa.large_string()), n=[1, 2, 3])
    assert list(source(path).texts()) == ["a", "b", "a"]
    assert list(source(path, column="second").texts()) == ["x", "y", "z"]
    with pytest.raises(
        InputError, match=r"b\.parquet: unknown column 'secnd' \(did you mean .*; available: first, second, n"
    ):
        list(source(path, column="secnd").texts())
    with pytest.raises(InputError, match="row 1: expected text in column 'n', got int 1"):
        list(source(path, column="n").texts())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"b\.parquet is not a valid Parquet file.*download it again"):
        list(source(path).texts())
    raw = pa.array([b"ok", b"\xff"]).view(pa.string())
    path = table(tmp_path / "c.parquet", text=raw)
    with pytest.raises(InputError, match=r"c\.parquet, row 2: .*--data.invalid replace"):
        list(source(path).texts())
    assert list(source(path, invalid="replace").texts()) == ["ok", "\ufffd"]


def test_invalid_utf8_is_located_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    content = b"\xef\xbb\xbffine\r\n\xc3\xa9 caf\xe9 x\nend"
    with pytest.raises(InputError, match=r"a\.txt, line 2: byte 15 \(0xe9\) is not UTF-8.*--data.invalid replace"):
        read(path, content)
    assert read(path, content, invalid="replace") == ["fine", "é caf\ufffd x", "end"]
    with pytest.raises(InputError, match="line 2: byte 2"):
        read(path, b"a\n\xe2\x82")  # a character that is truncated by the end of the file
    with pytest.raises(InputError, match=r"a\.jsonl, line 1: byte 10"):
        read(tmp_path / "a.jsonl", b'{"text": "\xff"}')


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.txt.gz"])
@pytest.mark.parametrize("content", [b"a\0b", codecs.BOM_UTF16_LE + "text".encode("utf-16-le")])
def test_binary_files_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    for invalid in ("error", "replace"):
        with pytest.raises(InputError, match="looks like a binary file"):
            read(tmp_path / name, content, invalid=invalid)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_truncated_gzip_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(np.random.default_rng(0).bytes(9000).hex().encode())[:keep])
    with pytest.raises(InputError, match=r"a\.txt\.gz is not a valid gzip file.*download it again"):
        list(source(path).texts())
    path.write_bytes(b"plain text")
    with pytest.raises(InputError, match="not a valid gzip file"):
        list(source(path).texts())


def test_missing_and_unsupported_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a")
    (tmp_path / "notes.md").write_text("a")
    (tmp_path / "dump.gz").write_text("a")
    (tmp_path / "a.parquet.gz").write_text("a")
    for name, message in {
        "trian.txt": r"trian\.txt does not exist \(did you mean 'train\.txt'",
        "no/such.txt": "does not exist",
        "*.jsonl": "no file matches",
        "": "is a directory; expected files, such as",
        "notes.md": r"notes\.md: expected a file name ending in \.txt, \.jsonl",
        "dump.gz": r"dump\.gz: expected a file name",
        "a.parquet.gz": "all but the last",
        "*": "expected a file name",
    }.items():
        with pytest.raises(InputError, match=message):
            source(f"{tmp_path}/{name}")
    gone = source(tmp_path / "train.txt")
    (tmp_path / "train.txt").unlink()
    for read_again in (lambda: list(gone.texts()), gone.identity, lambda: gone.size):
        with pytest.raises(InputError, match=r"cannot read .*train\.txt: No such file"):
            read_again()


def test_identity_changes_with_files_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = source(path).identity()
    assert json.loads(json.dumps(first)) == first == source(path).identity()
    assert source(path, unit="paragraph").identity() != first
    assert source(path, invalid="replace").identity() != first
    assert source(path, column="x").identity() != first
    path.write_text("two")
    assert source(path).identity() != first


def test_progress_reaches_the_size(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"line\n" * 500_000)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"line\n" * 500_000))
    table(tmp_path / "c.parquet", text=["line"] * 1000)
    files = source(tmp_path / "*")
    progress: list[int] = []
    assert sum(1 for _ in files.texts(progress.append)) == 1_001_000
    assert progress == sorted(progress)
    assert progress[-1] == files.size
