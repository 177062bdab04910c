"""Entry point of the `flaxen` command."""

import sys

from flaxen.cli import process
from flaxen.malloc import restart_with_tuned_malloc

COMPUTING = {"train", "eval", "generate", "embed", "demo", "replay"}  # commands that spend most of their time in XLA


def main() -> None:
    """Configure the process (see flaxen.cli.process), then run `flaxen.cli.main.main`."""
    help_requested = {"-h", "--help"} & set(sys.argv)
    if sys.argv[1:] and sys.argv[1] in COMPUTING and not help_requested and process.enabled("malloc"):
        restart_with_tuned_malloc()
    process.cache_compilations()
    process.quiet_images()
    from flaxen.cli.main import main as run  # imported late: it loads the flags of all commands

    run()
