"""Settings as nested frozen dataclasses, as TOML, and as flags: one fact, three spellings."""

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import tyro

from flaxen.cli.renamed import current_settings
from flaxen.errors import InputError, did_you_mean

T = TypeVar("T")


def to_dict(settings: Any) -> dict[str, Any]:
    """What TOML can say: no None, no tuples, no paths."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            found[field.name] = to_dict(value)
        elif value is not None and value is not tyro.MISSING:
            found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def from_dict(kind: type[T], values: dict[str, Any], where: str, missing: bool = False) -> T:
    """The dataclass that a TOML table spells. Unknown names and wrong types are errors that name them.

    With `missing`, what a recipe need not say (the output directory) is left to the flags.
    """
    hints, fields = typing.get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise InputError(f"{where}: no setting {name!r}{did_you_mean(name, fields)}; there are {', '.join(fields)}")
    found: dict[str, Any] = {}
    for name, field in fields.items():
        hint = hints[name]
        if name in values and dataclasses.is_dataclass(hint):
            if not isinstance(values[name], dict):
                raise InputError(f"{where}: {name} must be a table, got {values[name]!r}")
            found[name] = from_dict(hint, values[name], f"{where}, [{name}]", missing)  # type: ignore[arg-type]
        elif name in values:
            found[name] = _typed(hint, values[name], f"{where}: {name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            if not missing:
                raise InputError(f"{where}: the setting {name!r} is missing")
            found[name] = tyro.MISSING
    return kind(**found)


def _typed(hint: Any, value: Any, where: str) -> Any:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _typed(next(one for one in options if one is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            value = [value]
        return tuple(_typed(options[0], one, where) for one in value)
    if origin is typing.Literal:
        if value not in options:
            raise InputError(
                f"{where} must be one of {', '.join(map(str, options))}, got {value!r}"
                f"{did_you_mean(str(value), options)}"
            )
        return value
    if origin is typing.Annotated:
        return _typed(options[0], value, where)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise InputError(f"{where} must be {hint.__name__}, got {value!r}")
    return value


def read(kind: type[T], path: Path) -> T:
    """A recipe file as the defaults of a command."""
    import tomllib

    try:
        values = current_settings(tomllib.loads(path.read_text(encoding="utf-8")), str(path), report=True)
        return from_dict(kind, values, str(path), missing=True)
    except FileNotFoundError:
        raise InputError(f"no recipe {path}; recipes are TOML files, such as those in recipes/") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from None
