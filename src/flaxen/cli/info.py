"""flaxen info MODEL: describe a checkpoint or preset."""

import dataclasses
import math
from dataclasses import dataclass

import tyro

HIDDEN = ("scan", "remat")  # they affect how the model is computed, not its results


@dataclass(frozen=True)
class Info:
    """Show the size and configuration of a checkpoint or preset, without loading its weights.

    Example: flaxen info google/flan-t5-small
    """

    model: tyro.conf.Positional[str]
    """Checkpoint directory, Hugging Face hub id, or preset such as t5-small."""
    subfolder: str | None = None
    """Subfolder of MODEL that contains the checkpoint, such as text_encoder_2 of a diffusion model. Default: MODEL
    itself."""

    def run(self, given_flags: set[str]) -> None:
        from rich.console import Console
        from rich.table import Table

        from flaxen import families
        from flaxen.families import PRESETS
        from flaxen.tree import leaves

        rows: list[tuple[str, str]] = []
        if self.model in PRESETS and self.subfolder is None:
            config = PRESETS[self.model]
            rows.append(("preset", self.model))
        else:
            from flaxen.hf import files
            from flaxen.pretrained import loading

            stored = loading.read(files.locate(self.model, self.subfolder))
            config, tensors, tokenizer = stored.config, stored.tensors, stored.tokenizer()
            assert tensors is not None
            dtypes = {tensors.dtype(name) for name in tensors}
            rows += [
                ("directory", str(stored.directory)),
                ("stored as", ", ".join(sorted(dtypes))),
                ("tokenizer", "none" if tokenizer is None else f"{type(tokenizer).__name__}, {tokenizer.size:,} ids, "
                 f"{len(tokenizer.sentinels)} sentinels"),
            ]  # fmt: skip
        shapes = leaves(families.of_config(config).model(config))
        n = sum(math.prod(leaf.shape) for leaf in shapes.values())
        rows += [
            ("parameters", f"{n:,}"),
            ("memory", f"{4 * n / 1e9:.2f} GB in float32, {2 * n / 1e9:.2f} GB in bfloat16"),
        ]
        for name, value in dataclasses.asdict(config).items():
            parts = {f"{name}.{part}": v for part, v in value.items()} if isinstance(value, dict) else {name: value}
            rows += [(part, str(v)) for part, v in parts.items() if part.split(".")[-1] not in HIDDEN]
        table = Table(show_header=False, box=None)
        for name, value in rows:
            table.add_row(name, value)
        Console(soft_wrap=True).print(table)
