"""flaxen compose ENCODER DECODER DIR and flaxen merge MODEL ADAPTER DIR: combine two checkpoints into one."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Compose:
    """Combine a ViT encoder and a GPT-2 decoder into a captioner with randomly initialised cross-attention.

    Example: flaxen compose google/vit-base-patch16-224-in21k gpt2 captioner
    """

    encoder: tyro.conf.Positional[str]
    """Checkpoint directory or Hugging Face hub id of a ViT model."""
    decoder: tyro.conf.Positional[str]
    """Checkpoint directory or Hugging Face hub id of a GPT-2 model."""
    out: tyro.conf.Positional[Path]
    """Directory to write the checkpoint to."""
    seed: int = 0
    """Random seed for the new weights: cross-attention, and a projection if encoder and decoder widths differ."""
    overwrite: bool = False
    """Replace OUT even if it contains files that Flaxen did not write; all of them are deleted."""

    def run(self, given_flags: set[str]) -> None:
        from flaxen.atomic_directory import check_directory
        from flaxen.pretrained import compose, load

        check_directory(self.out, self.overwrite, (self.encoder, self.decoder))
        captioner = compose(load(self.encoder), load(self.decoder), self.seed)
        captioner.save(self.out, overwrite=self.overwrite)
        new = "cross-attention" if captioner.model.bridge is None else "cross-attention and the bridge"
        print(f"wrote {self.out}; train its {new} with: flaxen train caption --model.init {self.out} …")
        if captioner.tokenizer is None:
            print(f"{self.decoder} has no tokenizer; choose one for training with --model.tokenizer", file=sys.stderr)


@dataclass(frozen=True)
class Merge:
    """Merge a LoRA adapter into the weights of its base model.

    Example: flaxen merge google/flan-t5-small run/model merged
    """

    model: tyro.conf.Positional[str]
    """Checkpoint directory or Hugging Face hub id of the base model."""
    adapter: tyro.conf.Positional[str]
    """Directory or hub id of the adapter, in PEFT format."""
    out: tyro.conf.Positional[Path]
    """Directory to write the checkpoint to."""
    overwrite: bool = False
    """Replace OUT even if it contains files that Flaxen did not write; all of them are deleted."""

    def run(self, given_flags: set[str]) -> None:
        from flaxen.atomic_directory import check_directory
        from flaxen.pretrained import load

        check_directory(self.out, self.overwrite, (self.model, self.adapter))
        load(self.model, adapter=self.adapter).save(self.out, overwrite=self.overwrite)
        print(f"merged {self.adapter} into {self.model} and wrote {self.out}")
