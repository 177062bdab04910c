"""Errors in what a user gave: a file, an option, a prompt. The command line prints them without a traceback."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Says what is wrong and where, what was expected, and what to do."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' (did you mean …?)' if a known name is similar, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that does not exist: the nearest one that does, then all of them."""
    names = list(known)
    return f"unknown {what} {name!r}{did_you_mean(name, names)}; available: {', '.join(names) or 'none'}"
