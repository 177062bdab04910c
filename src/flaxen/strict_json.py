"""Strict JSON: nothing that other programs cannot read is written, and nested or oversized files are refused."""

import json
import math
import os
from typing import Any, NoReturn

from flaxen.errors import InputError
from flaxen.inputs import TEXT_LIMIT, read_text


def parse(text: str, where: str | os.PathLike[str]) -> Any:
    """Parse JSON; `where` names the file in the error. NaN and Infinity, which are not JSON, are refused."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise InputError(f"{os.fspath(where)} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise InputError(f"{os.fspath(where)} is not valid JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def read(path: str | os.PathLike[str], limit: int = TEXT_LIMIT) -> Any:
    """Read a JSON file of at most `limit` bytes."""
    return parse(read_text(path, limit), path)


def dumps(value: Any, **options: Any) -> str:
    """Convert a value to JSON; NaN and infinities, which JSON does not have, become null."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    """Replace floats that are not finite by None."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
