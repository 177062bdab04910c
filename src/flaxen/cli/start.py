"""The way in: what the command `flaxen` calls."""

import sys

from flaxen.host import settle_memory

COMPUTING = {"train", "eval", "generate", "demo", "replay"}  # commands whose time is XLA's


def main() -> None:
    """`flaxen.cli.main.main`, in a process whose memory is settled."""
    if sys.argv[1:] and sys.argv[1] in COMPUTING and not {"-h", "--help"} & set(sys.argv):
        settle_memory()
    from flaxen.cli.main import main as run  # the flags of all commands: not before

    run()
