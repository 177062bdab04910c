"""flaxen vocab writes a complete directory or nothing."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from flaxen import manifest
from flaxen.cli.main import main
from flaxen.cli.vocab import Vocab
from flaxen.data.corpus import Corpus
from flaxen.data.tokenizers import load_tokenizer
from flaxen.data.vocabulary import train_sentencepiece
from flaxen.errors import InputError


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (tmp_path / "some text.txt").write_text("\n".join(list(topics.values())[:20]), encoding="utf-8")
    return Corpus(train=(str(tmp_path / "some text.txt"),))


@pytest.mark.parametrize("kind", ["sentencepiece", "bpe"])
def test_vocabulary_is_written_and_reported(
    kind: Any, corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "vocabulary"
    Vocab(out, corpus, kind=kind, size=600, sentinels=20).run(set())
    tokenizer = load_tokenizer(out)
    assert tokenizer is not None
    assert (tokenizer.size, len(tokenizer.sentinels)) == (600, 20)
    assert [path.name for path in out.parent.iterdir()] == ["vocabulary"]
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "600, including 20 sentinels" in printed.out
    assert "characters per token, 0." in printed.out
    assert printed.out.count("example ") == 3
    flags = f"--model.preset t5-v1_1-mini --model.tokenizer {out} --data.train '{corpus.train[0]}'"
    assert f"next      flaxen train denoise --out run {flags}\n" in printed.out


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_vocabulary_without_sentinels_suggests_a_language_model(
    model_type: Any,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "vocabulary"
    flags = ["--size", "600", "--sentinels", "0", "--coverage", "1.0", "--model-type", model_type]
    monkeypatch.setattr("sys.argv", ["flaxen", "vocab", str(out), "--data.train", *corpus.train, *flags])
    main()
    tokenizer = load_tokenizer(out)
    assert tokenizer is not None
    assert (tokenizer.size, tokenizer.sentinels) == (600, ())
    texts = corpus.train_source().texts(lambda _: None)
    files = train_sentencepiece(texts, 600, sentinels=0, coverage=1.0, model_type=model_type)
    assert files == {path.name: path.read_bytes() for path in out.iterdir() if path.name != manifest.NAME}
    printed = capsys.readouterr().out
    flags_of_next = f"--model.preset vq-tiny --model.tokenizer {out} --data.train '{corpus.train[0]}'"
    assert f"next      flaxen train language --out run {flags_of_next}\n" in printed


def test_empty_directory_may_be_written_to(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    Vocab(tmp_path / "out", corpus, size=400).run(set())
    assert load_tokenizer(tmp_path / "out") is not None


@pytest.mark.parametrize("name", ["notes.txt", "config.json"])
def test_existing_files_are_not_overwritten(name: str, corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("{}")
    with pytest.raises(InputError, match="contains files that Flaxen did not write"):
        Vocab(tmp_path / "out", corpus, size=400).run(set())
    with pytest.raises(InputError, match="is a file; expected a directory"):
        Vocab(tmp_path / "out" / name, corpus, size=400).run(set())
    with pytest.raises(InputError, match="is not a directory"):
        Vocab(tmp_path / "out" / name / "below", corpus, size=400).run(set())
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


@pytest.mark.parametrize(
    ("options", "given_flags", "message"),
    [
        ({"size": 50_000}, set(), "allows"),
        ({"size": 50}, set(), "size must be at least"),
        ({"coverage": 2.0}, {"coverage"}, "coverage must be"),
        ({"kind": "bpe", "byte_fallback": True}, {"byte_fallback"}, "--byte-fallback has no effect with --kind bpe"),
        ({"kind": "bpe", "model_type": "bpe"}, {"model_type"}, "--model-type has no effect with --kind bpe"),
        ({"data": Corpus()}, set(), "--data.train"),
        ({"data": Corpus(train=("{tmp}/empty.txt",))}, set(), "expected text"),
        ({"data": Corpus(train=("{tmp}/latin.txt",))}, set(), "not UTF-8"),
    ],
)
def test_nothing_is_left_after_an_error(
    options: dict[str, Any], given_flags: set[str], message: str, corpus: Corpus, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"text\n" * 9 + b"\xe9t\xe9\n")
    if "data" in options:
        files = tuple(name.format(tmp=tmp_path) for name in options["data"].train)
        options = {**options, "data": Corpus(train=files)}
    before = set(tmp_path.iterdir())
    with pytest.raises(InputError, match=message):
        Vocab(tmp_path / "out", **{"data": corpus, **options}).run(given_flags)
    assert set(tmp_path.iterdir()) == before


SLOW = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background parent process may ignore SIGINT
import flaxen.cli.vocab as vocab
from flaxen.data.corpus import Corpus
vocab.train_sentencepiece = lambda *_: (print("training", flush=True), time.sleep(60))
try:
    vocab.Vocab(Path(sys.argv[1]), Corpus(train=(sys.argv[2],))).run(set())
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_does_not_wait_for_the_trainer(corpus: Corpus, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    command = [sys.executable, "-c", SLOW, str(tmp_path / "out"), corpus.train[0]]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"training\n"
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert time.monotonic() - start < 20
    assert set(tmp_path.iterdir()) == before
