"""Help pages, generated from the dataclasses that define the flags. tyro parses the flags; argparse lays out the page.

tyro can print help itself, but orders groups by inheritance rather than importance and shows every default of None.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import tyro

WIDTH = 80
# Nested settings by importance; other groups follow in the order of their fields.
GROUPS = ("", "model", "data", "objective", "training", "optimizer", "schedule", "generation", "lora", "tracking")
TITLES = {"": "Options", "lora": "LoRA options", "options": "Generation options"}
ABOUT = {"options": "Options that are not given take the checkpoint's own values, if it has any."}
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


class Flag(typing.NamedTuple):
    """One flag or positional argument of a command."""

    name: str  # dotted, as in --model.init
    group: str  # the settings it belongs to
    kind: Any  # its type
    default: Any
    positional: bool
    owner: type  # the dataclass with its field, whose docstring is the help text

    @property
    def help(self) -> str:
        return field_docstrings(self.owner).get(self.name.rpartition(".")[2], "")

    @property
    def spellings(self) -> tuple[str, ...]:
        """The flag as typed: --name and, if it is a switch, --no-name."""
        head, dot, last = _dashed(self.name).rpartition(".")
        negated = (f"--{head}{dot}no-{last}",) if self.kind is bool else ()
        return (f"--{_dashed(self.name)}", *negated)


def page(command: str, kind: Any, description: str, default: Any = None) -> str:
    """The help page of a command whose flags are the fields of the dataclass `kind`, or of the instance `default`."""
    listed = list(flags(kind, default))
    about, _, example = description.partition("Example:")
    summary = " ".join(about.split())
    required = [flag for flag in listed if not flag.positional and flag.default is dataclasses.MISSING]
    usage = " ".join(
        [f"flaxen {command}"]
        + [_metavar(flag) for flag in listed if flag.positional]
        + [f"--{_dashed(flag.name)} {_metavar(flag)}" for flag in required]
        + ["[OPTIONS]"]
    )
    parser = argparse.ArgumentParser(add_help=False, formatter_class=_formatter)
    _add(parser.add_argument_group("Arguments"), [flag for flag in listed if flag.positional])
    names = [*GROUPS, *(flag.group for flag in listed if flag.group not in GROUPS)]
    for name in dict.fromkeys(names):
        members = [flag for flag in listed if flag.group == name and not flag.positional]
        members.sort(key=lambda flag: flag.default is not dataclasses.MISSING)  # required flags first
        group = parser.add_argument_group(TITLES.get(name, f"{name.capitalize()} options"), ABOUT.get(name))
        _add(group, members)
        if not name:
            group.add_argument("-h", "--help", action="store_true", help="Show this help page and exit.")
    # Drop the usage line of argparse, which would list every flag.
    options = parser.format_help().partition("\n\n")[2]
    lines = [textwrap.fill(summary, WIDTH), "", textwrap.fill(f"Usage: {usage}", WIDTH, subsequent_indent="  ")]
    if example:
        lines += ["", "Example:", *_wrap_command(" ".join(example.split()))]
    return "\n".join([*lines, "", options])


def index(title: str, sections: dict[str, dict[str, str]], closing: str) -> str:
    """A page that lists commands by section, each with its description."""
    lines = [textwrap.fill(title, WIDTH), "", "Usage: flaxen COMMAND [OPTIONS]"]
    for section, commands in sections.items():
        lines += ["", f"{section}:"]
        for name, description in commands.items():
            about = " ".join(description.partition("Example:")[0].split())
            first = f"  {name:<18}"
            lines += textwrap.wrap(about, WIDTH, initial_indent=first, subsequent_indent=" " * 20)
    return "\n".join([*lines, "", closing])


def _wrap_command(command: str) -> list[str]:
    """Wrap a command line with backslashes; a flag and its values stay on one line."""
    lines = ["  "]
    for part in re.split(r" (?=--)", command):
        if len(lines[-1]) + len(part) + 3 > WIDTH:
            lines[-1] += " \\"
            lines.append("     ")
        lines[-1] += part if lines[-1] == "  " else f" {part}"
    return lines


def flags(kind: Any, default: Any = None, prefix: str = "", group: str = "") -> Iterator[Flag]:
    """Every flag of a command, in the order of the dataclass fields."""
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    hints = typing.get_type_hints(origin, include_extras=True)
    for field in dataclasses.fields(origin):
        hint, markers = _unwrap(hints[field.name])
        generic = isinstance(hint, typing.TypeVar)  # a command that is generic over the settings of its task
        hint = arguments[0] if generic else hint
        if tyro.conf.Suppress in markers:
            continue
        value = _default(field) if default is None else getattr(default, field.name)
        value = dataclasses.MISSING if value is tyro.MISSING else value
        if dataclasses.is_dataclass(hint):
            flat = any(getattr(marker, "name", None) == "" for marker in markers)  # its flags have no prefix
            inner = value if dataclasses.is_dataclass(value) else None
            nested = prefix if flat else f"{prefix}{field.name}."
            yield from flags(hint, inner, nested, group if generic else field.name)
        else:
            yield Flag(f"{prefix}{field.name}", group, hint, value, tyro.conf.Positional in markers, origin)


@cache
def field_docstrings(kind: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, including fields of its bases."""
    texts: dict[str, str] = {}
    # Bases first, so that the text of a redefined field is that of the subclass.
    for base in reversed(kind.__mro__):
        try:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):  # no source code: built in, or created by `make_dataclass`
            continue
        body = definition.body if isinstance(definition, ast.ClassDef) else []
        for field, following in pairwise(body):
            text = _string(following)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and text is not None:
                texts[field.target.id] = " ".join(text.split())
    return texts


def _string(node: ast.stmt) -> str | None:
    """The text of a statement that is only a string."""
    value = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
    return value if isinstance(value, str) else None


def _unwrap(hint: Any) -> tuple[Any, Sequence[Any]]:
    if typing.get_origin(hint) is typing.Annotated:
        return typing.get_args(hint)[0], hint.__metadata__
    return hint, ()


def _default(field: dataclasses.Field) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _add(group: Any, members: list[Flag]) -> None:
    for flag in members:
        # argparse formats help texts with the % operator.
        text = _help(flag).replace("%", "%%")
        if flag.positional:
            group.add_argument(flag.name, metavar=_metavar(flag), help=text)
        elif flag.kind is bool:
            head, _, last = flag.name.rpartition(".")
            name = f"--{head}{'.' if head else ''}[no-]{last}"
            group.add_argument(_dashed(name), dest=flag.name, action="store_true", help=text)
        else:
            group.add_argument(f"--{_dashed(flag.name)}", dest=flag.name, metavar=_metavar(flag), help=text)


def _help(flag: Flag) -> str:
    """The help text, with the default in parentheses.

    If the default is None, () or False, the field's docstring may describe it in a last sentence, 'Default: ….'.
    """
    text, _, described = flag.help.partition("Default: ")
    text = text.strip()
    if flag.default is dataclasses.MISSING:
        return text if flag.positional else f"{text} (required)"
    if flag.kind is bool:
        default = "on" if flag.default else described.rstrip(".") or "off"
    elif flag.default is None or flag.default == ():
        default = described.rstrip(".")
    else:
        default = " ".join(map(str, flag.default)) if isinstance(flag.default, tuple) else str(flag.default)
    return f"{text} (default: {default})" if default else text


def _metavar(flag: Flag) -> str:
    """The placeholder for the value: the type, or the choices in braces."""
    if flag.positional:
        return _dashed(flag.name).upper()
    kinds = [kind for kind in _alternatives(flag.kind) if kind is not type(None)]
    several = " ..." if typing.get_origin(kinds[0]) is tuple else ""
    while typing.get_origin(kinds[0]) is tuple:
        kinds = [typing.get_args(kinds[0])[0]]
    choices = [str(choice) for kind in kinds for choice in _choices(kind)]
    return ("{" + ",".join(choices) + "}" if choices else METAVARS[kinds[0]]) + several


def _choices(kind: Any) -> Sequence[Any]:
    if kind is bool:
        return (True, False)
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _alternatives(kind: Any) -> Sequence[Any]:
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else [kind]


def _dashed(name: str) -> str:
    return name.replace("_", "-")


class _Formatter(argparse.HelpFormatter):
    """argparse's layout, but without line breaks at the hyphens of flag names."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(re.sub(r"\s+", " ", text), width, break_on_hyphens=False, break_long_words=False)


def _formatter(prog: str) -> argparse.HelpFormatter:
    return _Formatter(prog, max_help_position=8, width=WIDTH)
