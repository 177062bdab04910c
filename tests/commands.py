"""Run the `flaxen` command in tests, in this process or in a child process."""

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
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """Standard error without the frames and line breaks of rich."""
        return " ".join(re.sub("[│╭╮╰╯─]", " ", self.err).split())


def command(*arguments: object) -> Done:
    """Run `flaxen …` in this process, because a new one takes seconds to start."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["flaxen", *map(str, arguments)])
        patch.setattr("flaxen.train.loop.peak", lambda: 1e12)  # measuring the peak FLOP/s takes longer than training
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


# Runs several commands in one new process, without the type checker of the tests, and with an optional file size limit.
CHILD = """
import contextlib, io, json, resource, sys
import jax
import flaxen.cli.build, flaxen.train.loop
from flaxen.cli.main import main

flaxen.train.loop.peak = lambda: 1e12
limit, commands = json.loads(sys.argv[1])
if limit:
    # Read the compilation cache of the tests but write nothing to it: the limit would truncate its files.
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
    """Run commands in one new process; `limit` is the largest file in bytes that it may write (0: no limit)."""
    request = json.dumps([limit, [list(map(str, arguments)) for arguments in commands]])
    env = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", CHILD, request], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr  # printed by a thread
    return [Done(*json.loads(line)) for line in done.stdout.splitlines()]
