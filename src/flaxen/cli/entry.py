"""The way in: what the command `flaxen` calls."""

import sys

from flaxen.cli import process
from flaxen.malloc import restart_with_tuned_malloc

COMPUTING = {"train", "eval", "generate", "embed", "demo", "replay"}  # commands whose time is XLA's


def main() -> None:
    """`flaxen.cli.main.main`, in a process that is set up for it (see flaxen.cli.process)."""
    asked_for_help = {"-h", "--help"} & set(sys.argv)
    if sys.argv[1:] and sys.argv[1] in COMPUTING and not asked_for_help and process.enabled("malloc"):
        restart_with_tuned_malloc()
    process.cache_compilations()
    process.quiet_images()
    from flaxen.cli.main import main as run  # the flags of all commands: not before

    run()
