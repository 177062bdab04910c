"""How one architecture is written in Hugging Face's files: its config.json and its tensors, both directions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flaxen.hf.tensors import Tensors
from flaxen.hf.weightmap import Row


def _no_ids(config: Any) -> dict[str, Any]:
    return {}


def _unchanged(config: Any, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return tensors


@dataclass(frozen=True)
class Format:
    """The functions of one hf/ module, as a record."""

    read_config: Callable[[dict[str, Any], Tensors | None], Any]  # what config.json leaves open, the tensors tell
    write_config: Callable[[Any, str], dict[str, Any]]  # (config, dtype) -> config.json
    rows: Callable[[Any, Tensors | None], list[Row]]
    unneeded: Callable[[str, Tensors], bool]  # tensors that a file may hold and the model does not need
    special: tuple[str, ...] = ()  # ids that config.json and generation_config.json both hold
    special_ids: Callable[[Any], dict[str, Any]] = _no_ids
    with_copies: Callable[[Any, dict[str, np.ndarray]], dict[str, np.ndarray]] = _unchanged  # what others need twice
