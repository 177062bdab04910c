"""flaxen info MODEL"""

import dataclasses
import math
from dataclasses import dataclass

import tyro


@dataclass(frozen=True)
class Info:
    """Show what a checkpoint holds, without loading its weights."""

    model: tyro.conf.Positional[str]
    """Checkpoint directory, hub id, or preset such as t5-small."""

    def run(self, given: set[str]) -> None:
        from rich.console import Console
        from rich.table import Table

        from flaxen.models.t5 import PRESETS, T5
        from flaxen.tree import leaves

        rows: list[tuple[str, str]] = []
        if self.model in PRESETS:
            config = PRESETS[self.model]
            rows.append(("preset", self.model))
        else:
            from flaxen.data.tokenizers import load_tokenizer
            from flaxen.hf import files
            from flaxen.pretrained import read_config

            directory = files.locate(self.model)
            config, tensors, _ = read_config(directory)
            tokenizer = load_tokenizer(directory)
            dtypes = {tensors.dtype(name) for name in tensors}
            rows += [
                ("directory", str(directory)),
                ("stored as", ", ".join(sorted(dtypes))),
                ("tokenizer", "none" if tokenizer is None else f"{type(tokenizer).__name__}, {tokenizer.size:,} ids, "
                 f"{len(tokenizer.sentinels)} sentinels"),
            ]  # fmt: skip
        shapes = leaves(T5(config))
        n = sum(math.prod(leaf.shape) for leaf in shapes.values())
        rows += [
            ("parameters", f"{n:,}"),
            ("memory", f"{4 * n / 1e9:.2f} GB in float32, {2 * n / 1e9:.2f} GB in bfloat16"),
        ]
        rows += [
            (name, str(value)) for name, value in dataclasses.asdict(config).items() if name not in ("scan", "remat")
        ]
        table = Table(show_header=False, box=None)
        for name, value in rows:
            table.add_row(name, value)
        Console(soft_wrap=True).print(table)
