"""Vocabularies out of text: SentencePiece's models, T5's unigram or BPE, and byte-level BPE."""

import io
import json
import random
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, Literal

from flaxen.data.tokenizers import Files
from flaxen.errors import InputError

ModelType = Literal["unigram", "bpe"]
SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}  # ids 0, 1, 2
# What SentencePiece reads at a time. It drops what is longer than 4192 bytes, and takes 22 bytes of memory for a
# character of its sample: a million web pages would take 50 GB, a million of these take 6 at most. No piece spans a
# space, so cutting there changes no count; text without spaces is cut anywhere.
SENTENCE = re.compile(r"\S.{0,255}(?!\S)|\S{1,256}", re.DOTALL)
# A piece of that name would be a second token, and a sentence with U+2585 is dropped: the trainer's mark for "unknown".
RESERVED = re.compile(r"<pad>|</s>|<unk>|<extra_id_\d+>|\u2585")


def train_sentencepiece(
    texts: Iterable[str],
    size: int,
    sentinels: int = 100,
    coverage: float = 0.9995,
    byte_fallback: bool = False,
    sample: int = 1_000_000,
    model_type: ModelType = "unigram",
) -> Files:
    """A SentencePiece model of `size` ids, sentinels included, from `sample` sentences (256 characters at most)."""
    import sentencepiece

    if not 0.98 <= coverage <= 1:
        raise InputError(f"coverage must be from 0.98 to 1 (of the text's characters), got {coverage}")
    if sample <= 100:
        raise InputError(f"sample must be over 100 sentences, got {sample}")
    n_pieces = _without_sentinels(size, sentinels, 256 if byte_fallback else 0)
    failures: list[BaseException] = []

    def sentences() -> Iterator[str]:
        try:
            yield from _in_sentences(texts)
        except (Exception, KeyboardInterrupt) as error:
            failures.append(error)  # the trainer would keep its text only
            raise

    model = io.BytesIO()
    sentencepiece.set_random_generator_seed(0)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_begun(sentences()),
            model_writer=model,
            model_type=model_type,
            vocab_size=n_pieces,
            character_coverage=coverage,
            byte_fallback=byte_fallback,
            input_sentence_size=sample,
            shuffle_input_sentence=True,
            num_threads=16,  # not the machine's: sums in another order give other scores
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            pad_piece="<pad>",
            eos_piece="</s>",
            unk_piece="<unk>",
            minloglevel=2,
        )
    except RuntimeError as error:
        if failures:
            raise failures[0] from None
        raise _explained(str(error), size, sentinels) from None
    settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": sentinels}
    return {"spiece.model": model.getvalue(), **_settings(settings, sentinels)}


def train_bpe(texts: Iterable[str], size: int, sentinels: int = 100) -> Files:
    """A byte-level BPE vocabulary of `size` ids, sentinels included; any text decodes to itself."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    n_pieces = _without_sentinels(size, sentinels, 256)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_pieces,
        min_frequency=2,  # what occurs once is no pattern
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_begun(iter(texts)), trainer)
    if backend.get_vocab_size() < n_pieces:
        raise _too_large(size, backend.get_vocab_size() + sentinels)
    # T5's order: <extra_id_0> is the last id.
    names = [f"<extra_id_{k}>" for k in reversed(range(sentinels))]
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B:1 </s>:1", special_tokens=[("</s>", 1)]
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    return {"tokenizer.json": backend.to_str(pretty=True).encode(), **_settings(settings, sentinels)}


def _in_sentences(texts: Iterable[str]) -> Iterator[str]:
    """Pieces of the texts that SentencePiece takes, mixed."""
    found = (match[0] for text in texts for match in SENTENCE.finditer(RESERVED.sub(" ", text)))
    # The order changes nothing but the time: where documents repeat, so do their sentences one after the other, and
    # the trainer looks at every such run. (Twelve seconds instead of one for half a megabyte of Python's help.)
    draw = random.Random(0)
    while some := list(islice(found, 10_000)):
        draw.shuffle(some)
        yield from some


def _begun(texts: Iterator[str]) -> Iterator[str]:
    """The same, if there are any."""
    first = next(texts, None)
    if first is None:
        raise InputError("expected text to train a vocabulary on, got none; check the files, the column and the split")
    return chain([first], texts)


def _without_sentinels(size: int, sentinels: int, n_bytes: int) -> int:
    if sentinels < 0:
        raise InputError(f"sentinels must be at least 0, got {sentinels}")
    least = sentinels + len(SPECIAL) + n_bytes + 1
    if size < least:
        parts = f"{sentinels} sentinels, {len(SPECIAL)} special tokens" + (", 256 bytes" if n_bytes else "")
        raise InputError(f"size must be at least {least}: it counts {parts} and the pieces of text; got {size}")
    return size - sentinels


def _explained(message: str, size: int, sentinels: int) -> InputError:
    """The trainer's error in terms of the options here."""
    if found := re.search(r"too high .* <= (\d+)", message):
        return _too_large(size, int(found[1]) + sentinels)
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return InputError(
            f"size must be at least {int(found[1]) + sentinels:,} for the characters of this text, got {size:,}; "
            "set a larger size, or a smaller coverage"
        )
    if "required_chars_.empty()" in message:
        return InputError("expected text to train a vocabulary on, got only white space and control characters")
    return InputError(f"SentencePiece cannot train on this text: {message}")


def _too_large(size: int, largest: int) -> InputError:
    return InputError(
        f"the text is too small for size {size:,}: it allows {largest:,} ids at most; set a smaller size, or give more "
        "text"
    )


def _settings(settings: dict[str, Any], sentinels: int) -> Files:
    named = {**SPECIAL, "additional_special_tokens": [f"<extra_id_{k}>" for k in range(sentinels)]}
    # Cleaning up would take away the space before a full stop.
    config = {**settings, **named, "clean_up_tokenization_spaces": False}
    tables = {"tokenizer_config.json": config, "special_tokens_map.json": named}
    return {name: (json.dumps(table, indent=2) + "\n").encode() for name, table in tables.items()}
