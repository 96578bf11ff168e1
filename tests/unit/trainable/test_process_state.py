"""Process state that a task changes is restored or named before the next trial."""

from __future__ import annotations

import builtins
import gc
import locale
import logging
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.time_limits import scaled
from trainable.process_state import ProcessState


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _in_a_directory_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()


def _log_to_a_closed_file(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w", encoding="utf-8") as file:
        logging.getLogger().addHandler(logging.StreamHandler(file))
    logging.disable(logging.CRITICAL)


CHANGES: dict[str, tuple[Callable[[Path], object], Callable[[], Any]]] = {
    "a directory": (lambda _: os.chdir("/"), os.getcwd),
    "a directory that is gone": (_in_a_directory_that_is_gone, os.getcwd),
    "umask": (lambda _: os.umask(0o777), _umask),
    "no environment": (lambda _: os.environ.clear(), lambda: dict(os.environ)),
    "a variable": (lambda _: os.environ.update(MORE="1"), lambda: dict(os.environ)),
    "a signal": (
        lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        lambda: signal.getsignal(signal.SIGTERM),
    ),
    "blocked signals": (
        lambda _: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]),
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []),
    ),
    "a limit": (
        lambda _: resource.setrlimit(
            resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
        ),
        lambda: resource.getrlimit(resource.RLIMIT_CORE),
    ),
    "sys.path": (lambda _: sys.path.insert(0, "elsewhere"), lambda: list(sys.path)),
    "sys.argv": (lambda _: setattr(sys, "argv", ["x"]), lambda: (id(sys.argv), list(sys.argv))),
    "print": (lambda _: setattr(builtins, "print", id), lambda: print),
    "sys.stdout": (lambda _: setattr(sys, "stdout", None), lambda: sys.stdout),
    "no collection": (lambda _: gc.disable(), gc.isenabled),
    "recursion": (lambda _: sys.setrecursionlimit(5000), sys.getrecursionlimit),
    "a time limit": (lambda _: socket.setdefaulttimeout(0.5), socket.getdefaulttimeout),
    "locale": (
        lambda _: locale.setlocale(locale.LC_ALL, "C"),
        lambda: locale.setlocale(locale.LC_ALL),
    ),
    "a way to start": (
        lambda _: multiprocessing.set_start_method("spawn", force=True),
        lambda: multiprocessing.get_start_method(allow_none=True),
    ),
    "warnings": (lambda _: warnings.simplefilter("ignore"), lambda: list(warnings.filters)),
    "logging": (
        _log_to_a_closed_file,
        lambda: (list(logging.getLogger().handlers), logging.root.manager.disable),
    ),
}


@pytest.fixture(autouse=True)
def _not_for_other_tests():
    here, state = os.getcwd(), ProcessState()
    yield
    os.chdir(here)
    state.restore()


@pytest.mark.parametrize("change", CHANGES)
def test_process_state_changed_by_a_task_is_restored(tmp_path: Path, change: str) -> None:
    do, look = CHANGES[change]
    if change == "locale":
        locale.setlocale(locale.LC_ALL, "C.UTF-8")
    elif change == "a limit" and resource.getrlimit(resource.RLIMIT_CORE)[0] == 0:
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (4096 if hard else 0, hard))
    before, state = look(), ProcessState()
    do(tmp_path)
    try:
        changed = look()
    except FileNotFoundError:  # the directory that is gone
        changed = None
    assert changed != before or change == "a limit", "otherwise equality would say nothing"
    assert state.restore() == []
    assert look() == before


def test_processes_are_ended_with_their_children() -> None:
    state = ProcessState()
    with subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        below = psutil.Process(int(child.stdout.readline()))
        assert state.restore()[0].endswith("(sh)")
        child.wait(scaled(5))
        psutil.wait_procs([below], timeout=scaled(5))
        assert not below.is_running() or below.status() == psutil.STATUS_ZOMBIE
    assert state.restore() == []


def test_helpers_of_the_process_stay() -> None:
    from multiprocessing import resource_tracker

    state = ProcessState()
    tracker: Any = resource_tracker
    tracker.ensure_running()
    assert psutil.pid_exists(tracker._resource_tracker._pid)
    assert state.restore() == []
    assert psutil.Process(tracker._resource_tracker._pid).status() != psutil.STATUS_ZOMBIE


def test_a_helper_that_has_just_been_forked_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from multiprocessing import resource_tracker

    tracker = resource_tracker._resource_tracker
    monkeypatch.setattr(tracker, "_pid", None)
    state = ProcessState()
    helper = subprocess.Popen(["sleep", "600"])  # its program does not say what it is
    monkeypatch.setattr(tracker, "_pid", helper.pid)
    left, ended = state.restore(), helper.poll()
    helper.kill()
    helper.wait()
    assert left == []
    assert ended is None


def test_running_threads_are_named() -> None:
    state, over = ProcessState(), threading.Event()
    soon = threading.Thread(target=time.sleep, args=(0.05,))
    late = threading.Thread(target=over.wait, name="late", daemon=True)
    soon.start()
    late.start()
    try:
        assert state.restore() == ["1 threads (late)"]
    finally:
        over.set()
        late.join()
    assert state.restore() == []


CLOSING = """
import os
from trainable.process_state import ProcessState
state = ProcessState()
os.close(1)
print(*state.restore(), file=open(2, "w"))
"""


def test_missing_standard_streams_are_named() -> None:
    said = subprocess.run([sys.executable, "-c", CLOSING], capture_output=True, text=True)
    assert said.stderr == "its standard streams\n"
