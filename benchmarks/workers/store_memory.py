"""Measure the peak memory of building a token store from a text, and of reading random batches from it."""

from __future__ import annotations

import argparse
from pathlib import Path

from measure import emit, peak_gb, pin, timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--vocabulary", type=Path, help="default: bytes")
    parser.add_argument("--scratch", type=Path, help="an empty directory")
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--pin", type=int, nargs="+", metavar="CORE")
    flags = parser.parse_args()
    pin(flags.pin)
    # The same batches as flaxen.tasks.denoise, which is not used because it imports JAX, whose memory would dominate.
    from flaxen.data.corpus import Corpus
    from flaxen.data.order import examples
    from flaxen.data.span_corruption import corrupt, lengths
    from flaxen.data.store import open_store
    from flaxen.data.tokenizers import ByteTokenizer, load_tokenizer

    tokenizer = load_tokenizer(flags.vocabulary) if flags.vocabulary else ByteTokenizer()
    assert tokenizer is not None
    size = lengths(512, 0.15, 3.0) if flags.vocabulary else lengths(1024, 0.15, 20.0)
    source = Corpus(train=(str(flags.text),)).train_source()
    peaks = {"imports": peak_gb()}

    built = timed(lambda: open_store(source, tokenizer, flags.scratch / "store", progress=False))
    store = built.pop("result")
    peaks["build"] = peak_gb()

    def read() -> None:
        for step in range(flags.batches):
            numbers = examples(step, (0, flags.rows), flags.rows, store.n_tokens // size.raw, seed=0)
            corrupt(store.rows(numbers * size.raw, size.raw), size, tokenizer.sentinels, tokenizer.eos_id, (0, step))

    reading = timed(read)
    del reading["result"]
    peaks["read"] = peak_gb()
    emit(peaks=peaks, build=built, read=reading, tokens=store.n_tokens, megabytes=flags.text.stat().st_size / 1e6)


if __name__ == "__main__":
    main()
