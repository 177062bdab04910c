"""Tokenize a text file to disk: with Flaxen's token store, or with `datasets` as in run_t5_mlm_flax.py."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from measure import emit, pin, timed

LENGTH = 568  # tokens of text per example with an input length of 512
LIBRARIES = {
    "datasets": ("datasets", "transformers", "tokenizers"),
    "flaxen": ("flaxen", "sentencepiece"),
    "flaxen-json": ("flaxen", "tokenizers"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=list(LIBRARIES))
    parser.add_argument("--text", type=Path)
    parser.add_argument("--vocabulary", type=Path)
    parser.add_argument("--scratch", type=Path, help="an empty directory")
    parser.add_argument("--pin", type=int, nargs="+", metavar="CORE")
    flags = parser.parse_args()
    pin(flags.pin)
    # Imports and loading the tokenizer are not timed.
    prepare = with_datasets if flags.system == "datasets" else with_flaxen
    build, count = prepare(flags.text, flags.vocabulary, flags.scratch, flags.system == "flaxen-json")
    figures = timed(build)
    result = figures.pop("result")
    emit(**figures, **count(result), megabytes=flags.text.stat().st_size / 1e6)
    emit(versions={name: version(name) for name in LIBRARIES[flags.system]})


# The function to time, and an untimed function that counts the tokens of its result.
System = tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]


def with_flaxen(text: Path, vocabulary: Path, scratch: Path, json: bool) -> System:
    from flaxen.data.corpus import Corpus
    from flaxen.data.store import open_store
    from flaxen.data.tokenizers import load_tokenizer

    if json:  # the same vocabulary with the `tokenizers` library, which transformers uses
        from transformers import T5TokenizerFast

        T5TokenizerFast.from_pretrained(vocabulary).save_pretrained(scratch / "json")
        vocabulary = scratch / "json"
    tokenizer = load_tokenizer(vocabulary)
    assert tokenizer is not None
    source = Corpus(train=(str(text),)).train_source()
    return (
        lambda: open_store(source, tokenizer, scratch / "store", progress=False),
        lambda store: {"tokens": store.n_tokens, "kept": store.n_tokens // LENGTH * LENGTH},
    )


def with_datasets(text: Path, vocabulary: Path, scratch: Path, json: bool) -> System:
    os.environ["HF_DATASETS_CACHE"] = str(scratch / "datasets")
    import datasets
    from transformers import T5TokenizerFast

    datasets.disable_progress_bars()
    tokenizer = T5TokenizerFast.from_pretrained(vocabulary)
    if not tokenizer.is_fast:
        raise SystemExit(f"expected a fast tokenizer, got {type(tokenizer).__name__}")

    def tokenize(rows: dict[str, list[str]]) -> Any:
        return tokenizer(rows["text"], return_attention_mask=False)

    def group(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        """Concatenate a thousand documents and split them into rows of equal length; the remainder is dropped."""
        ids = list(chain(*rows["input_ids"]))
        used = len(ids) // LENGTH * LENGTH if len(ids) >= LENGTH else len(ids)
        return {"input_ids": [ids[first : first + LENGTH] for first in range(0, used, LENGTH)]}

    def build() -> dict[str, dict[str, Any]]:
        read = timed(lambda: datasets.load_dataset("text", data_files=str(text), split="train"))
        tokenized = timed(lambda: read["result"].map(tokenize, batched=True, remove_columns=["text"]))
        grouped = timed(lambda: tokenized["result"].map(group, batched=True))
        return {"read": read, "tokenize": tokenized, "group": grouped}

    def count(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
        tokens = {name: sum(map(len, parts[name]["result"]["input_ids"])) for name in ("tokenize", "group")}
        seconds = {name: part["cpu"] for name, part in parts.items()}
        return {"tokens": tokens["tokenize"], "kept": tokens["group"], "parts": seconds}

    return build, count


if __name__ == "__main__":
    main()
