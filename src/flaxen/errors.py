"""The error of a wrong input: a file, an option, a prompt. The command line prints it without a traceback."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """What was expected, what came, what to do."""


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean …?' or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
