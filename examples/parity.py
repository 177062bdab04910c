"""`make parity`: save random T5 models of four families with Flaxen, load them in transformers, and compare outputs."""

import os
import tempfile
import time
import warnings
from pathlib import Path

os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

import flaxen
from flaxen.data.tokenizers import ByteTokenizer
from flaxen.models.t5 import Config
from flaxen.tree import size

V1 = {"d_model": 128, "d_head": 32, "d_ff": 256, "n_layers": 4, "n_decoder_layers": 4, "n_heads": 4, "vocab_size": 384}
GATED = {"activation": "gelu_new", "gated": True, "tied": False, "scaled": False}
FAMILIES = {
    "T5 1.0": Config(**V1),
    "T5 1.1": Config(**{**V1, **GATED}),
    "mT5": Config(**{**V1, **GATED, "family": "mt5"}),
    "ByT5": Config(**{**V1, **GATED, "n_layers": 6, "n_decoder_layers": 2}),
}
TEXTS = [
    "A stitch in time saves nine.",
    "Grüße aus Köln!",
    "春は曙。",
    "Nine out of ten owls agree. " * 4,
]
NEW = 32  # tokens to generate


def main() -> None:
    console = Console()
    console.print("[bold]1. Create a random ByT5, save it in Hugging Face format, load it and generate[/bold]")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "byt5"
        flaxen.create(FAMILIES["ByT5"], seed=0, tokenizer=ByteTokenizer()).save(directory)
        console.print("  files:", ", ".join(sorted(path.name for path in directory.iterdir())))
        pretrained = flaxen.load(directory)
        console.print(f"  {size(pretrained.model):,} parameters, {pretrained.tokenizer.size} ids")
        (best, second) = pretrained.generate(TEXTS[0], num_beams=4, num_return_sequences=2, max_new_tokens=8)
        for output in (best, second):
            console.print(f"  beam score {output.score:7.3f}  tokens {output.tokens}")
        console.print("  (random weights generate random bytes; what matters is the comparison below)\n")

        console.print("[bold]2. Load the same files in transformers and compare[/bold]")
        table = Table("family", "largest logit difference", "greedy tokens", "beam-4 tokens", "round trip is exact")
        for name, config in FAMILIES.items():
            table.add_row(name, *compare(config, Path(folder) / name))
        console.print(table)
    console.print("Differences are relative to the largest logit. Next: flaxen generate YOUR_MODEL --text '…'")


def compare(config: Config, directory: Path) -> tuple[str, ...]:
    """Compare Flaxen and transformers on one random model; return the cells of a table row."""
    ours = flaxen.create(config, seed=1, tokenizer=ByteTokenizer())
    ours.save(directory)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
    ids = [ours.tokenizer.encode(text) for text in TEXTS]
    width = max(map(len, ids))
    batch = np.array([row + [0] * (width - len(row)) for row in ids])
    valid = np.array([[True] * len(row) + [False] * (width - len(row)) for row in ids])
    tensors = {"input_ids": torch.tensor(batch), "attention_mask": torch.tensor(valid).long()}
    decoder = np.array([[0, 5, 6, 7]] * len(ids))
    expected = theirs(**tensors, decoder_input_ids=torch.tensor(decoder)).logits.detach().numpy()
    error = np.abs(ours.logits(batch, decoder, valid) - expected).max() / np.abs(expected).max()
    cells = [f"{error:.1e}"]
    for beams in (1, 4):
        their_tokens = theirs.generate(**tensors, max_new_tokens=NEW, num_beams=beams, do_sample=False)[:, 1:].tolist()
        our_tokens = [output.tokens for output in ours.generate(TEXTS, max_new_tokens=NEW, num_beams=beams)]
        # transformers pads with 0 after the end token.
        same = sum(a == b[: len(a)] and not any(b[len(a) :]) for a, b in zip(our_tokens, their_tokens))
        cells.append(f"{same} of {len(TEXTS)} equal")
    theirs.save_pretrained(directory / "again")
    reloaded = flaxen.load(directory / "again").logits(batch, decoder, valid)
    cells.append("yes" if np.array_equal(reloaded, ours.logits(batch, decoder, valid)) else "NO")
    return tuple(cells)


if __name__ == "__main__":
    started = time.time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.utils.logging.disable_progress_bar()
        main()
    print(f"done in {time.time() - started:.0f} s")
