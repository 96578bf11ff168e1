"""The end of a command: although its task has left something, or nobody reads its output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.commandline import SWEEP
from tests.time_limits import scaled
from tests.unit.sweeps.sweep_factory import MadeSweep

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


SAYS = """
import os, sys
from sweeps.cli.process_end import ignore_broken_pipes
ignore_broken_pipes()
for line in range(3):
    print("line", line, flush=True)
    print("error", line, file=sys.stderr, flush=True)
    sys.stdin.readline()
os.write(int(sys.argv[1]), b"came to its end")
"""


def test_process_survives_a_closed_reader(tmp_path: Path) -> None:
    with (tmp_path / "end").open("w+b") as end:
        process = subprocess.Popen(
            [sys.executable, "-c", SAYS, str(end.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[end.fileno()],
        )
        assert process.stdin
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"line 0\n"
        process.stdout.close()
        assert process.stderr.readline() == b"error 0\n"
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stderr.readline() == b"error 1\n", "only the other one's reader has gone"
        process.stderr.close()
        process.stdin.close()
        assert process.wait(30) == 0
        end.seek(0)
        assert end.read() == b"came to its end"


def _sweep(redirections: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirections}', "sh", SWEEP, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_stdout_only_the_exit_code_tells(
    tmp_path: Path,
) -> None:
    for redirections in (">&-", ">&- 2>&-", "<&- >&- 2>&-"):
        assert _sweep(redirections, "--version").returncode == 0
        done = _sweep(redirections, "status", "unknown", "--root", str(tmp_path))
        assert done.returncode == 2
        assert done.stdout == ""
        assert "Traceback" not in done.stderr


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = MadeSweep(tmp_path, "digits")
    made.add("complete", 0.5)
    made.paths.trial(0).mkdir(parents=True)
    (made.paths.trial(0) / "trial.log").write_text("a line\n")
    return made.paths.root


COMMANDS = [
    "list",
    "trials digits",
    "trials digits --json",
    "show digits 0 --log",
    "doctor --json",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_full_file_is_an_error_in_a_sentence(root: Path, command: str) -> None:
    where = [] if command.startswith("-") else ["--root", str(root)]
    done = _sweep("> /dev/full", *command.split(), *where)
    assert done.returncode == 2
    assert " ".join(done.stderr.split()).endswith(
        "the output of this command could not be written (No space left on device); the file "
        "that receives it needs free space; free some, or redirect the output to another disk"
    )
    assert "Traceback" not in done.stderr


def test_full_file_for_output_and_errors_gives_the_exit_code() -> None:
    assert _sweep("> /dev/full 2>&1", "--version").returncode == 2


@pytest.mark.parametrize("command", ["trials digits --json", "--help"])
def test_closed_pipe_is_quiet(root: Path, command: str) -> None:
    where = [] if command.startswith("-") else ["--root", str(root)]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [SWEEP, *command.split(), *where],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
