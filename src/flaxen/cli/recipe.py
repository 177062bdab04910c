"""Convert settings between nested frozen dataclasses and TOML. (tyro converts the same dataclasses to flags.)"""

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import tyro

from flaxen.cli.renamed import current_settings
from flaxen.errors import InputError, did_you_mean, unknown

T = TypeVar("T")


def to_dict(settings: Any) -> dict[str, Any]:
    """Convert settings to what TOML can represent: None is omitted, tuples become lists, paths become strings."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            values[field.name] = to_dict(value)
        elif value is not None and value is not tyro.MISSING:
            values[field.name] = _to_plain(value)
    return values


def _to_plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def from_dict(kind: type[T], values: dict[str, Any], where: str, missing: bool = False) -> T:
    """Build a dataclass from a TOML table; unknown names and wrong types raise an InputError.

    With `missing`, required settings that the table lacks, such as the output directory, are left to the flags.
    """
    hints, fields = typing.get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise InputError(f"{where}: {unknown('setting', name, fields)}")
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        hint = hints[name]
        if name in values and dataclasses.is_dataclass(hint):
            if not isinstance(values[name], dict):
                raise InputError(f"{where}: {name} must be a table, got {values[name]!r}")
            arguments[name] = from_dict(hint, values[name], f"{where}, [{name}]", missing)  # type: ignore[arg-type]
        elif name in values:
            arguments[name] = _convert(hint, values[name], f"{where}: {name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            if not missing:
                raise InputError(f"{where}: the setting {name!r} is required")
            arguments[name] = tyro.MISSING
    return kind(**arguments)


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Convert a TOML value to the type of a field, or raise an InputError."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _convert(next(option for option in options if option is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            value = [value]
        return tuple(_convert(options[0], item, where) for item in value)
    if origin is typing.Literal:
        if value not in options:
            raise InputError(
                f"{where} must be one of {', '.join(map(str, options))}, got {value!r}"
                f"{did_you_mean(str(value), options)}"
            )
        return value
    if origin is typing.Annotated:
        return _convert(options[0], value, where)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise InputError(f"{where} must be of type {hint.__name__}, got {value!r}")
    return value


def read(kind: type[T], path: Path) -> T:
    """Read a recipe file as the defaults of a command's flags."""
    import tomllib

    try:
        values = current_settings(tomllib.loads(path.read_text(encoding="utf-8")), str(path), report=True)
        return from_dict(kind, values, str(path), missing=True)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; --recipe expects a TOML file, such as those in recipes/") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from None
