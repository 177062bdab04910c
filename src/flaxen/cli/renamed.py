"""Settings that were renamed. Old flags, recipes and run directories keep working."""

import sys
from typing import Any

from flaxen.errors import InputError

# Dotted paths of settings, old to new. A path may name a whole table.
RENAMED = {
    "writing": "generation",
    "objective.density": "objective.noise_density",
    "objective.smoothing": "objective.label_smoothing",
    "pictures": "sample_images",  # a flag of `flaxen generate`
}


def current_flags(arguments: list[str]) -> list[str]:
    """Return the command line with renamed flags under their current names, and report each renamed flag."""
    found = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        new = _current_flag(flag)
        if new != flag:
            print(f"flaxen: {flag} is now called {new}", file=sys.stderr)
        found.append(f"{new}{equals}{value}")
    return found


def _current_flag(flag: str) -> str:
    if not flag.startswith("--"):
        return flag
    path = flag.removeprefix("--").replace("-", "_")
    for old, new in RENAMED.items():
        if path == old or path.startswith(f"{old}."):
            return "--" + (new + path.removeprefix(old)).replace("_", "-")
    return flag


def current_settings(values: dict[str, Any], where: str, report: bool = False) -> dict[str, Any]:
    """Return a table of settings from a TOML file with renamed settings under their current names."""
    values = {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
    for old, new in RENAMED.items():
        *tables, name = old.split(".")
        table: Any = values
        for one in tables:
            table = table.get(one) if isinstance(table, dict) else None
        if not isinstance(table, dict) or name not in table:
            continue
        replacement = new.split(".")[-1]
        if replacement in table:
            raise InputError(f"{where} sets both {old} and {new}, its new name; remove {old}")
        table[replacement] = table.pop(name)
        if report:
            print(f"flaxen: {where}: {old} is now called {new}", file=sys.stderr)
    return values
