"""The command line, run by tests."""

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from flaxen.cli.main import main


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """Without the frame and the line breaks that a terminal gets."""
        return " ".join(re.sub("[│╭╮╰╯─]", " ", self.err).split())


def command(*arguments: object) -> Done:
    """`flaxen …` in this process: another one takes seconds to start."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["flaxen", *map(str, arguments)])
        patch.setattr("flaxen.train.loop.peak", lambda: 1e12)  # measuring it takes longer than the training
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


# Several commands in one fresh process, which has no type checker, and can have a limit on the size of files.
CHILD = """
import contextlib, io, json, resource, sys
import jax
import flaxen.cli.build, flaxen.train.loop
from flaxen.cli.main import main

flaxen.train.loop.peak = lambda: 1e12
limit, commands = json.loads(sys.argv[1])
if limit:
    # The tests' compiled programs are read, but none is written: half of one would be.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for arguments in commands:
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["flaxen", *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def child(*commands: list[object], limit: int = 0) -> list[Done]:
    given = json.dumps([limit, [list(map(str, one)) for one in commands]])
    env = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", CHILD, given], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr  # of a thread
    return [Done(*json.loads(line)) for line in done.stdout.splitlines()]
