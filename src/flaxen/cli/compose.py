"""flaxen compose ENCODER DECODER DIR, flaxen merge MODEL ADAPTER DIR"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Compose:
    """Make a captioner of a ViT and a GPT-2. Cross-attention, and a bridge if their widths differ, start at random."""

    encoder: tyro.conf.Positional[str]
    """Checkpoint directory or hub id of a ViT."""
    decoder: tyro.conf.Positional[str]
    """Checkpoint directory or hub id of a GPT-2."""
    out: tyro.conf.Positional[Path]
    """Directory to write."""
    seed: int = 0
    """Of the weights that neither checkpoint has."""

    def run(self, given: set[str]) -> None:
        from flaxen.pretrained import compose, load

        made = compose(load(self.encoder), load(self.decoder), self.seed)
        made.save(self.out)
        new = "cross-attention" if made.model.bridge is None else "cross-attention and the bridge"
        print(f"a captioner is in {self.out}; its {new} is untrained: flaxen train caption --model.init {self.out} …")
        if made.tokenizer is None:
            print(f"{self.decoder} has no tokenizer; name one when you train, with --model.tokenizer", file=sys.stderr)


@dataclass(frozen=True)
class Merge:
    """Add a LoRA adapter into the weights of its model."""

    model: tyro.conf.Positional[str]
    """Checkpoint directory or hub id."""
    adapter: tyro.conf.Positional[str]
    """Directory or hub id of the adapter, in PEFT's form."""
    out: tyro.conf.Positional[Path]
    """Directory to write."""

    def run(self, given: set[str]) -> None:
        from flaxen.pretrained import load

        load(self.model, adapter=self.adapter).save(self.out)
        print(f"{self.model} with {self.adapter} is in {self.out}")
