"""The `flaxen` command: one dataclass per subcommand, its fields are the flags."""

import os
import sys
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

from flaxen.cli import recipe
from flaxen.cli.bench import BenchLanguage
from flaxen.cli.compose import Compose, Merge
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
from flaxen.cli.vocab import Vocab
from flaxen.errors import InputError


@dataclass(frozen=True)
class Command:
    """A dataclass whose fields are the flags; of a task's command, generic over the task's settings."""

    kind: Any
    about: str | None = None  # its docstring, if none
    settings: Any = None  # of the task
    hidden: tuple[str, ...] = ()  # settings that are no flags here

    @property
    def description(self) -> str:
        return self.about or self.kind.__doc__

    def narrowed(self) -> Any:
        """The settings that it offers."""
        return without(self.settings, self.hidden)


def _commands() -> dict[str, Command]:
    """By their words. Of names that begin alike, the longer comes first."""
    found = {"demo caption": Command(DemoCaption), "demo language": Command(DemoLanguage), "demo": Command(Demo)}
    found["vocab"] = Command(Vocab)
    for name, row in TASKS.items():
        hidden = (*row.not_in_training, *NOT_IN_PREVIEW)
        found[f"preview {name}"] = Command(Preview, row.shows, row.settings, hidden)
    found["preview"] = found["preview denoise"]  # as it was before there were other tasks
    for name, row in TASKS.items():
        found[f"train {name}"] = Command(Train, row.about, row.settings, row.not_in_training)
    for name, row in TASKS.items():
        found[f"eval {name}"] = Command(Eval, row.evaluation.__doc__, row.evaluation, row.not_in_evaluation)
    others = {
        "bench language": BenchLanguage, "replay": Replay, "export": Export, "compose": Compose, "merge": Merge,
        "generate": Generate, "embed": Embed, "info": Info,
    }  # fmt: skip
    return found | {name: Command(kind) for name, kind in others.items()}


COMMANDS = _commands()
ABOUT = """T5, mT5, umT5, ByT5, LongT5, GPT-2, ViT + GPT-2 captioners and Transformer-VQ in JAX: train, evaluate,
generate, embed. Hugging Face checkpoints in and out.

Shell completion: flaxen --tyro-print-completion bash|zsh|tcsh. Tracebacks: FLAXEN_TRACEBACK=1."""


def main() -> None:
    """Run a command; a wrong input ends it with one message and exit code 1 (wrong flags: 2)."""
    try:
        command, flags = _parsed(current_flags(sys.argv[1:]))
        if not hasattr(command, "run"):
            raise InputError(f"no command {sys.argv[1]!r}; give its words one by one, such as flaxen train denoise")
        command.run(_given(flags))
    except (InputError, OSError) as error:
        if os.environ.get("FLAXEN_TRACEBACK"):
            raise
        print(f"flaxen: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _parsed(arguments: list[str]) -> tuple[Any, list[str]]:
    """The command that the arguments spell. A recipe's settings are the defaults of its flags."""
    for name, command in COMMANDS.items():
        words = name.split()
        if arguments[: len(words)] == words:
            flags, kind, options = arguments[len(words) :], command.kind, dict[str, Any]()
            if command.settings:
                settings = command.narrowed()
                kind = kind[settings]
                if path := _value(flags, "--recipe"):
                    options["default"] = kind(recipe.read(settings, Path(path)))
            prog, about = f"flaxen {name}", command.description
            return tyro.cli(kind, args=flags, prog=prog, description=about, **options), flags
    # None of them: tyro lists them all, or completes the shell's words.
    completing = any(argument.startswith("--tyro-") for argument in arguments)
    every: Any = Union[  # noqa: UP007
        tuple(
            Annotated[_listed(one, completing), tyro.conf.subcommand(name, description=one.description)]
            for name, one in COMMANDS.items()
        )
    ]
    return tyro.cli(every, args=arguments, prog="flaxen", description=ABOUT), arguments


def _listed(command: Command, completing: bool) -> Any:
    """Its type where the shell completes flags. For a list of commands none is read, and reading all takes time."""
    if not completing:
        return make_dataclass("Listed", [])
    return command.kind[command.narrowed()] if command.settings else command.kind


def _value(arguments: list[str], flag: str) -> str | None:
    for argument, after in zip(arguments, [*arguments[1:], ""]):
        if argument == flag:
            return after
        if argument.startswith(f"{flag}="):
            return argument.split("=", 1)[1]
    return None


def _given(arguments: list[str]) -> set[str]:
    """The names of the flags that were typed: a typed default differs from one left to the checkpoint."""
    flags = [argument.split("=")[0] for argument in arguments if argument.startswith("--")]
    return {flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags}


if __name__ == "__main__":
    main()
