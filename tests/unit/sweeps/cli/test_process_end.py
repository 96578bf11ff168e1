"""A command ends although its task has left something for which Python waits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from tests.time_limits import scaled

COMMAND = """
import atexit, concurrent.futures, multiprocessing, sys, threading, time, types
from sweeps.cli import app, process_end

process_end._SECONDS = 0.5

def task():
    sys.modules["torch"] = types.ModuleType("torch")  # a task has run in this process
    {left}
    print("done")
    sys.exit({code})

app.app = task
app.main()
"""


@pytest.mark.parametrize(
    ("left", "named", "code"),
    [
        (
            "threading.Thread(target=time.sleep, args=(60,), name='prefetch').start()",
            "'prefet.*",
            0,
        ),
        ("concurrent.futures.ThreadPoolExecutor().submit(time.sleep, 60)", "'ThreadPoolE.*'", 3),
        ("atexit.register(time.sleep, 60)", "a function of atexit", 3),
        ("multiprocessing.Process(target=time.sleep, args=(60,)).start()", r"process \d+", 0),
    ],
    ids=["thread", "executor", "atexit", "process"],
)
def test_command_ends_with_its_exit_code(left: str, named: str, code: int) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.format(left=left, code=code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert time.monotonic() - began < scaled(30)
    assert (done.returncode, done.stdout) == (code, "done\n")
    assert re.fullmatch(rf"the task left .*{named} running; .* daemon=True\n", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--help"], 0), (["list"], 2)],
)
def test_help_is_shown_where_files_cannot_be_kept_private(arguments: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sweeps.entry", *arguments],
        env={**os.environ, "SWEEP_UMASK": "none"},
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert done.returncode == code, done.stderr
    assert bool(done.stdout) == (code == 0)
    assert ("is no umask" in done.stderr) == (code == 2)
