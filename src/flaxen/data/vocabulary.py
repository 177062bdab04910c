"""Train vocabularies on text: SentencePiece (unigram as in T5, or BPE) and byte-level BPE."""

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
# Texts are cut into sentences of at most 256 characters. SentencePiece drops sentences longer than 4192 bytes, and
# needs 22 bytes of memory per character of its sample: a million web pages would take 50 GB, a million such sentences
# take at most 6 GB. No piece spans a space, so cutting at spaces changes no count; text without spaces is cut anywhere.
SENTENCE = re.compile(r"\S.{0,255}(?!\S)|\S{1,256}", re.DOTALL)
# Removed from the text: a piece named like a special token would be a second token of that name, and SentencePiece
# drops sentences with U+2585, its mark for unknown characters.
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
    """Train a SentencePiece model with `size` ids, sentinels included, on a random sample of `sample` sentences."""
    import sentencepiece

    if not 0.98 <= coverage <= 1:
        raise InputError(f"coverage must be between 0.98 and 1 (fraction of the text's characters), got {coverage}")
    if sample <= 100:
        raise InputError(f"sample must be at least 101 sentences, got {sample}")
    n_pieces = _count_pieces(size, sentinels, 256 if byte_fallback else 0)
    failures: list[BaseException] = []

    def sentences() -> Iterator[str]:
        try:
            yield from _split_sentences(texts)
        except (Exception, KeyboardInterrupt) as error:
            failures.append(error)  # kept, because the trainer's own RuntimeError contains only the message
            raise

    model = io.BytesIO()
    sentencepiece.set_random_generator_seed(0)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_require_text(sentences()),
            model_writer=model,
            model_type=model_type,
            vocab_size=n_pieces,
            character_coverage=coverage,
            byte_fallback=byte_fallback,
            input_sentence_size=sample,
            shuffle_input_sentence=True,
            num_threads=16,  # fixed: the number of threads changes the order of sums, and so the model
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
        raise _explain(str(error), size, sentinels) from None
    settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": sentinels}
    return {"spiece.model": model.getvalue(), **_settings(settings, sentinels)}


def train_bpe(texts: Iterable[str], size: int, sentinels: int = 100) -> Files:
    """Train a byte-level BPE vocabulary with `size` ids, sentinels included; it encodes any text without loss."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    n_pieces = _count_pieces(size, sentinels, 256)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_pieces,
        min_frequency=2,  # merge only pairs that occur more than once
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_require_text(iter(texts)), trainer)
    if backend.get_vocab_size() < n_pieces:
        raise _too_large(size, backend.get_vocab_size() + sentinels)
    # As in T5, sentinels are numbered from the end: <extra_id_0> is the last id.
    names = [f"<extra_id_{k}>" for k in reversed(range(sentinels))]
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B:1 </s>:1", special_tokens=[("</s>", 1)]
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    return {"tokenizer.json": backend.to_str(pretty=True).encode(), **_settings(settings, sentinels)}


def _split_sentences(texts: Iterable[str]) -> Iterator[str]:
    """Split texts into sentences that SentencePiece accepts, and shuffle them."""
    sentences = (match[0] for text in texts for match in SENTENCE.finditer(RESERVED.sub(" ", text)))
    # Shuffling changes only the speed: the trainer is slow on long repetitions, which repeated documents produce if
    # their sentences stay in order (twelve seconds instead of one for half a megabyte of Python's help).
    rng = random.Random(0)
    while block := list(islice(sentences, 10_000)):
        rng.shuffle(block)
        yield from block


def _require_text(texts: Iterator[str]) -> Iterator[str]:
    """Return an iterator over the same texts; raise if there are none."""
    first = next(texts, None)
    if first is None:
        raise InputError("expected text to train a vocabulary on, got none; check the files, the column and the split")
    return chain([first], texts)


def _count_pieces(size: int, sentinels: int, n_bytes: int) -> int:
    """Return the number of ids that remain after the sentinels are subtracted; raise if it is too small to train."""
    if sentinels < 0:
        raise InputError(f"sentinels must be at least 0, got {sentinels}")
    smallest = sentinels + len(SPECIAL) + n_bytes + 1
    if size < smallest:
        parts = f"{sentinels} sentinels, {len(SPECIAL)} special tokens" + (", 256 bytes" if n_bytes else "")
        raise InputError(f"size must be at least {smallest} ({parts} and one piece of text), got {size}")
    return size - sentinels


def _explain(message: str, size: int, sentinels: int) -> InputError:
    """Translate an error from the SentencePiece trainer into terms of our options."""
    if match := re.search(r"too high .* <= (\d+)", message):
        return _too_large(size, int(match[1]) + sentinels)
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return InputError(
            f"size must be at least {int(match[1]) + sentinels:,} for the characters of this text, got {size:,}; "
            "increase the size, or reduce the coverage"
        )
    if "required_chars_.empty()" in message:
        return InputError("expected text to train a vocabulary on, got only whitespace and control characters")
    return InputError(f"SentencePiece cannot train on this text: {message}")


def _too_large(size: int, largest: int) -> InputError:
    """Build the error for a vocabulary larger than the text allows."""
    return InputError(
        f"there is not enough text for size {size:,}: it allows at most {largest:,} ids; "
        "reduce the size or add more text"
    )


def _settings(settings: dict[str, Any], sentinels: int) -> Files:
    """Build the files that transformers needs in addition to a vocabulary."""
    special = {**SPECIAL, "additional_special_tokens": [f"<extra_id_{k}>" for k in range(sentinels)]}
    # With clean-up, transformers would remove the space before a full stop when decoding.
    config = {**settings, **special, "clean_up_tokenization_spaces": False}
    tables = {"tokenizer_config.json": config, "special_tokens_map.json": special}
    return {name: (json.dumps(table, indent=2) + "\n").encode() for name, table in tables.items()}
