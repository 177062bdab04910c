"""Tokenizers give the same ids and text as transformers, on difficult text."""

import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import sentencepiece
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flaxen.data.tokenizers import (
    ByteTokenizer,
    JsonTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
)

# ByT5's tokenizer in transformers warns about a text that ends in "</s>".
pytestmark = pytest.mark.filterwarnings("ignore:This sequence already has")

NASTY = [
    *(
        "",
        " ",
        "   ",
        "\n",
        "Hello, world!",
        "  leading",
        "trailing  ",
        "a  b   c",
        "a\nb\n\nc\n",
        "\ttab\tx",
        "a\r\nb",
    ),
    *(
        "😀 hi 👩‍👩‍👧",
        "e\u0301te\u0301",
        "été",
        "你好，世界。",
        "ﬁ ½ ①",
        "a\u00a0b\u3000c",
        "\ufeffa\u200b",
        "▁",
        "a▁b",
    ),
    *(
        "a\x00b",
        "\x01\x02",
        "\x7f",
        "\x1c",
        "a\x0bb\x0cc",
        "\ud7ff\U0010ffff",
        "<0x41>",
        "a b " * 1000,
        "xyz" * 700,
    ),
    *(
        "x <extra_id_0> y",
        "x<extra_id_0>y",
        "  <extra_id_5>  ",
        "<extra_id_0><extra_id_99>",
        "(<extra_id_1>).\n",
    ),
    *(
        "<extra_id_0",
        "<extra_id_100>",
        "a </s> b",
        "a</s>",
        "</s>",
        "<pad>",
        "a<pad>b",
        " <unk> ",
        "a \t</s>\n b",
    ),
]
LITERALS = ["<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_1>", "<extra_id_10>"]
# transformers 5 treats U+0085 as a space; SentencePiece and transformers 4 do not.
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\x85")
TEXTS = st.lists(st.one_of(st.text(CHARACTERS), st.sampled_from([*LITERALS, " ", "  ", "the ", "\n"]))).map("".join)
# Derandomised: a tie between two segmentations in a random example should not make a later run fail.
examples = settings(max_examples=60, deadline=None, derandomize=True)


def train(**options: Any) -> bytes:
    """A small SentencePiece model with T5's special ids, of English with a few accents."""
    model = io.BytesIO()
    special = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    sentences = [*"".join(topics.values()).splitlines()[:3000], "<pad> é ▁"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        minloglevel=2,
        num_threads=1,
        **special,
        **options,
    )
    return model.getvalue()


def write(directory: Path, files: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return directory


@pytest.fixture(scope="session")
def spiece() -> bytes:
    return train(vocab_size=600, character_coverage=0.999)


@pytest.fixture(scope="session")
def multilingual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer like google/mt5-small: byte fallback, sentinels that are pieces, extra_ids 0."""
    sentinels = [f"▁<extra_id_{k}>" for k in reversed(range(20))]
    content = train(vocab_size=800, byte_fallback=True, user_defined_symbols=sentinels)
    config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, "additional_special_tokens": None}
    return write(tmp_path_factory.mktemp("mt5"), {"spiece.model": content, "tokenizer_config.json": config})


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> dict[str, Path]:
    """One directory of each kind, as transformers would write or read it."""
    root = tmp_path_factory.mktemp("tokenizers")
    slow = write(root / "spiece", {"spiece.model": spiece})
    transformers.T5Tokenizer.from_pretrained(slow).save_pretrained(root / "json")
    transformers.ByT5Tokenizer().save_pretrained(root / "bytes")
    return {"json": root / "json", "spiece": slow, "bytes": root / "bytes"}


KINDS = {
    "json": (JsonTokenizer, transformers.T5Tokenizer),
    "spiece": (SentencePieceTokenizer, transformers.T5Tokenizer),
    "bytes": (ByteTokenizer, transformers.ByT5Tokenizer),
}


@pytest.fixture(scope="session", params=KINDS)
def pair(request: pytest.FixtureRequest, directories: dict[str, Path]) -> tuple[Tokenizer, Any]:
    """Our tokenizer and that of transformers, from the same directory."""
    ours, theirs = KINDS[request.param]
    tokenizer = load_tokenizer(directories[request.param])
    assert isinstance(tokenizer, ours)
    return tokenizer, theirs.from_pretrained(directories[request.param])


def assert_same(text: str, ours: Tokenizer, theirs: Any) -> None:
    ids = theirs(text).input_ids
    assert ours.encode(text) == ids
    for skip in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special=skip) == expected


@pytest.mark.parametrize("text", NASTY, ids=lambda text: ascii(text)[:20])
def test_difficult_text_equals_transformers(text: str, pair: tuple[Tokenizer, Any]) -> None:
    assert_same(text, *pair)


@examples
@given(text=TEXTS)
def test_random_text_equals_transformers(text: str, pair: tuple[Tokenizer, Any]) -> None:
    assert_same(text, *pair)


@examples
@given(numbers=st.lists(st.integers(0, 10**6)))
def test_decoding_random_ids_equals_transformers(numbers: list[int], pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    ids = [number % ours.size for number in numbers]  # such as an untrained model generates
    for skip in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special=skip) == expected


def test_vocabulary_equals_transformers(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    assert (ours.size, ours.pad_id, ours.eos_id, ours.unk_id) == (len(theirs), 0, 1, 2)
    for id in (0, 1, 2, ours.size - 1):
        assert ours.token(id) == theirs.convert_ids_to_tokens(id)
    assert (ours.token(ours.size), ours.token(-100)) == (f"<{ours.size}>", "<-100>")


@pytest.mark.parametrize("kind", ["json", "spiece"])
def test_sentinels_of_t5_descend_from_the_end(kind: str, directories: dict[str, Path]) -> None:
    ours = load_tokenizer(directories[kind])
    assert ours is not None
    assert ours.sentinels == tuple(range(ours.size - 1, ours.size - 101, -1))
    assert [ours.token(id) for id in ours.sentinels] == [f"<extra_id_{k}>" for k in range(100)]


def test_sentinels_of_byt5_are_those_of_google() -> None:
    assert ByteTokenizer.sentinels[:3] == (258, 257, 256)
    all_characters = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    assert not {id - 3 for id in ByteTokenizer.sentinels[:11]} & set(all_characters.encode())


@pytest.mark.parametrize("specials", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_batch_equals_encoding_one_by_one(pair: tuple[Tokenizer, Any], eos: bool, specials: bool) -> None:
    ours = pair[0]
    assert ours.encode_batch(NASTY, eos, specials) == [ours.encode(text, eos, specials) for text in NASTY]
    assert ours.encode_batch([]) == []


def with_added(tokens: dict[int, Any]) -> dict[str, bytes]:
    return {"tokenizer_config.json": json.dumps({"added_tokens_decoder": tokens}).encode()}


SEP = {700: {"content": "<sep>", "lstrip": True, "rstrip": True}}
END = {1: {"content": "<end>"}}  # ByT5's eos under a name that is not a special token


@pytest.fixture(scope="session", params=["json", "spiece", "bytes", "mt5", "spiece and more", "bytes and more"])
def any_tokenizer(
    request: pytest.FixtureRequest, directories: dict[str, Path], multilingual: Path, spiece: bytes
) -> Tokenizer:
    """Each kind of tokenizer, and some with added tokens that are also recognised in ordinary text."""
    if request.param == "spiece and more":
        return SentencePieceTokenizer({"spiece.model": spiece, **with_added(SEP)})
    if request.param == "bytes and more":
        return ByteTokenizer(with_added(SEP | END))
    tokenizer = load_tokenizer({**directories, "mt5": multilingual}[request.param])
    assert tokenizer is not None
    return tokenizer


BITS = st.sampled_from([*LITERALS, "<sep>", "<end>", "<se", "p>", "＜extra_id_1＞", " ", "😀", "the "])


@examples
@given(texts=st.lists(st.one_of(TEXTS, st.lists(BITS).map("".join)), max_size=6))
@example(texts=[])
@example(texts=["", ""])
@example(texts=NASTY)
@example(texts=LITERALS)
@example(texts=["a <se", "p> b", "", "a<end>", "<end>", "<end> <sep> "])
def test_arrays_equal_the_batch(texts: list[str], any_tokenizer: Tokenizer) -> None:
    rows = any_tokenizer.encode_batch(texts, eos=True, specials=False)
    assert rows == [any_tokenizer.encode(text, eos=True, specials=False) for text in texts]
    for dtype in (np.dtype(np.uint16), np.dtype(np.uint32)):
        tokens, lengths = any_tokenizer.encode_arrays(texts, dtype)
        assert (tokens.dtype, lengths.dtype) == (dtype, np.int64)
        assert lengths.tolist() == [len(row) for row in rows]
        assert tokens.tolist() == [id for row in rows for id in row]


def test_arrays_add_no_second_eos() -> None:
    tokens, lengths = ByteTokenizer(with_added(END)).encode_arrays(["a<end>", "a"], np.dtype(np.uint16))
    assert (tokens.tolist(), lengths.tolist()) == ([100, 1, 100, 1], [2, 2])


@examples
@given(text=TEXTS)
def test_ordinary_text_yields_no_special_ids(text: str, pair: tuple[Tokenizer, Any]) -> None:
    ours = pair[0]
    ids = ours.encode(text, eos=False, specials=False)
    special_ids = {ours.encode(literal, eos=False)[0] for literal in LITERALS} - {ours.unk_id}
    assert not special_ids & set(ids)
    if isinstance(ours, ByteTokenizer):
        assert ours.decode(ids) == text


def test_ordinary_text_is_segmented_as_by_google(spiece: bytes, directories: dict[str, Path]) -> None:
    google = sentencepiece.SentencePieceProcessor(model_proto=spiece)
    texts = [*NASTY, *LITERALS, "".join(LITERALS), "a <pad> b</s><extra_id_3>, c"]
    for kind in ("json", "spiece"):
        ours = load_tokenizer(directories[kind])
        assert ours is not None
        assert ours.encode_batch(texts, eos=False, specials=False) == google.encode(texts)
        assert ours.decode(ours.encode("a <pad> b</s>.", specials=False)) == "a <pad> b</s>."


def test_ids_outside_the_vocabulary_decode_to_nothing(pair: tuple[Tokenizer, Any]) -> None:
    ours = pair[0]
    ids = ours.encode("Hello, world", eos=False)
    assert ours.decode([-100, *ids, ours.size, ours.size + 27, 10**6]) == ours.decode(ids)


def test_copied_files_load_as_the_same_tokenizer(pair: tuple[Tokenizer, Any], tmp_path: Path) -> None:
    ours, theirs = pair
    write(tmp_path, ours.files)
    reloaded, reference = load_tokenizer(tmp_path), type(theirs).from_pretrained(tmp_path)
    assert reloaded is not None
    assert reloaded.encode_batch(NASTY) == ours.encode_batch(NASTY) == [reference(text).input_ids for text in NASTY]
    assert reloaded.files == ours.files


def test_pickled_tokenizer_is_equal(pair: tuple[Tokenizer, Any]) -> None:
    ours = pair[0]
    ours.encode("a <pad>", specials=False)
    unpickled = pickle.loads(pickle.dumps(ours))
    for specials in (True, False):
        assert unpickled.encode_batch(NASTY, specials=specials) == ours.encode_batch(NASTY, specials=specials)
    ids = ours.encode("a <extra_id_0>")
    assert unpickled.decode(ids) == ours.decode(ids)


# mT5


def test_rare_characters_are_bytes_in_mt5(multilingual: Path) -> None:
    # As in SentencePiece and transformers 4; in transformers 5 they become <unk>.
    ours = load_tokenizer(multilingual)
    google = sentencepiece.SentencePieceProcessor(model_file=str(multilingual / "spiece.model"))
    assert isinstance(ours, SentencePieceTokenizer)
    for text in ("你好，世界", "😀 hi 👩‍👩‍👧", "a\x00b", "<0x41>", "a\x85b"):
        ids = ours.encode(text)
        assert ids == [*google.encode(text), 1]
        assert ours.decode(ids) == google.decode(ids)
    assert ours.token(google.piece_to_id("<0xE4>")) == "<0xE4>"
    assert ours.decode([google.piece_to_id("<0xE4>")]) == "\ufffd"


@pytest.mark.parametrize("text", [text for text in NASTY if text.isascii() and "\x00" not in text and "0x" not in text])
def test_mt5_equals_transformers(text: str, multilingual: Path) -> None:
    ours = load_tokenizer(multilingual)
    assert ours is not None
    assert_same(text, ours, transformers.T5Tokenizer.from_pretrained(multilingual))


def test_sentinels_of_mt5_are_pieces(multilingual: Path) -> None:
    ours = load_tokenizer(multilingual)
    assert ours is not None
    assert [ours.token(id) for id in ours.sentinels] == [f"▁<extra_id_{k}>" for k in range(20)]
    assert ours.encode("a <extra_id_3>", eos=False)[-1] == ours.sentinels[3]
    ids = ours.encode("<extra_id_3> a <extra_id_13>", specials=False)
    assert not set(ids) & set(ours.sentinels)
    assert ours.decode(ids) == "<extra_id_3> a <extra_id_13>"
    # No second set of sentinels is appended, even without a tokenizer_config.json.
    bare = SentencePieceTokenizer({"spiece.model": ours.files["spiece.model"]})
    assert (bare.size, bare.sentinels) == (ours.size, ours.sentinels)


def test_mt5_as_tokenizer_json(multilingual: Path, tmp_path: Path) -> None:
    transformers.T5Tokenizer.from_pretrained(multilingual).save_pretrained(tmp_path)
    slow, fast = load_tokenizer(multilingual), load_tokenizer(tmp_path)
    assert slow is not None
    assert isinstance(fast, JsonTokenizer)
    assert (fast.size, fast.sentinels) == (slow.size, slow.sentinels)
    ids = fast.encode("<extra_id_3> a <extra_id_13>", specials=False)
    assert not set(ids) & set(fast.sentinels)
    assert fast.decode(ids) == "<extra_id_3> a <extra_id_13>"


# Tokenizer directories


def test_user_defined_tokens(spiece: bytes, tmp_path: Path) -> None:
    config = {
        "extra_ids": 100,
        "additional_special_tokens": [*(f"<extra_id_{k}>" for k in range(100)), "<mask>"],
    }
    config |= {"tokenizer_class": "T5Tokenizer"}
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {"<sep>": 700, "<mask>": 701, "<sep>>": 702}
    decoder = {str(id): {"content": name, "special": name == "<mask>", **flags} for name, id in added.items()}
    legacy = {"spiece.model": spiece, "added_tokens.json": added, "tokenizer_config.json": config}
    current = {"spiece.model": spiece, "tokenizer_config.json": {**config, "added_tokens_decoder": decoder}}
    for name, files in {"legacy": legacy, "current": current}.items():
        ours = load_tokenizer(write(tmp_path / name, files))
        theirs = transformers.T5Tokenizer.from_pretrained(tmp_path / name)
        assert ours is not None
        assert (ours.size, ours.sentinels[0]) == (703, 699)
        for text in ("a <sep> b", "a<sep>b<mask>", "<mask> <extra_id_0><sep>", "a<sep>>b"):
            assert_same(text, ours, theirs)
        ids = ours.encode("a<sep><mask>", specials=False)
        assert 700 in ids
        assert 701 not in ids


@pytest.mark.parametrize("as_written", [str, lambda name: {"content": name, "lstrip": False, "rstrip": False}])
def test_special_tokens_are_names_or_dictionaries(
    as_written: Callable[[str], Any], directories: dict[str, Path], tmp_path: Path
) -> None:
    names = {"pad_token": as_written("</s>"), "eos_token": as_written("<extra_id_4>")}
    for kind in ("json", "spiece"):
        files = {path.name: path.read_bytes() for path in directories[kind].iterdir()}
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        for extra in ({"tokenizer_config.json": {**config, **names}}, {"special_tokens_map.json": names}):
            ours = load_tokenizer(write(tmp_path / f"{kind} {len(extra)} {[*extra]}", {**files, **extra}))
            assert ours is not None
            assert (ours.pad_id, ours.eos_id) == (1, ours.sentinels[4])
            assert ours.encode("a")[-1] == ours.sentinels[4]


def byt5_configs() -> dict[str, dict[str, Any]]:
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": True,
        "__type": "AddedToken",
    }
    tokens = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    google: dict[str, Any] = {role: {"content": name, **flags} for role, name in tokens.items()}
    google |= {"extra_ids": 125, "additional_special_tokens": [f"<extra_id_{k}>" for k in range(125)]}
    return {"bare": {}, "none": {"extra_ids": 0}, "names": tokens, "google": google}


@pytest.mark.parametrize("config", byt5_configs().values(), ids=byt5_configs())
def test_byt5_configs_equal_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    config |= {"tokenizer_class": "ByT5Tokenizer"}
    ours = load_tokenizer(write(tmp_path, {"tokenizer_config.json": config}))
    theirs = transformers.ByT5Tokenizer.from_pretrained(tmp_path)
    assert isinstance(ours, ByteTokenizer)
    assert ours.size == len(theirs)
    for text in NASTY:
        assert_same(text, ours, theirs)


def test_byte_tokenizer_without_files(tmp_path: Path) -> None:
    ours = ByteTokenizer()
    assert ours.size == 384
    assert ours.encode("é <pad>", specials=False) == [198, 172, 35, 63, 115, 100, 103, 65, 1]
    assert [ours.token(id) for id in (0, 3, 35, 68, 258, 259)] == [
        "<pad>",
        "<0x00>",
        " ",
        "A",
        "<0xFF>",
        "<extra_id_0>",
    ]
    theirs = transformers.AutoTokenizer.from_pretrained(write(tmp_path, ours.files))
    assert isinstance(theirs, transformers.ByT5Tokenizer)
    assert_same("x <extra_id_0> y", ours, theirs)


def test_text_is_never_truncated_or_padded(directories: dict[str, Path], tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in directories["json"].iterdir()}
    spec = json.loads(files["tokenizer.json"])
    spec["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    pad = {"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}
    spec["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, **pad}
    ours, unlimited = load_tokenizer(write(tmp_path, {**files, "tokenizer.json": spec})), JsonTokenizer(files)
    assert ours is not None
    for specials in (True, False):
        assert ours.encode_batch(NASTY, specials=specials) == unlimited.encode_batch(NASTY, specials=specials)


def test_tokenizer_json_is_preferred(directories: dict[str, Path], spiece: bytes, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in directories["json"].iterdir()} | {"spiece.model": spiece}
    ours = load_tokenizer(write(tmp_path, files))
    assert isinstance(ours, JsonTokenizer)
    assert ours.files == files


def test_directory_without_tokenizer_gives_none(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": {"model_type": "t5"}})
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(tmp_path / "missing") is None


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 791656\n"


@pytest.mark.parametrize("content", [b"", POINTER, b"[1, 2]", b"\xff\xfe\x00"])
@pytest.mark.parametrize("name", ["tokenizer.json", "spiece.model", "tokenizer_config.json", "special_tokens_map.json"])
def test_corrupt_files_are_named(name: str, content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{name}: expected .*, got {len(content)} bytes .*; download") as error:
        load_tokenizer(write(tmp_path, {name: content}))
    assert str(tmp_path) in str(error.value)


def test_unsupported_directories_say_what_is_expected(spiece: bytes, tmp_path: Path) -> None:
    incomplete = write(tmp_path / "gpt2", {"vocab.json": {}})
    with pytest.raises(ValueError, match=r"expected tokenizer\.json, .*got only vocab\.json"):
        load_tokenizer(incomplete)
    names = write(tmp_path / "names", {"spiece.model": spiece, "tokenizer_config.json": {"pad_token": "[PAD]"}})
    with pytest.raises(ValueError, match=r"got \[PAD\]: None, </s>: 1; set pad_token"):
        load_tokenizer(names)


def test_gpt2_vocab_and_merges_equal_transformers(tmp_path: Path) -> None:
    """vocab.json and merges.txt without a tokenizer.json; the only special token is also the pad token."""
    from tokenizers import ByteLevelBPETokenizer

    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(
        ["the cat sat on the mat, naïve café 日本"] * 4, 300, 1, special_tokens=["<|endoftext|>"]
    )
    backend.save_model(str(tmp_path))
    theirs = transformers.GPT2Tokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    assert ours.pad_id == ours.eos_id == theirs.convert_tokens_to_ids("<|endoftext|>")
    for text in ("the cat sat", " naïve  café\n日本 x", "", "mat<|endoftext|>the", "don't 12,5"):
        ids = ours.encode(text, eos=False)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    with pytest.raises(ValueError, match=r"merges\.txt: expected pairs of pieces"):
        load_tokenizer(write(tmp_path, {"merges.txt": b"qq zz\n"}))


def test_importing_the_module_imports_no_library() -> None:
    heavy = {"tokenizers", "sentencepiece", "transformers", "torch", "jax", "numpy"}
    code = f"import sys, flaxen.data.tokenizers; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
