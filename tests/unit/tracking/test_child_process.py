"""A child process for one piece of work: its reply, its failure, and its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sweeps.engine.child_process import ChildFailed, ChildProcess, run_child
from tests.integration.commandline import wait_until

Write = Callable[[str], dict[str, str]]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the module `work`, and return the environment in which it is found."""

    def written(code: str) -> dict[str, str]:
        (tmp_path / "work.py").write_text(code)
        return {"PYTHONPATH": str(tmp_path)}

    return written


def test_requests_and_replies_are_lines(write: Write) -> None:
    code = (
        "import sys\nfor line in sys.stdin: print(sys.argv[1], line.strip())\nprint('cut', end='')"
    )
    with ChildProcess("work", "to", requests=["one", "two"], environment=write(code)) as child:
        assert child.reply() == ["to one", "to two"], "a line without its end is none"
    assert child.code == 0


def test_reply_ends_at_an_empty_line_and_the_child_with_it(write: Write) -> None:
    code = (
        "import subprocess, sys\n"
        "held = subprocess.Popen(['sleep', '600'])\n"
        "print(held.pid)\nprint(flush=True)"
    )
    with ChildProcess("work", environment=write(code)) as child:
        (held,) = child.reply()
    wait_until(lambda: not psutil.pid_exists(int(held)) or _is_dead(int(held)))


def _is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("code", "number", "reason"),
    [
        ("import sys; print('why', file=sys.stderr); sys.exit(4)", 4, "why"),
        ("import sys; sys.exit(3)", 3, "its process ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", -9, "its process was ended by SIGKILL, probably"),
        ("raise ValueError('token=AKIAIOSFODNN7EXAMPLE')", 1, "ValueError: token="),
    ],
)
def test_failure_has_its_reason(
    write: Write, monkeypatch: pytest.MonkeyPatch, code: str, number: int, reason: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", write(code)["PYTHONPATH"])
    with pytest.raises(ChildFailed) as error:
        run_child("work")
    assert error.value.code == number
    assert str(error.value).startswith(reason)
    assert "AKIAIOSFODNN7EXAMPLE" not in str(error.value)


def test_child_that_nobody_waits_for_ends(write: Write) -> None:
    with ChildProcess("work", environment=write("import time; time.sleep(600)")) as child:
        pass
    assert child.code == -9
