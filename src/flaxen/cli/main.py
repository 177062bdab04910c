"""The `flaxen` command: one dataclass per subcommand, its fields are the flags."""

import os
import sys
from typing import Annotated

import tyro

from flaxen.cli.generate import Generate
from flaxen.cli.info import Info
from flaxen.errors import InputError

Command = Annotated[Generate, tyro.conf.subcommand("generate")] | Annotated[Info, tyro.conf.subcommand("info")]


def main() -> None:
    """Run a command; a wrong input ends it with one message and exit code 1 (wrong flags: 2)."""
    try:
        command = tyro.cli(
            Command,
            prog="flaxen",
            description="T5, mT5 and ByT5 in JAX: Hugging Face checkpoints in and out.\n\n"
            "Shell completion: flaxen --tyro-print-completion bash|zsh|tcsh. Tracebacks: FLAXEN_TRACEBACK=1.",
            config=(tyro.conf.OmitArgPrefixes,),
        )
        command.run(_given(sys.argv[1:]))
    except (InputError, OSError) as error:
        if os.environ.get("FLAXEN_TRACEBACK"):
            raise
        print(f"flaxen: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _given(arguments: list[str]) -> set[str]:
    """The names of the flags that were typed: a typed default differs from one left to the checkpoint."""
    flags = [argument.split("=")[0] for argument in arguments if argument.startswith("--")]
    return {flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags}


if __name__ == "__main__":
    main()
