"""Trained vocabularies load as the same tokenizer here and in transformers."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import transformers

from flaxen.data.tokenizers import Files, Tokenizer, load_tokenizer
from flaxen.data.vocabulary import train_bpe, train_sentencepiece
from flaxen.errors import InputError

TRAINERS: dict[str, Callable[..., Files]] = {"sentencepiece": train_sentencepiece, "bpe": train_bpe}
DOCUMENTS = list(topics.values())[:25]
# Prose only. In runs such as "*****" several segmentations are equally likely, and transformers 5 may choose another.
PROSE = [
    line.strip() for text in DOCUMENTS for line in text.splitlines() if re.match(r"[A-Z][a-z]+ [a-z]+ [a-z]+", line)
]
MARKED = [
    "x <extra_id_0> y",
    "<extra_id_1> of <extra_id_0>, <extra_id_11>",
    "a</s> b",
    "<pad>",
    "<extra_id_12>",
]


def write(directory: Path, files: Files) -> Path:
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


def load(directory: Path) -> Tokenizer:
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module", params=TRAINERS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def directory(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options: dict[str, Any] = {"coverage": 1.0} if kind == "sentencepiece" else {}
    return write(tmp_path_factory.mktemp(kind), TRAINERS[kind](DOCUMENTS, 700, sentinels=12, **options))


def test_ids_are_those_of_t5(directory: Path) -> None:
    ours = load(directory)
    assert (ours.size, ours.pad_id, ours.eos_id, ours.unk_id) == (700, 0, 1, 2)
    assert ours.sentinels == tuple(range(699, 687, -1))
    assert [ours.token(id) for id in (0, 1, 2, 699, 688)] == ["<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_11>"]
    assert len({ours.token(id) for id in range(700)}) == 700


@pytest.mark.parametrize("beside_a_model", [False, True])
def test_ids_and_text_equal_transformers(directory: Path, tmp_path: Path, beside_a_model: bool) -> None:
    write(tmp_path, {path.name: path.read_bytes() for path in directory.iterdir()})
    if beside_a_model:  # the type of the model must not change the tokenizer
        (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    ours, theirs = load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (len(theirs), theirs.pad_token_id, theirs.eos_token_id, theirs.unk_token_id) == (700, 0, 1, 2)
    texts = [*PROSE, *MARKED]
    assert len(texts) > 100
    assert ours.encode_batch(texts) == theirs(texts).input_ids
    for text in texts:
        ids = ours.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_both_settings_files_name_the_special_tokens(directory: Path) -> None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        table = json.loads((directory / name).read_text())
        assert table["additional_special_tokens"] == [f"<extra_id_{k}>" for k in range(12)]
        assert [table[role] for role in ("pad_token", "eos_token", "unk_token")] == ["<pad>", "</s>", "<unk>"]


def test_text_survives_encoding_and_decoding(kind: str, directory: Path) -> None:
    ours = load(directory)
    for text in filter(str.isascii, PROSE):
        if kind == "sentencepiece":  # which, as in T5, merges white space into single spaces
            assert ours.decode(ours.encode(text)) == " ".join(text.split())
        else:
            spaced = f"\n  {text}\t\r\n é😀\x00 ."
            assert ours.decode(ours.encode(spaced)) == spaced
    if kind == "bpe":
        for literal in (*MARKED, " <pad> </s>"):
            assert ours.decode(ours.encode(literal, specials=False)) == literal


@pytest.mark.parametrize("sentinels", [0, 100])
def test_any_number_of_sentinels(kind: str, sentinels: int, tmp_path: Path) -> None:
    directory = write(tmp_path, TRAINERS[kind](DOCUMENTS[:8], 500, sentinels=sentinels))
    ours, theirs = load(directory), transformers.AutoTokenizer.from_pretrained(directory)
    assert len(theirs) == ours.size == 500
    assert ours.sentinels == tuple(range(499, 499 - sentinels, -1))
    text = "The <extra_id_0> statement"
    assert ours.encode(text) == theirs(text).input_ids


def test_training_is_deterministic(kind: str) -> None:
    options: dict[str, Any] = {"sample": 101} if kind == "sentencepiece" else {}
    first, second = (TRAINERS[kind](iter(DOCUMENTS), 500, **options) for _ in range(2))
    assert first == second


def test_byte_fallback_encodes_rare_characters(tmp_path: Path) -> None:
    ours = load(write(tmp_path, train_sentencepiece(DOCUMENTS, 700, byte_fallback=True)))
    text = "été 你好 😀"
    assert ours.decode(ours.encode(text)) == text
    assert 2 not in ours.encode(text)


def test_sentencepiece_bpe_merges_pairs_of_earlier_pieces(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sentinels": 0, "coverage": 1.0}
    files = train_sentencepiece(DOCUMENTS, 700, **options, model_type="bpe")
    assert files == train_sentencepiece(DOCUMENTS, 700, **options, model_type="bpe")
    ours = load(write(tmp_path, files))
    assert (ours.size, ours.pad_id, ours.eos_id, ours.unk_id, ours.sentinels) == (700, 0, 1, 2, ())
    merged = [ours.token(id) for id in range(3, 700)]
    characters = {piece for piece in merged if len(piece) == 1}
    for k, piece in enumerate(merged):  # two earlier pieces; in a unigram model this need not hold
        parts = characters.union(merged[:k])
        assert piece in characters or any(piece[:i] in parts and piece[i:] in parts for i in range(1, len(piece)))
    for text in filter(str.isascii, PROSE):
        ids = ours.encode(text)
        assert ours.unk_id not in ids
        assert ours.decode(ids) == " ".join(text.split())
    with pytest.raises(InputError, match=r"it allows at most .* ids"):
        train_sentencepiece(DOCUMENTS[:8], 90_000, model_type="bpe")


def test_coverage_decides_which_characters_are_pieces(tmp_path: Path) -> None:
    texts = [*DOCUMENTS, "жук"]
    for coverage, unknown in ((1.0, False), (0.99, True)):
        ours = load(write(tmp_path, train_sentencepiece(texts, 500, coverage=coverage)))
        assert (2 in ours.encode("жук")) == unknown


@pytest.mark.parametrize("text", ["зубр " * 4000, "зубр" * 4000, "зубр \u2585 <pad>" * 9, "a\n" * 5000 + "зубр"])
def test_no_text_is_dropped(text: str, tmp_path: Path) -> None:
    # SentencePiece by itself drops sentences longer than 4192 bytes, or with its mark for unknown characters.
    ours = load(write(tmp_path, train_sentencepiece([*DOCUMENTS[:8], text], 500, coverage=1.0)))
    assert 2 not in ours.encode("зубр")


def test_names_of_special_tokens_in_the_text_become_no_pieces(kind: str, tmp_path: Path) -> None:
    texts = [*DOCUMENTS[:8], "x<pad>y</s><unk> <extra_id_0> <extra_id_7>" * 200]
    ours = load(write(tmp_path, TRAINERS[kind](texts, 500)))
    assert len({ours.token(id) for id in range(500)}) == 500
    assert ours.decode(ours.encode("x<pad>y", specials=False)) == "x<pad>y"


def test_error_for_too_large_a_size_names_the_largest(kind: str) -> None:
    with pytest.raises(InputError, match=r"not enough text for size 90,000: it allows at most ([\d,]+) ids") as error:
        TRAINERS[kind](DOCUMENTS[:8], 90_000)
    largest = int(re.search(r"at most ([\d,]+)", str(error.value))[1].replace(",", ""))  # type: ignore[index]
    TRAINERS[kind](DOCUMENTS[:8], largest)
    with pytest.raises(InputError, match=f"at most {largest:,} ids"):
        TRAINERS[kind](DOCUMENTS[:8], largest + 1)


def test_error_for_too_small_a_size_names_the_smallest(kind: str) -> None:
    with pytest.raises(InputError, match=r"size must be at least \d+ \(100 sentinels"):
        TRAINERS[kind](DOCUMENTS, 60)
    if kind == "sentencepiece":
        with pytest.raises(InputError, match=r"at least (\d+) for the characters of this text, got 110") as error:
            train_sentencepiece(DOCUMENTS, 110)
        train_sentencepiece(DOCUMENTS, int(re.search(r"least (\d+)", str(error.value))[1]))  # type: ignore[index]


@pytest.mark.parametrize("texts", [[], [""], [" \n", ""]])
def test_training_without_text_is_refused(texts: list[str], kind: str) -> None:
    with pytest.raises(InputError, match=r"expected text|not enough text"):
        TRAINERS[kind](texts, 500)


@pytest.mark.parametrize("options", [{"coverage": 0.5}, {"coverage": 1.5}, {"sample": 100}, {"sentinels": -1}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(options))} must be"):
        train_sentencepiece(DOCUMENTS, 500, **options)


@pytest.mark.parametrize("error", [InputError("line 7"), KeyboardInterrupt(), OSError("gone")])
def test_errors_of_the_text_iterator_are_raised_unchanged(error: BaseException, kind: str) -> None:
    def texts() -> Iterator[str]:
        yield from DOCUMENTS
        raise error

    with pytest.raises(type(error)) as caught:
        TRAINERS[kind](texts(), 500)
    assert caught.value is error
