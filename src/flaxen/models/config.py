"""Change options in any model configuration, including nested ones: a captioner has an encoder and a decoder."""

import dataclasses
from collections.abc import Callable
from typing import Any

from flaxen.tree import T


def with_options(config: T, **options: Any) -> T:
    """Set options that control how the model is computed (compute, remat, scan), in every nested configuration."""
    return _map_parts(config, lambda part: dataclasses.replace(part, **options))


def with_dropout(config: T, rate: float) -> T:
    """Set all dropout rates, in every nested configuration."""

    def change(part: Any) -> Any:
        names = [field.name for field in dataclasses.fields(part) if field.name.endswith("dropout")]
        return dataclasses.replace(part, **dict.fromkeys(names, rate))

    return _map_parts(config, change)


def _map_parts(config: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to a configuration or, if it is composed of several, to each of them."""
    parts = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    inner = {name: part for name, part in parts.items() if dataclasses.is_dataclass(part)}
    if not inner:
        return change(config)
    return dataclasses.replace(config, **{name: _map_parts(part, change) for name, part in inner.items()})
