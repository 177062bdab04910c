"""Load golden files: results of the original Transformer-VQ code (tests/goldens)."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

DIRECTORY = Path(__file__).parent / "goldens" / "vq"
MODELS = ("01_base", "02_heads4", "03_noagg", "05_imagenet_like", "07_heads4_mem4_block8", "10_dff_is_ignored")


class Golden:
    """The arrays of one file by name, and the settings they were computed with."""

    def __init__(self, name: str):
        with np.load(DIRECTORY / f"{name}.npz") as file:
            self.arrays = {key: file[key] for key in file.files}
        self.config: dict[str, Any] = json.loads(str(self.arrays.pop("config")))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def under(self, prefix: str) -> dict[str, np.ndarray]:
        """The arrays whose names start with `prefix`, with the prefix removed."""
        return {key[len(prefix) :]: array for key, array in self.arrays.items() if key.startswith(prefix)}


@cache
def golden(name: str) -> Golden:
    return Golden(name)
