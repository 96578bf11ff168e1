"""ProcessState: the process-wide state that a task can change, restored for the next trial.

A worker process runs one trial after the other. If something cannot be restored, the worker is
replaced before the next trial begins. What must not live here: torch's state (`global_state.py`).
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import locale
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import psutil

_THREADS_SECONDS = 0.5
"""How long to wait until all threads that a trial left behind have ended."""
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_STREAMS = (0, 1, 2)
_LIBRARIES = {"torch", "tqdm", "ray"}
"""Libraries whose threads and signal handlers stay for the next trial."""
_COMPILE_WORKER = "torch/_inductor/compile_worker"
_HELPERS = {
    "multiprocessing.resource_tracker": ("_resource_tracker", "_pid"),
    "multiprocessing.forkserver": ("_forkserver", "_forkserver_pid"),
}
"""Where Python's own modules keep the ids of helpers that live as long as this process. A helper
is known by its id: until it has started its program, it has the command line of its parent.
"""


class ProcessState:
    """The process-wide state of Python and of the operating system when this object is made."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._children = set(_children())
        self._streams = {number: _identity(number) for number in _STREAMS}
        self._restore: list[tuple[str, Callable[[], object]]] = [
            (name, capture()) for name, capture in _CAPTURED
        ]

    def restore(self) -> list[str]:
        """Restore everything, and kill the child processes that were started since.

        Returns:
            What could not be restored, in words.
        """
        left = self.end_children()
        for name, restore in self._restore:
            try:
                restore()
            except (OSError, ValueError, TypeError, RuntimeError, locale.Error) as problem:
                left.append(f"{name} ({problem})")
        if any(_identity(number) != before for number, before in self._streams.items()):
            left.append("its standard streams")
        if threads := list(self._threads_left()):
            left.append(f"{len(threads)} threads ({threads[0]})")
        open_files = _num_open_files()
        if open_files is not None and open_files > resource.getrlimit(_FILES)[0] / 2:
            left.append(f"{open_files} open files")
        return left

    def end_children(self) -> list[str]:
        """Kill the child processes that were started since.

        Returns:
            What was killed, in words. The task may still refer to it, as a pool does.
        """
        started = [child for child in _children() if child not in self._children]
        if not started:
            return []
        named = [f"{len(started)} child processes ({_name(started[0])})"]
        # torch's handler would raise here when a data loader's workers end.
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            while started:  # a child may start another one meanwhile
                for child in started:
                    with contextlib.suppress(psutil.Error):
                        child.kill()
                psutil.wait_procs(started, timeout=_THREADS_SECONDS)
                known = set(started)
                started = [child for child in _children() if child not in self._children | known]
        finally:
            signal.signal(signal.SIGCHLD, handler if handler is not None else signal.SIG_DFL)
        return named

    def _threads_left(self) -> Iterator[str]:
        deadline = time.monotonic() + _THREADS_SECONDS
        for thread in threading.enumerate():
            # A _DummyThread stands for a thread that Python did not start, such as torch's.
            if thread in self._threads or type(thread).__name__ == "_DummyThread":
                continue
            target = getattr(thread, "_target", None)
            if _package(type(thread)) in _LIBRARIES or _package(target) in _LIBRARIES:
                continue
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                yield thread.name


def _package(made_in: Any) -> str:
    return str(getattr(made_in, "__module__", "")).partition(".")[0]


def _children() -> list[psutil.Process]:
    """Return the live descendants of this process, without its `_HELPERS`."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there are none; psutil would take milliseconds to find that out
        return []
    found, compilers, helpers = [], set(), set(_helpers())
    for child in psutil.Process().children(recursive=True):
        if child.pid in helpers:
            continue
        with contextlib.suppress(psutil.Error):
            parent, command = child.ppid(), " ".join(child.cmdline())
            if parent in compilers or _COMPILE_WORKER in command:
                compilers.add(child.pid)
            elif child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def _helpers() -> Iterator[int | None]:
    for name, (helper, number) in _HELPERS.items():
        yield getattr(getattr(sys.modules.get(name), helper, None), number, None)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:  # it has ended meanwhile
        return str(process.pid)


def _identity(number: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _num_open_files() -> int | None:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return None


_FILES = resource.RLIMIT_NOFILE


def _directory() -> Callable[[], None]:
    before = os.getcwd()
    return lambda: os.chdir(before)


def _umask() -> Callable[[], int]:
    before = os.umask(0)
    os.umask(before)
    return lambda: os.umask(before)


def _environment() -> Callable[[], None]:
    before = dict(os.environ)

    def restore() -> None:
        if dict(os.environ) != before:
            os.environ.clear()
            os.environ.update(before)

    return restore


def _signals() -> Callable[[], None]:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    alarm = any(signal.getitimer(signal.ITIMER_REAL))

    def restore() -> None:
        if not alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            now = signal.getsignal(number)
            if now is handler or _package(now) in _LIBRARIES:
                continue
            if handler is None:  # set from C: Python cannot restore it
                raise RuntimeError(signal.strsignal(number))
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return restore


def _limits() -> Callable[[], None]:
    before = {limit: resource.getrlimit(limit) for limit in _LIMITS}

    def restore() -> None:
        for limit, values in before.items():
            if resource.getrlimit(limit) != values:
                resource.setrlimit(limit, values)

    return restore


def _priority() -> Callable[[], None]:
    before = os.getpriority(os.PRIO_PROCESS, 0)

    def restore() -> None:
        if os.getpriority(os.PRIO_PROCESS, 0) != before:
            os.setpriority(os.PRIO_PROCESS, 0, before)

    return restore


def _objects() -> Callable[[], None]:
    """Capture streams, hooks, built-in functions, `sys.path` and `sys.argv`."""
    names = ("stdin", "stdout", "stderr", "excepthook", "displayhook", "unraisablehook")
    held: list[tuple[Any, str, Any]] = [(sys, name, getattr(sys, name)) for name in names]
    held.append((threading, "excepthook", threading.excepthook))
    held += [(builtins, name, value) for name, value in vars(builtins).items() if name != "_"]
    lists = [(sys.path, list(sys.path)), (sys.argv, list(sys.argv))]
    paths, arguments = sys.path, sys.argv

    def restore() -> None:
        for owner, name, value in held:
            if getattr(owner, name, None) is not value:
                setattr(owner, name, value)
        sys.path, sys.argv = paths, arguments
        for one, values in lists:
            one[:] = values

    return restore


def _settings() -> Callable[[], None]:
    """Capture settings that have a getter and a setter."""
    collects, thresholds = gc.isenabled(), gc.get_threshold()
    depth, interval = sys.getrecursionlimit(), sys.getswitchinterval()
    trace, profile = sys.gettrace(), sys.getprofile()
    timeout = socket.getdefaulttimeout()
    locale_name = locale.setlocale(locale.LC_ALL)
    method = multiprocessing.get_start_method(allow_none=True)

    def restore() -> None:
        (gc.enable if collects else gc.disable)()
        gc.set_threshold(*thresholds)
        sys.setrecursionlimit(depth)
        sys.setswitchinterval(interval)
        if sys.gettrace() is not trace:
            sys.settrace(trace)
        if sys.getprofile() is not profile:
            sys.setprofile(profile)
        socket.setdefaulttimeout(timeout)
        locale.setlocale(locale.LC_ALL, locale_name)
        if multiprocessing.get_start_method(allow_none=True) != method:
            multiprocessing.set_start_method(method, force=True)

    return restore


def _logging() -> Callable[[], None]:
    root = logging.getLogger()
    handlers, level, disabled = list(root.handlers), root.level, root.manager.disable

    def restore() -> None:
        root.handlers[:] = handlers  # a handler that the task added may write to its trial's log
        root.setLevel(level)
        logging.disable(disabled)

    return restore


def _warnings() -> Callable[[], None]:
    filters, show = list(warnings.filters), warnings.showwarning

    def restore() -> None:
        warnings.showwarning = show
        if list(warnings.filters) != filters:
            warnings.resetwarnings()  # also forgets which warnings were shown
            warnings.filters[:] = filters  # type: ignore[index]  # a list, though declared otherwise

    return restore


_CAPTURED: list[tuple[str, Callable[[], Callable[[], object]]]] = [
    ("its working directory", _directory),
    ("its umask", _umask),
    ("its environment", _environment),
    ("its signal handlers", _signals),
    ("its resource limits", _limits),
    ("its priority", _priority),
    ("its streams", _objects),
    ("its settings", _settings),
    ("its logging", _logging),
    ("its warnings", _warnings),
]
