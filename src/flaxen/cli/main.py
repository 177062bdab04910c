"""The `flaxen` command: one dataclass per subcommand, whose fields are the flags."""

import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, Union

import tyro

from flaxen.cli import help, recipe
from flaxen.cli.bench import BenchLanguage
from flaxen.cli.compose import Compose, Merge
from flaxen.cli.data_verify import DataVerify
from flaxen.cli.demo import Demo
from flaxen.cli.demo_caption import DemoCaption
from flaxen.cli.demo_language import DemoLanguage
from flaxen.cli.embed import Embed
from flaxen.cli.evaluate import Eval
from flaxen.cli.export import Export
from flaxen.cli.generate import Generate
from flaxen.cli.info import Info
from flaxen.cli.preview import Preview
from flaxen.cli.renamed import current_flags
from flaxen.cli.replay import Replay
from flaxen.cli.tasks import NOT_IN_PREVIEW, TASKS, without
from flaxen.cli.train import Train
from flaxen.cli.verify import Verify
from flaxen.cli.vocab import Vocab
from flaxen.errors import InputError, did_you_mean, unknown


@dataclass(frozen=True)
class Command:
    """A dataclass whose fields are the flags. The command of a task is generic over the task's settings."""

    kind: Any
    about: str | None = None  # None: the docstring of `kind`
    settings: Any = None  # the task's settings; None if the command does not belong to a task
    hidden: tuple[str, ...] = ()  # settings that are not offered as flags

    @property
    def description(self) -> str:
        return self.about or self.kind.__doc__

    def narrowed(self) -> Any:
        """The settings that are offered as flags."""
        return without(self.settings, self.hidden)


def _commands() -> dict[str, Command]:
    """Return all commands by name. If one name is a prefix of another, the longer one comes first."""
    commands = {"demo caption": Command(DemoCaption), "demo language": Command(DemoLanguage), "demo": Command(Demo)}
    commands["vocab"] = Command(Vocab)
    for name, row in TASKS.items():
        hidden = (*row.not_in_training, *NOT_IN_PREVIEW)
        commands[f"preview {name}"] = Command(Preview, row.shows, row.settings, hidden)
    for name, row in TASKS.items():
        commands[f"train {name}"] = Command(Train, row.about, row.settings, row.not_in_training)
    for name, row in TASKS.items():
        commands[f"eval {name}"] = Command(Eval, row.evaluation.__doc__, row.evaluation, row.not_in_evaluation)
    others = {
        "bench language": BenchLanguage, "replay": Replay, "export": Export, "compose": Compose, "merge": Merge,
        "generate": Generate, "embed": Embed, "info": Info, "verify": Verify, "data verify": DataVerify,
    }  # fmt: skip
    return commands | {name: Command(kind) for name, kind in others.items()}


COMMANDS = _commands()
# The sections of `flaxen --help`, with the first word of their commands.
SECTIONS = {
    "First steps": ("demo",),
    "Training": ("vocab", "preview", "train", "replay", "data"),
    "Using a model": ("generate", "embed", "eval"),
    "Checkpoints": ("info", "verify", "export", "merge", "compose"),
    "Benchmarks": ("bench",),
}
ABOUT = """Train, evaluate and run T5, mT5, umT5, ByT5, LongT5, GPT-2, ViT + GPT-2 captioners and Transformer-VQ in JAX,
with Hugging Face checkpoints."""
CLOSING = """Run 'flaxen COMMAND --help' for the options of a command.
Shell completion: flaxen --tyro-print-completion bash|zsh|tcsh
Set FLAXEN_TRACEBACK=1 to see the traceback of an error."""


def main() -> None:
    """Run a command. An input error prints one message and exits with code 1; a usage error exits with code 2."""
    try:
        command, flags = _parse(current_flags(sys.argv[1:]))
        command.run(_given(flags))
    except BrokenPipeError:  # the reader of our output is gone, such as `| head`
        # Python flushes standard output at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (InputError, OSError) as error:
        if os.environ.get("FLAXEN_TRACEBACK"):
            raise
        print(f"flaxen: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        # 128 + SIGINT, as shells report it.
        sys.exit(130)


def _usage_error(message: str, command: str = "") -> NoReturn:
    print(f"flaxen: {message}\nRun 'flaxen {command}{' ' if command else ''}--help' for help.", file=sys.stderr)
    sys.exit(2)


def _parse(arguments: list[str]) -> tuple[Any, list[str]]:
    """Parse the arguments into a command with its flags. A recipe's settings become the defaults of the flags."""
    if arguments[:1] == ["preview"] and not any(arguments[:2] == name.split() for name in COMMANDS):
        arguments = ["preview", "denoise", *arguments[1:]]  # for backward compatibility
    for name, command in COMMANDS.items():
        words = name.split()
        if arguments[: len(words)] == words:
            flags, kind, options = arguments[len(words) :], command.kind, dict[str, Any]()
            if command.settings:
                settings = command.narrowed()
                kind = kind[settings]
                if path := _value(flags, "--recipe"):
                    options["default"] = kind(recipe.read(settings, Path(path)))
            if "--help" in flags or "-h" in flags:
                print(help.page(name, kind, command.description, options.get("default")), end="")
                sys.exit(0)
            # Comments in the dataclasses are for readers of the code; tyro would otherwise use them as help texts.
            _check_flags(name, kind, flags)
            config = (tyro.conf.HelptextFromCommentsOff, tyro.conf.PositionalMetavarFromFieldName)
            return tyro.cli(kind, args=flags, prog=f"flaxen {name}", config=config, **options), flags
    if any(argument.startswith("--tyro-") for argument in arguments):  # called by shell completion
        every: Any = Union[  # noqa: UP007
            tuple(
                Annotated[one.kind[one.narrowed()] if one.settings else one.kind, tyro.conf.subcommand(name)]
                for name, one in COMMANDS.items()
            )
        ]
        return tyro.cli(every, args=arguments, prog="flaxen"), arguments
    return _list_commands(arguments)


def _check_flags(command: str, kind: Any, arguments: list[str]) -> None:
    """Report an unknown flag. tyro would too, but its suggestions repeat help texts with a default of None."""
    known = [spelling for flag in help.flags(kind) if not flag.positional for spelling in flag.spellings]
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        is_flag = re.fullmatch(r"--[a-z][-a-z0-9.]*", name)  # not a prompt such as "-- and then?"
        if is_flag and name not in known and not name.startswith("--tyro-"):
            _usage_error(f"unknown flag {name}{did_you_mean(name, known)}", command)


def _list_commands(arguments: list[str]) -> NoReturn:
    """Print the commands that begin with the given word, or all of them. Anything else is a usage error."""
    words = [argument for argument in arguments if argument not in ("-h", "--help")]
    firsts = {name.split()[0] for name in COMMANDS}
    if words and words[0] not in firsts:
        _usage_error(unknown("command", words[0], sorted(firsts)))
    if len(words) > 1:
        members = [name for name in COMMANDS if name.split()[0] == words[0]]
        _usage_error(unknown("command", " ".join(words[:2]), members))
    sections = {
        title: {
            name: command.description
            for first in wanted
            for name, command in sorted(COMMANDS.items(), key=lambda item: item[0].count(" "))
            if name.split()[0] == first and (not words or first == words[0])
        }
        for title, wanted in SECTIONS.items()
    }
    print(help.index(ABOUT, {title: listed for title, listed in sections.items() if listed}, CLOSING))
    # An incomplete command is a usage error, unless help was requested: `words` does not include --help.
    sys.exit(0 if not words or words != arguments else 2)


def _value(arguments: list[str], flag: str) -> str | None:
    """Return the value of a flag, given as `--flag value` or `--flag=value`."""
    for argument, after in zip(arguments, [*arguments[1:], ""]):
        if argument == flag:
            return after
        if argument.startswith(f"{flag}="):
            return argument.split("=", 1)[1]
    return None


def _given(arguments: list[str]) -> set[str]:
    """Return the names of the flags that were given. The others take the checkpoint's default, if it has one."""
    flags = [argument.split("=")[0] for argument in arguments if argument.startswith("--")]
    return {flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags}


if __name__ == "__main__":
    main()
