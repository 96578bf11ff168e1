"""A child process for one piece of work: its reply, its failure, and its end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.commandline import wait_until
from tracking.child_process import (
    ChildFailed,
    ChildProcess,
    end_group,
    lower_priority,
    raise_priority,
    run_child,
    start_python,
)

Write = Callable[[str], dict[str, str]]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the module `work`, and return the environment in which it is found."""

    def written(code: str) -> dict[str, str]:
        (tmp_path / "work.py").write_text(code)
        return {**os.environ, "PYTHONPATH": str(tmp_path)}

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
def test_failure_has_its_reason(write: Write, code: str, number: int, reason: str) -> None:
    with pytest.raises(ChildFailed) as error:
        run_child("work", environment=write(code))
    assert error.value.code == number
    assert str(error.value).startswith(reason)
    assert "AKIAIOSFODNN7EXAMPLE" not in str(error.value)


def test_child_that_nobody_waits_for_ends(write: Write) -> None:
    with ChildProcess("work", environment=write("import time; time.sleep(600)")) as child:
        pass
    assert child.code == -9


def test_late_child_is_killed_with_its_children(write: Write) -> None:
    code = "import subprocess; subprocess.run(['sleep', '600'])"  # which keeps standard output
    with pytest.raises(ChildFailed, match=r"^it has not answered for 0\.5 s$"):
        run_child("work", environment=write(code), seconds=0.5)


def test_child_ends_by_itself_within_its_patience(write: Write) -> None:
    code = (
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print(flush=True)\nwhile True: signal.pause()"
    )
    process = start_python("-m", "work", environment=write(code), stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as ready:
        ready.readline()
    end_group(process, 30.0)
    assert process.returncode == 7


def test_each_living_thread_is_no_longer_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    process = start_python("-c", "input()", stdin=subprocess.PIPE)
    lower_priority(process)
    assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
    asked: list[int] = []

    def set_class(thread: int, *_: Any) -> None:
        asked.append(thread)
        if thread != process.pid:
            raise ProcessLookupError  # it has ended since it was listed

    monkeypatch.setattr(os, "listdir", lambda _: ["1", str(process.pid)])
    monkeypatch.setattr(os, "sched_setscheduler", set_class)
    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    raise_priority(process)
    assert asked == [1, process.pid]
    with process:
        process.kill()
    raise_priority(process)
    assert asked == [1, process.pid], "its number may be another process' by now"
