"""Tokenizers: convert text to token ids and back, with tokenizer.json, spiece.model, or plain bytes (ByT5)."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from flaxen.errors import InputError

if TYPE_CHECKING:
    import numpy

# Tokenizer files of a Hugging Face directory. Saving a model copies all of them unchanged.
VOCABULARIES = ("tokenizer.json", "spiece.model", "vocab.json", "merges.txt")
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
END_OF_TEXT = "<|endoftext|>"
Files = dict[str, bytes]
Segment = Callable[[list[str]], list[list[int]]]
Arrays = tuple[
    "numpy.ndarray", "numpy.ndarray"
]  # the concatenated tokens of all texts, and the number of tokens of each


@runtime_checkable
class Tokenizer(Protocol):
    """The interface that data loading and generation use."""

    size: int  # ids are 0 … size-1, sentinels included; a model's embedding may have more rows
    pad_id: int
    eos_id: int
    unk_id: int | None
    sentinels: tuple[int, ...]  # ids that replace the first noise span, the second, … in span corruption
    files: Files  # file name to contents; written to a directory, they load as the same tokenizer

    def encode(self, text: str, eos: bool = True, specials: bool = True) -> list[int]:
        """Encode a text; with `specials=False`, a literal "<pad>" in it is ordinary text."""

    def encode_batch(self, texts: Sequence[str], eos: bool = True, specials: bool = True) -> list[list[int]]:
        """Encode each text, faster than one by one."""

    def encode_arrays(self, texts: Sequence[str], dtype: "numpy.dtype") -> Arrays:
        """Encode texts as NumPy arrays, with eos and `specials=False`."""

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Decode ids to text, ignoring ids outside the vocabulary (padded embedding rows, -100)."""

    def token(self, id: int) -> str:
        """Return one id as a readable piece, for display."""


class JsonTokenizer:
    """Tokenizer defined by a tokenizer.json, run by the `tokenizers` library."""

    # transformers 5 rebuilds T5's pipeline instead of running the one in this file, and therefore splits at U+0085.
    # SentencePiece, transformers 4 and the file itself treat it as an unknown character.

    def __init__(self, files: Files) -> None:
        self.files = files
        self._backend = _load_json(files["tokenizer.json"])
        self.pad_id, self.eos_id, self.unk_id = _role_ids(files, self._backend.token_to_id)
        self.sentinels = _sentinels(self._backend.token_to_id)
        self._added = self._backend.get_added_tokens_decoder()
        # The library counts tokens; if ids have gaps, the largest id is beyond that count.
        self.size = max(self._backend.get_vocab_size(), 1 + max(self._added, default=-1))

    @cached_property
    def _plain(self) -> Any:
        """A copy of the tokenizer that treats special tokens in the text as ordinary text."""
        # T5's special tokens are also pieces of its Unigram model, which finds them even if `tokenizers` does not look
        # for them. They are renamed to strings that no text contains, which preserves their ids.
        special = [id for id, token in self._added.items() if token.special]
        names = {self.token(id) for id in (*special, *self.sentinels, self.pad_id, self.eos_id)}
        renamed = {name: f"\uffff {name}" for name in names}
        spec = json.loads(self.files["tokenizer.json"])
        if isinstance(spec["model"]["vocab"], list):
            for entry in spec["model"]["vocab"]:
                entry[0] = renamed.get(entry[0], entry[0])
            for token in spec["added_tokens"]:
                token["content"] = renamed.get(token["content"], token["content"])
        backend = _load_json(json.dumps(spec).encode())
        backend.encode_special_tokens = True
        return backend

    def encode(self, text: str, eos: bool = True, specials: bool = True) -> list[int]:
        return self.encode_batch([text], eos, specials)[0]

    def encode_batch(self, texts: Sequence[str], eos: bool = True, specials: bool = True) -> list[list[int]]:
        backend = self._backend if specials else self._plain
        rows = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [row.ids + [self.eos_id] * eos for row in rows]

    def encode_arrays(self, texts: Sequence[str], dtype: "numpy.dtype") -> Arrays:
        return _arrays(self.encode_batch(texts, specials=False), dtype)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        valid = [int(id) for id in ids if 0 <= id < self.size]
        return self._backend.decode(valid, skip_special_tokens=skip_special)

    def token(self, id: int) -> str:
        return (self._backend.id_to_token(id) if id >= 0 else None) or f"<{id}>"


class SentencePieceTokenizer:
    """Tokenizer defined by a spiece.model, with T5's extra ids after its pieces."""

    # Segments text as Google's code and transformers 4 do. transformers 5 rebuilds the model in `tokenizers`, where mT5
    # loses its byte fallback (a rare character becomes <unk>, a literal "<0x41>" becomes the byte), U+0085 counts as a
    # space, and the choice among almost equally likely segmentations may differ.

    def __init__(self, files: Files) -> None:
        from sentencepiece import SentencePieceProcessor

        self.files = files
        self._model = SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(files["spiece.model"])
        except RuntimeError as error:
            raise _corrupt("spiece.model", "a SentencePiece model", files["spiece.model"]) from error
        # mT5's model contains its sentinels as pieces; T5's are appended after its pieces, the last one first.
        settings, n_pieces = _settings(files), len(self._model)
        n_extra = settings.get("extra_ids", 100 if self._piece_id("▁<extra_id_0>") is None else 0)
        named = [(self._piece_id(token["content"]), token) for token in _special_tokens(settings)]
        tokens = {id: token for id, token in named if id is not None}
        tokens |= {n_pieces + n_extra - 1 - k: _extra_id(k) for k in range(n_extra)}
        self._added = AddedTokens(files, tokens)
        self.size = max(n_pieces, 1 + max(self._added.names))
        self.pad_id, self.eos_id, self.unk_id = _role_ids(files, self._id)
        self.sentinels = _sentinels(self._id)
        # mT5 also finds its sentinel pieces in ordinary text; these smaller pieces spell the same text.
        texts = [f"<extra_id_{k}" for k, id in enumerate(self.sentinels) if id < n_pieces]
        spellings = [[*ids, self._model.piece_to_id(">")] for ids in self._model.encode(texts)]
        self._respelled = dict(zip(self.sentinels, spellings))

    def _piece_id(self, piece: str) -> int | None:
        id = self._model.piece_to_id(piece)  # the id of <unk> if there is no such piece
        return id if self._model.id_to_piece(id) == piece else None

    def _id(self, content: str) -> int | None:
        return self._added.ids.get(content, self._piece_id(content))

    def _spelling(self, id: int) -> bytes:
        """Return the UTF-8 bytes of a piece."""
        if not 0 <= id < len(self._model):
            return b""
        piece = self._model.id_to_piece(id)
        return bytes.fromhex(piece[3:5]) if self._model.is_byte(id) else piece.replace("▁", " ").encode()

    def encode(self, text: str, eos: bool = True, specials: bool = True) -> list[int]:
        return self.encode_batch([text], eos, specials)[0]

    def encode_batch(self, texts: Sequence[str], eos: bool = True, specials: bool = True) -> list[list[int]]:
        rows = self._added.encode(texts, specials, self._model.encode)
        if self._respelled and not specials:
            for row in rows:
                if not self._respelled.keys().isdisjoint(row):
                    row[:] = [i for id in row for i in self._respelled.get(id, [id])]
        return [row + [self.eos_id] * eos for row in rows]

    def encode_arrays(self, texts: Sequence[str], dtype: "numpy.dtype") -> Arrays:
        # SentencePiece 0.2.2 can return arrays itself: 10 % faster, not worth a second code path for added tokens.
        return _arrays(self.encode_batch(texts, specials=False), dtype)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        raw = self._added.decode(ids, skip_special, self._spelling)
        return raw.decode(errors="replace").removeprefix(" ")  # the model prepends a space to every text

    def token(self, id: int) -> str:
        piece = self._model.id_to_piece(id) if 0 <= id < len(self._model) else f"<{id}>"
        return self._added.names.get(id, piece)


class ByteTokenizer:
    """Tokenizer of ByT5: pad, eos, unk, the 256 bytes, and extra ids."""

    pad_id, eos_id = 0, 1
    unk_id: int | None = 2
    # Google trained ByT5 with a vocabulary without extra ids, so its sentinels are the last ids of that vocabulary:
    # 258 (byte 0xFF), 257, … The ids of <extra_id_0> = 259, … in transformers are untrained. UTF-8 never uses the bytes
    # 0xF5 … 0xFF; from the twelfth on, sentinels share ids with bytes of text, as in Google's data.
    sentinels = tuple(range(258, 158, -1))

    def __init__(self, files: Files | None = None) -> None:
        default = b'{"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125}'
        self.files = files or {"tokenizer_config.json": default}
        settings = _settings(self.files)
        # In transformers, pad, eos and unk strip the spaces around them, unless the files say otherwise.
        named = _special_tokens(settings)[:3]
        tokens = {id: {"lstrip": True, "rstrip": True, **token} for id, token in enumerate(named)}
        tokens |= {259 + k: _extra_id(k) for k in range(settings.get("extra_ids", 125))}
        self._added = AddedTokens(self.files, tokens)
        self.size = max(259, 1 + max(self._added.names))

    @classmethod
    def plain(cls) -> "ByteTokenizer":
        """Return a tokenizer without extra ids, for byte-level language models."""
        return cls({"tokenizer_config.json": b'{"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0}'})

    def encode(self, text: str, eos: bool = True, specials: bool = True) -> list[int]:
        return self.encode_batch([text], eos, specials)[0]

    def encode_batch(self, texts: Sequence[str], eos: bool = True, specials: bool = True) -> list[list[int]]:
        rows = self._added.encode(texts, specials, lambda parts: [[b + 3 for b in p.encode()] for p in parts])
        # As in transformers: unlike T5's tokenizer, ByT5's adds no second </s> to a text that ends in one.
        return [row + [self.eos_id] * (eos and row[-1:] != [self.eos_id]) for row in rows]

    def encode_arrays(self, texts: Sequence[str], dtype: "numpy.dtype") -> Arrays:
        import numpy as np

        if self._added.pattern(texts, specials=False):
            return _arrays(self.encode_batch(texts, specials=False), dtype)
        parts = [text.encode() for text in texts]
        lengths = np.fromiter(map(len, parts), np.int64, len(parts)) + 1
        # Converted before adding 3, which would overflow a byte.
        tokens = np.frombuffer(b"\0".join([*parts, b""]), np.uint8).astype(
            dtype
        )  # one byte after each text, overwritten by eos
        tokens += 3
        tokens[np.cumsum(lengths) - 1] = self.eos_id
        return tokens, lengths

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        raw = self._added.decode(ids, skip_special, lambda id: bytes([id - 3]) if 3 <= id < 259 else b"")
        # As in transformers, where bytes that are not UTF-8 disappear.
        return raw.decode(errors="ignore")

    def token(self, id: int) -> str:
        byte = f"<0x{id - 3:02X}>" if 3 <= id < 259 else f"<{id}>"
        return self._added.names.get(id, chr(id - 3) if 35 <= id < 130 else byte)


def _arrays(rows: list[list[int]], dtype: "numpy.dtype") -> Arrays:
    """Concatenate rows of ids into one array, with the length of each row."""
    import numpy as np

    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(chain.from_iterable(rows), dtype, int(lengths.sum())), lengths


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """Load a tokenizer from a directory; None if the directory has no tokenizer files."""
    paths = [directory / name for name in VOCABULARIES + SETTINGS]
    files = {path.name: path.read_bytes() for path in paths if path.is_file()}
    if not files:
        return None
    try:
        if "tokenizer.json" in files:
            return JsonTokenizer(files)
        if "spiece.model" in files:
            return SentencePieceTokenizer(files)
        if "vocab.json" in files and "merges.txt" in files:
            return JsonTokenizer(files | {"tokenizer.json": _byte_level(files)})
        if _settings(files).get("tokenizer_class") == "ByT5Tokenizer":
            return ByteTokenizer(files)
    except ValueError as error:
        raise InputError(f"{directory}: {error}") from error
    raise InputError(
        f"{directory}: expected tokenizer.json, spiece.model, vocab.json with merges.txt, or tokenizer_class "
        "ByT5Tokenizer, got only "
        f"{', '.join(files)}; create a tokenizer.json with save_pretrained in transformers"
    )


class AddedTokens:
    """Tokens (pad, sentinels, user-defined ones) that are split off the raw text before the rest is segmented."""

    def __init__(self, files: Files, tokens: dict[int, dict[str, Any]]) -> None:
        settings = _settings(files)
        added = {id: {"content": name} for name, id in _json_object(files, "added_tokens.json").items()}
        numbered = {int(id): token for id, token in settings.get("added_tokens_decoder", {}).items()}
        self._tokens = added | tokens | numbered
        self.names: dict[int, str] = {id: token["content"] for id, token in self._tokens.items()}
        self.ids = {name: id for id, name in self.names.items()}
        names = {token["content"] for token in _special_tokens(settings)}
        special = [name for name, id in self.ids.items() if name in names or self._tokens[id].get("special")]
        self._special = {self.ids[name] for name in special}
        self._patterns = [_any_of(self.ids.keys() - special), _any_of(self.ids)]

    def pattern(self, texts: Sequence[str], specials: bool) -> re.Pattern[str] | None:
        """Return a pattern that matches the added tokens; None if none of them occurs in the texts."""
        pattern = self._patterns[specials]
        return pattern if pattern and pattern.search("".join(texts)) else None

    def encode(self, texts: Sequence[str], specials: bool, segment: Segment) -> list[list[int]]:
        """Encode each text; `segment` encodes the parts between added tokens."""
        pattern = self.pattern(texts, specials)
        if not pattern:
            return segment(list(texts))
        split_texts = [pattern.split(text) for text in texts]  # each: text, token, text, …, text
        for parts in split_texts:
            for i in range(1, len(parts), 2):
                token = self._tokens[self.ids[parts[i]]]
                parts[i - 1] = parts[i - 1].rstrip() if token.get("lstrip") else parts[i - 1]
                parts[i + 1] = parts[i + 1].lstrip() if token.get("rstrip") else parts[i + 1]
        # The parts of all texts in one call, which SentencePiece runs on all cores.
        ids = iter(segment([text for parts in split_texts for text in parts[::2]]))
        rows = [[[self.ids[part]] if i % 2 else next(ids) for i, part in enumerate(parts)] for parts in split_texts]
        return [list(chain.from_iterable(row)) for row in rows]

    def decode(self, ids: Iterable[int], skip_special: bool, spelling: Callable[[int], bytes]) -> bytes:
        """Decode ids to bytes; `spelling` returns the bytes of an id that is not an added token."""
        kept = [int(id) for id in ids if not (skip_special and id in self._special)]
        return b"".join(self.names[id].encode() if id in self.names else spelling(id) for id in kept)


def _any_of(names: Iterable[str]) -> re.Pattern[str] | None:
    """Build a pattern that matches any of the names, longer ones first; None if there are no names."""
    # A regular expression takes the first alternative that matches, not the longest.
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None


def _extra_id(k: int) -> dict[str, Any]:
    return {"content": f"<extra_id_{k}>", "special": True}


def _settings(files: Files) -> dict[str, Any]:
    """Read tokenizer_config.json; in older directories, special_tokens_map.json overrides it."""
    config = _json_object(files, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _json_object(files, "special_tokens_map.json")
    return config


def _special_tokens(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the special tokens of the settings as dictionaries: pad, eos, unk, then the others."""
    roles = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    values = [settings.get(role) or default for role, default in roles.items()]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = settings.get(key) or []
        values += tokens.values() if isinstance(tokens, dict) else tokens
    return [value if isinstance(value, dict) else {"content": value} for value in values]


def _role_ids(files: Files, lookup: Callable[[str], int | None]) -> tuple[int, int, int | None]:
    """Return the ids of pad, eos and unk."""
    names = [token["content"] for token in _special_tokens(_settings(files))[:3]]
    pad, eos, unk = map(lookup, names)
    if pad is None and lookup(END_OF_TEXT) is not None:  # GPT-2's only special token
        eos = lookup(END_OF_TEXT) if eos is None else eos
        pad = eos
    if pad is None or eos is None:
        raise InputError(
            f"expected ids for the pad and eos tokens, got {names[0]}: {pad}, {names[1]}: {eos}; "
            "set pad_token and eos_token in tokenizer_config.json to tokens of the vocabulary"
        )
    return pad, eos, unk


def _byte_level(files: Files) -> bytes:
    """Convert GPT-2's vocab.json and merges.txt to a tokenizer.json."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    vocabulary = _json_object(files, "vocab.json")
    lines = files["merges.txt"].decode("utf-8").split("\n")
    merges = [line.partition(" ")[::2] for line in lines if line and not line.startswith("#version")]
    try:
        backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the library raises nothing more specific
        raise _corrupt("merges.txt", f"pairs of pieces of vocab.json ({error})", files["merges.txt"]) from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if END_OF_TEXT in vocabulary:
        backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return backend.to_str().encode()


def _sentinels(lookup: Callable[[str], int | None]) -> tuple[int, ...]:
    """Return the ids of <extra_id_0>, <extra_id_1>, … up to the first that is missing."""
    # In mT5, the sentinels are pieces that begin a word.
    prefix = "" if lookup("▁<extra_id_0>") is None else "▁"
    ids: list[int] = []
    while (id := lookup(f"{prefix}<extra_id_{len(ids)}>")) is not None:
        ids.append(id)
    return tuple(ids)


def _load_json(content: bytes) -> Any:
    """Load a tokenizer.json, with truncation and padding turned off."""
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_buffer(content)
    except ValueError as error:
        raise _corrupt("tokenizer.json", f"a file of the tokenizers library ({error})", content) from error
    # A file saved after training may contain a length to truncate or pad to.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _json_object(files: Files, name: str) -> dict[str, Any]:
    """Parse a file that must hold a JSON object; a missing file counts as empty."""
    try:
        value = json.loads(files.get(name, b"{}"))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise _corrupt(name, "a JSON object", files[name])
    return value


def _corrupt(name: str, expected: str, content: bytes) -> ValueError:
    """Build the error for a damaged file, such as a Git LFS pointer."""
    got = f"{len(content)} bytes beginning with {content[:40]!r}"
    return ValueError(f"{name}: expected {expected}, got {got}; download the file again")
