"""A token store holds exactly the tokens of its source, is built once, and is complete or does not exist."""

import dataclasses
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flaxen.data import store as module
from flaxen.data.corpus import Corpus
from flaxen.data.store import Tokens, TokenStore, open_corpus, open_store
from flaxen.data.text_files import TextFiles
from flaxen.data.tokenizers import ByteTokenizer, SentencePieceTokenizer
from flaxen.errors import InputError

BYTES = ByteTokenizer()


def write(path: Path, lines: list[str]) -> TextFiles:
    path.write_text("\n".join(lines), encoding="utf-8")
    return TextFiles((path,))


def lines_of(n: int, seed: int = 0) -> list[str]:
    draw = np.random.default_rng(seed)
    return [f"{i} <pad> é " + "x" * int(k) for i, k in enumerate(draw.integers(0, 80, n))]


def all_of(tokens: Tokens | TokenStore) -> list[int]:
    n = len(tokens) if isinstance(tokens, Tokens) else tokens.n_tokens
    return tokens.rows(np.array([0]), n)[0].tolist() if n else []


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    import sentencepiece

    directory = tmp_path_factory.mktemp("pieces")
    (directory / "text").write_text("\n".join(lines_of(500)), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "text"), model_prefix=str(directory / "spiece"), vocab_size=60, pad_id=0, eos_id=1,
        unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    return SentencePieceTokenizer({"spiece.model": (directory / "spiece.model").read_bytes()})


@pytest.mark.parametrize("batch", [1, 50, 1 << 18])
def test_store_holds_the_tokens_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: SentencePieceTokenizer, batch: int
) -> None:
    monkeypatch.setattr(module, "BATCH", batch)
    texts = lines_of(200)
    source = write(tmp_path / "a.txt", [*texts[:100], "", " ", *texts[100:]])
    for tokenizer in (BYTES, pieces):
        store = open_store(source, tokenizer, tmp_path / "cache")
        expected = [tokenizer.encode(text, eos=True, specials=False) for text in texts]
        assert store.n_documents == 200
        assert [store.document_start(i) for i in range(201)] == np.cumsum([0, *map(len, expected)]).tolist()
        assert all_of(store) == [id for row in expected for id in row]
        assert store.n_tokens == store.document_start(200)


def test_tokens_are_stored_in_the_smallest_dtype(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", lines_of(50))
    large = ByteTokenizer()
    large.size = 65537
    large.files = {"tokenizer_config.json": b'{"extra_ids": 65278}'}
    narrow, wide = (open_store(source, tokenizer, tmp_path / "cache") for tokenizer in (BYTES, large))
    assert all_of(narrow) == all_of(wide)
    sizes = [(store.directory / "tokens.bin").stat().st_size for store in (narrow, wide)]
    assert sizes == [2 * narrow.n_tokens, 4 * narrow.n_tokens]


@pytest.mark.parametrize("resident", [1, 1 << 27])
def test_rows_are_slices_of_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: int) -> None:
    monkeypatch.setattr(module, "RESIDENT", resident)  # with 1, pages are released after each row
    store = open_store(write(tmp_path / "a.txt", lines_of(300)), BYTES, tmp_path / "cache")
    tokens = np.fromfile(store.directory / "tokens.bin", np.uint16)
    starts = np.random.default_rng(0).integers(0, store.n_tokens - 19, 500)
    rows = store.rows(starts, 20)
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(rows, [tokens[start : start + 20] for start in starts])
    part = Tokens(store, 7, 107)
    np.testing.assert_array_equal(part.rows(np.array([0, 80]), 20), [tokens[7:27], tokens[87:107]])
    assert len(part) == 100
    assert store.rows(np.array([], np.int64), 20).shape == (0, 20)
    assert store.rows(np.array([], np.int64), 10**9).shape == (0, 10**9)
    rows[:] = 0  # rows are a copy: the file is not changed
    np.testing.assert_array_equal(store.rows(starts[:1], 20), [tokens[starts[0] : starts[0] + 20]])
    for view, wrong in [(store, [-1]), (store, [store.n_tokens - 19]), (part, [-1]), (part, [81])]:
        with pytest.raises(IndexError, match="rows of 20 tokens"):
            view.rows(np.array(wrong), 20)


def test_store_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.txt", lines_of(50))
    cache = tmp_path / "cache"
    first = open_store(source, BYTES, cache)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_build", None)
        again = open_store(source, ByteTokenizer(), cache)
    assert (again.directory, again.digest, all_of(again)) == (first.directory, first.digest, all_of(first))
    # The same text under another file name, or with another tokenizer, is another store with the same digest.
    copy = open_store(write(tmp_path / "b.txt", lines_of(50)), BYTES, cache)
    paragraphs = open_store(dataclasses.replace(source, unit="paragraph"), BYTES, cache)
    other = open_store(source, ByteTokenizer({"tokenizer_config.json": b'{"extra_ids": 0}'}), cache)
    assert len({store.directory for store in (first, copy, paragraphs, other)}) == 4
    assert copy.digest == other.digest == first.digest != paragraphs.digest
    ids = [id for text in lines_of(50) for id in BYTES.encode(text, specials=False)]
    assert first.digest == hashlib.blake2b(np.array(ids, "<u2").tobytes(), digest_size=16).hexdigest()


def test_changed_file_is_tokenized_again(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", ["one"])
    first = open_store(source, BYTES, tmp_path / "cache")
    write(tmp_path / "a.txt", ["two"])
    second = open_store(source, BYTES, tmp_path / "cache")
    assert all_of(second) == BYTES.encode("two")
    assert all_of(first) == BYTES.encode("one")


def test_file_that_changes_during_the_build_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.txt", ["one"])
    real = module._write

    def grow(*arguments: Any) -> dict[str, Any]:
        write(tmp_path / "a.txt", ["one", "two"])
        return real(*arguments)

    monkeypatch.setattr(module, "_write", grow)
    with pytest.raises(InputError, match=r"a\.txt changed while it was being read; rerun"):
        open_store(source, BYTES, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("percent", [0.0, 0.01, 5.0, 50.0, 99.9])
@pytest.mark.parametrize("n", [1, 2, 3, 30, 200])
def test_validation_is_the_first_percent_of_the_data(tmp_path: Path, n: int, percent: float) -> None:
    texts = [f"{i} {'x' * 50}" for i in range(n)]
    write(tmp_path / "a.txt", texts)
    corpus = Corpus(train=(str(tmp_path / "a.txt"),), validation_percent=percent, cache=tmp_path / "cache")
    train, validation = open_corpus(corpus, BYTES)
    assert all_of(validation) + all_of(train) == [id for text in texts for id in BYTES.encode(text)]
    assert len(train) > 0
    assert (len(validation) > 0) == (percent > 0)
    if n > 1:
        held = min(max(round(n * percent / 100), 1), n - 1) if percent else 0
        assert all_of(validation) == [id for text in texts[:held] for id in BYTES.encode(text)]
    else:
        assert len(validation) == (
            min(max(round(53 * percent / 100), 1), 52) if percent else 0
        )  # a single document is split between tokens


def test_validation_files_are_used_instead_of_a_part(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", ["one", "two"])
    write(tmp_path / "b.txt", ["three"])
    corpus = Corpus((str(tmp_path / "a.txt"),), (str(tmp_path / "b.txt"),), cache=tmp_path / "cache")
    train, validation = open_corpus(corpus, BYTES)
    assert all_of(train) == BYTES.encode("one") + BYTES.encode("two")
    assert all_of(validation) == BYTES.encode("three")


def test_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.txt contains no documents: expected text"):
        open_store(write(tmp_path / "a.txt", ["", " ", "\t"]), BYTES, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_failed_build_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n" * 200_000 + b"\xff")
    with pytest.raises(InputError, match="line 200001: byte"):
        open_store(TextFiles((tmp_path / "a.txt",)), BYTES, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_default_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.txt", ["one"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert open_store(source, BYTES, None).directory.parent == tmp_path / "xdg" / "flaxen" / "tokens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_store(source, BYTES, None).directory.parent == tmp_path / "home" / ".cache" / "flaxen" / "tokens"
    with pytest.raises(InputError, match=r"cannot write .*a\.txt.*--data.cache"):
        open_store(source, BYTES, tmp_path / "a.txt" / "cache")


def test_damaged_store_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", ["one"])
    store = open_store(source, BYTES, tmp_path / "cache")
    (store.directory / "tokens.bin").write_bytes(b"123")
    with pytest.raises(InputError, match=r"incomplete token store: tokens\.bin must have 8 bytes, got 3; delete"):
        open_store(source, BYTES, tmp_path / "cache")
    (store.directory / "meta.json").write_text("{}")
    with pytest.raises(InputError, match="incomplete token store"):
        open_store(source, BYTES, tmp_path / "cache")


SCRIPT = """
import resource, signal, sys
from pathlib import Path
from flaxen.data import store
from flaxen.data.text_files import TextFiles
from flaxen.data.tokenizers import ByteTokenizer

store.BATCH = 1000
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = int(sys.argv[3])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    print(store.open_store(TextFiles((Path(sys.argv[1]),)), ByteTokenizer(), Path(sys.argv[2])).digest)
except Exception as error:
    print(type(error).__name__, error)
    sys.exit(7)
"""


def child(source: TextFiles, cache: Path, limit: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(source.paths[0]), str(cache), str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_full_disk_leaves_no_files(tmp_path: Path) -> None:
    """A limit on file size simulates a full disk."""
    source = write(tmp_path / "a.txt", lines_of(30_000))
    run = child(source, tmp_path / "cache", limit=1_000_000)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 7, err
    assert out.startswith("InputError not enough space in")
    assert "File too large" in out
    assert "MB is free" in out
    assert "--data.cache" in out
    assert list((tmp_path / "cache").iterdir()) == []


def test_killed_build_is_not_used_and_deleted(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", lines_of(200_000))
    cache = tmp_path / "cache"
    run = child(source, cache)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in cache.glob("*.partial/tokens.bin")) and time.monotonic() < deadline:
        time.sleep(0.002)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    (partial,) = cache.iterdir()  # its partial build, and no store
    assert partial.name.endswith(".partial")
    write(tmp_path / "a.txt", ["one"])
    store = open_store(source, BYTES, cache)
    assert all_of(store) == BYTES.encode("one")
    assert list(cache.iterdir()) == [store.directory]


def test_only_abandoned_builds_are_deleted(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    host, dead = socket.gethostname(), 2**22 + 1  # above the largest process id of Linux
    key = 32 * "0"
    names = {
        "live": f"{key}.00000000.{os.getpid()}.{host}.partial",
        "elsewhere": f"{key}.00000000.{dead}.not-{host}.partial",
        "dead": f"{key}.00000000.{dead}.{host}.partial",
        "old": f"{key}.00000000.{os.getpid()}.other.host.partial",
        "old directory, new file": f"{key}.11111111.{os.getpid()}.{host}.partial",
    }
    for name in names.values():
        (cache / name).mkdir(parents=True)
        (cache / name / "tokens.bin").write_bytes(b"x")
    (cache / "unrelated.partial").mkdir()
    past = time.time() - 25 * 3600
    os.utime(cache / names["old"] / "tokens.bin", (past, past))
    os.utime(cache / names["old"], (past, past))
    os.utime(cache / names["old directory, new file"], (past, past))
    open_store(write(tmp_path / "a.txt", ["one"]), BYTES, cache)
    remaining = {path.name for path in cache.glob("*.partial")}
    assert remaining == {names["live"], names["elsewhere"], names["old directory, new file"], "unrelated.partial"}


def test_two_processes_build_the_same_store(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", lines_of(20_000))
    runs = [child(source, tmp_path / "cache") for _ in range(2)]
    digests = {run.communicate(timeout=60)[0].strip() for run in runs}
    (directory,) = (tmp_path / "cache").iterdir()
    assert digests == {TokenStore(directory).digest}


def test_store_of_a_faster_process_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finishes the same store while this one builds it."""
    source = write(tmp_path / "a.txt", lines_of(10))
    real = module._write

    def overtaken(*arguments: Any) -> dict[str, Any]:
        monkeypatch.setattr(module, "_write", real)
        open_store(source, BYTES, tmp_path / "cache")
        return real(*arguments)

    monkeypatch.setattr(module, "_write", overtaken)
    store = open_store(source, BYTES, tmp_path / "cache")
    assert store.n_documents == 10
    assert list((tmp_path / "cache").iterdir()) == [store.directory]


def test_meta_json_describes_the_store(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", ["one", "", "two"])
    store = open_store(source, BYTES, tmp_path / "cache")
    meta = json.loads((store.directory / "meta.json").read_text())
    assert meta["identity"] == source.identity()
    assert {k: v for k, v in meta.items() if k not in ("identity", "digest", "digests", "meta_digest")} == {
        "format": 2, "dtype": "uint16", "n_tokens": 8, "n_documents": 2
    }  # fmt: skip


class Unsized(TextFiles):
    """A source of unknown size, like a dataset."""

    size = None  # type: ignore[assignment]


@pytest.mark.parametrize(("kind", "shown"), [(TextFiles, "kB"), (Unsized, "3,000 documents")])
def test_progress_is_shown_only_on_terminals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: type, shown: str
) -> None:
    source = kind(write(tmp_path / "a.txt", lines_of(3_000)).paths)
    open_store(source, BYTES, tmp_path / "one")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    open_store(source, BYTES, tmp_path / "two", progress=False)
    assert capsys.readouterr().err == ""
    open_store(source, BYTES, tmp_path / "three")
    printed = capsys.readouterr()
    assert "tokenizing" in printed.err
    assert shown in printed.err
    assert printed.out == ""


def test_texts_are_read_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one batch of the source is in memory."""
    monkeypatch.setattr(module, "BATCH", 100)
    produced = 0

    def texts() -> Iterator[str]:
        nonlocal produced
        for _ in range(1000):
            produced += 10
            yield "x" * 10

    consumed = 0
    for tokens, _ in module._encode(texts(), BYTES, np.dtype(np.uint16)):
        assert produced - consumed <= 110
        consumed += len(tokens) * 10 // 11
    assert consumed == 10_000
