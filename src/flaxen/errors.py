"""Errors in user input: a file, an option or a prompt. The command line prints them without a traceback."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Invalid user input; the message says what is wrong and where, what was expected, and what to do."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ' (did you mean …?)' if a known name is similar, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name: it suggests a similar known name, if any, then lists all of them."""
    names = list(known)
    return f"unknown {what} {name!r}{did_you_mean(name, names)}; available: {', '.join(names) or 'none'}"
