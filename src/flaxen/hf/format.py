"""Hugging Face format of one architecture: how config.json and tensors are read and written."""

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
    """The functions that read and write one architecture, from one module of hf/."""

    # (config.json, tensors) -> config; tensors settle what config.json leaves open, such as whether the head is tied
    read_config: Callable[[dict[str, Any], Tensors | None], Any]
    write_config: Callable[[Any, str], dict[str, Any]]  # (config, dtype) -> config.json
    rows: Callable[[Any, Tensors | None], list[Row]]  # (config, tensors) -> one row per leaf of the model
    unneeded: Callable[[str, Tensors], bool]  # (name, tensors) -> whether a tensor in the file may be ignored
    special: tuple[str, ...] = ()  # token ids that are in both config.json and generation_config.json
    special_ids: Callable[[Any], dict[str, Any]] = _no_ids  # config -> those ids
    with_copies: Callable[[Any, dict[str, np.ndarray]], dict[str, np.ndarray]] = _unchanged  # adds redundant tensors
