"""The `flaxen` command: one dataclass per subcommand, its fields are the flags."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

from flaxen.cli import recipe
from flaxen.cli.bench import BenchLanguage
from flaxen.cli.compose import Compose, Merge
from flaxen.cli.demo import Demo
from flaxen.cli.demo_caption import DemoCaption
from flaxen.cli.demo_language import DemoLanguage
from flaxen.cli.evaluate import EvalCaption, EvalDenoise, EvalLanguage, EvalSeq2Seq
from flaxen.cli.export import Export
from flaxen.cli.generate import Generate
from flaxen.cli.info import Info
from flaxen.cli.preview import PreviewCaption, PreviewDenoise, PreviewLanguage, PreviewSeq2Seq
from flaxen.cli.replay import Replay
from flaxen.cli.train import TrainCaption, TrainDenoise, TrainLanguage, TrainSeq2Seq
from flaxen.cli.vocab import Vocab
from flaxen.errors import InputError

COMMANDS = {
    "demo caption": DemoCaption,
    "demo language": DemoLanguage,
    "demo": Demo,
    "vocab": Vocab,
    "preview seq2seq": PreviewSeq2Seq,
    "preview caption": PreviewCaption,
    "preview language": PreviewLanguage,
    "preview": PreviewDenoise,
    "train denoise": TrainDenoise,
    "train seq2seq": TrainSeq2Seq,
    "train caption": TrainCaption,
    "train language": TrainLanguage,
    "eval denoise": EvalDenoise,
    "eval seq2seq": EvalSeq2Seq,
    "eval caption": EvalCaption,
    "eval language": EvalLanguage,
    "bench language": BenchLanguage,
    "replay": Replay,
    "export": Export,
    "compose": Compose,
    "merge": Merge,
    "generate": Generate,
    "info": Info,
}
ABOUT = """T5, mT5, ByT5, LongT5, GPT-2, ViT + GPT-2 captioners and Transformer-VQ in JAX: train, evaluate, generate.
Hugging Face checkpoints in and out.

Shell completion: flaxen --tyro-print-completion bash|zsh|tcsh. Tracebacks: FLAXEN_TRACEBACK=1."""


def main() -> None:
    """Run a command; a wrong input ends it with one message and exit code 1 (wrong flags: 2)."""
    try:
        command, flags = _parsed(sys.argv[1:])
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
    for name, kind in COMMANDS.items():
        words = name.split()
        if arguments[: len(words)] == words:
            flags = arguments[len(words) :]
            path = _value(flags, "--recipe")
            default: dict[str, Any] = {"default": recipe.read(kind, Path(path))} if path else {}
            return tyro.cli(kind, args=flags, prog=f"flaxen {name}", **default), flags
    # None of them: tyro lists them all, or completes the shell's words.
    every: Any = Union[tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in COMMANDS.items())]  # noqa: UP007
    return tyro.cli(every, args=arguments, prog="flaxen", description=ABOUT), arguments


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
