"""Changes to any model's configuration. A configuration may hold others: those of a captioner's halves."""

import dataclasses
from collections.abc import Callable
from typing import Any

from flaxen.tree import T


def with_options(config: T, **options: Any) -> T:
    """With other ways to compute the same (compute, remat, scan), in every part."""
    return _in_every_part(config, lambda part: dataclasses.replace(part, **options))


def with_dropout(config: T, rate: float) -> T:
    """With this rate wherever there is dropout."""

    def change(part: Any) -> Any:
        names = [field.name for field in dataclasses.fields(part) if field.name.endswith("dropout")]
        return dataclasses.replace(part, **dict.fromkeys(names, rate))

    return _in_every_part(config, change)


def _in_every_part(config: Any, change: Callable[[Any], Any]) -> Any:
    parts = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    inner = {name: part for name, part in parts.items() if dataclasses.is_dataclass(part)}
    if not inner:
        return change(config)
    return dataclasses.replace(config, **{name: _in_every_part(part, change) for name, part in inner.items()})
