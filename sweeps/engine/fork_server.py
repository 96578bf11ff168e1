"""Workers that begin where another process has come to already.

A worker of Ray's is a Python that imports torch before its first trial: some three seconds of a
processor for each of them, and again for each that takes the place of one that was lost. Here one
process imports it once, beside the driver that still loads, and every worker is a fork of it.

    driver -- starts --> fork server (torch is imported, nothing else has happened)
       `- Ray -- starts --> `worker_start` -- asks --> fork server -- forks --> the worker

The server imports nothing of Ray, whose settings a process reads once, and of a task. It has one
thread of Python, as a fork asks for, and never touches a GPU. It ends with the driver, whatever
ends that, and its forks end with it, and what these have started. What a fork had started ends
with it, too, and the driver is told how it ended. Where there is none, as on the
nodes of a cluster or in a sandbox that forbids it, a worker starts as Ray starts it. What must not
live here: what a worker does.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import random
import resource
import runpy
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import psutil

from sweeps.engine import worker_launcher
from trainable.lazy_imports import load_training

WORKER_START = Path(worker_launcher.__file__)
"""The program that Ray is to start instead of its own."""

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER
_OVER = signal.SIGUSR1
"""Tells the server that its driver has ended, or needs it no more."""
_THREADS = "OMP_NUM_THREADS"
"""Ray sets it for each worker, before that imports anything, unless somebody else has."""
_SECONDS_TO_ASK = 5.0
_SECONDS_TO_END = 5.0

_ends: BinaryIO | None = None
"""Where this process' server writes how each of its workers ended: one `PID EXIT_CODE` a line."""
_exit_codes: dict[int, int] = {}


def exit_code(pid: int, patience: float) -> int | None:
    """Return how a worker ended, negative for a signal; None where that is not known.

    Args:
        patience: Seconds to wait for it: Ray may hear of the end before its parent does.
    """
    if _ends is None:
        return None
    deadline = time.monotonic() + patience
    while True:
        while line := _ends.readline():
            ended, code = map(int, line.split())
            _exit_codes[ended] = code
        if pid in _exit_codes or time.monotonic() > deadline:
            return _exit_codes.get(pid)
        time.sleep(0.02)


@contextmanager
def serving(threads: int, hidden_env: Iterable[str] = ()) -> Iterator[None]:
    """A fork server for as long as the context is open, if this system has what it takes; Ray
    finds it in the environment.

    Args:
        threads: Of each worker's numerical libraries, which settle that when they are loaded.
        hidden_env: Environment variables that no worker may find anywhere.
    """
    # Everybody may read the name of a socket, and its secret nowhere.
    address, server = f"gradsweep-{secrets.token_hex(16)}:{secrets.token_hex(16)}", None
    if sys.platform == "linux":  # no other one ends a process with its parent
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            server = _start(address, threads, hidden_env)
    if server is None:
        yield
        return
    os.environ[worker_launcher.VARIABLE] = address
    try:
        yield
    finally:
        _forget_ends()
        del os.environ[worker_launcher.VARIABLE]
        server.send_signal(_OVER)
        try:
            server.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _forget_ends() -> None:
    global _ends
    if _ends is not None:
        _ends.close()
    _ends = None
    _exit_codes.clear()


def _start(address: str, threads: int, hidden_env: Iterable[str]) -> subprocess.Popen[bytes]:
    # What a process was started with stays to be read for as long as it lives.
    kept = {key: value for key, value in os.environ.items() if key not in set(hidden_env)}
    global _ends
    # It listens before there is anybody: who asks meanwhile waits, as for imports of its own.
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        contextlib.ExitStack() as stack,
    ):
        listener.bind(worker_launcher.place(address))
        listener.listen(socket.SOMAXCONN)
        heard, told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        ends = stack.enter_context(os.fdopen(heard, "rb"))
        stack.callback(os.close, told)
        numbers = [listener.fileno(), told]
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, *map(str, numbers), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what torch says when it is imported, workers would hide
            env={_THREADS: str(threads), **kept, worker_launcher.VARIABLE: address},
            pass_fds=numbers,
            process_group=0,  # a terminal's signals are for its driver
        )
        stack.pop_all()
        os.close(told)
        _ends = ends
        return server


class _Server:
    """Forks a worker for each connection, and tells it how that worker ended.

    Args:
        address: What who asks must know.
        told: The file that the driver reads how each worker ended from.
    """

    def __init__(self, listener: socket.socket, address: str, told: int) -> None:
        self._told = told
        self._listener = listener
        self._address = address
        self._pid = os.getpid()
        self._workers: dict[int, socket.socket] = {}
        self._ended, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> NoReturn:
        """Fork until the end."""
        signal.signal(_OVER, lambda *_: self._leave())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            for source in (self._listener, self._ended):
                selector.register(source, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.fileobj == self._ended:
                        self._collect(selector)
                    elif self._workers.get(key.data) is key.fileobj:  # else collected just now
                        selector.unregister(key.fileobj)
                        self._hear(key.data)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # no more files may be open; a worker's end closes some
            time.sleep(0.1)
            return
        streams: list[int] = []
        try:
            if worker_launcher.peer(connection) != os.geteuid():
                raise PermissionError
            connection.settimeout(_SECONDS_TO_ASK)  # all others wait meanwhile
            wish = worker_launcher.receive(connection, streams)
            connection.settimeout(None)
            known = str(wish.get("address")).encode()
            if not hmac.compare_digest(known, self._address.encode()):
                raise PermissionError
            pid = os.fork()
        # It is gone, or nobody of ours; or there is no room.
        except (OSError, ValueError, RecursionError):
            connection.close()  # without an answer its worker starts as Ray starts it
            pid = -1
        if pid == 0:
            selector.close()
            self._become(wish, streams, connection)
        for stream in streams:
            os.close(stream)
        if pid < 0:
            return
        with contextlib.suppress(OSError):  # as in the fork, whoever comes first
            os.setpgid(pid, pid)
        self._workers[pid] = connection
        selector.register(connection, selectors.EVENT_READ, pid)

    def _hear(self, pid: int) -> None:
        """Who asked for a worker has ended, and Ray takes the worker for ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # not yet collected: the number is no other's

    def _leave(self) -> NoReturn:
        """End all workers with what they have started, and this process."""
        for pid in list(self._workers):
            self._hear(pid)
        os._exit(0)

    def _collect(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._ended, 512):
                pass
        adopted = False
        with contextlib.suppress(ChildProcessError):  # there are none any more
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                # Before its number may be another's. What it has started holds its connections,
                # by which Ray would take it for alive.
                connection = self._workers.pop(ended.si_pid, None)
                if connection is not None:
                    self._hear(ended.si_pid)
                _, status = os.waitpid(ended.si_pid, 0)
                if connection is not None:
                    self._tell(selector, connection, ended.si_pid, status)
                adopted = True
        if adopted:
            self._end_adopted()

    def _tell(
        self, selector: selectors.BaseSelector, connection: socket.socket, pid: int, status: int
    ) -> None:
        """Say how a worker ended, to who asked for it and to the driver."""
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):  # nobody reads, or it is full
            os.write(self._told, f"{pid} {code}\n".encode())
        with contextlib.suppress(KeyError):  # heard already
            selector.unregister(connection)
        with connection, contextlib.suppress(OSError):  # it is gone as well
            connection.sendall(worker_launcher.ENDED + bytes([code & 0xFF]))

    def _end_adopted(self) -> None:
        """End what workers that have ended had started, in whatever group: it is this process'
        now. What that has started comes here in turn.
        """
        for child in psutil.Process().children():
            if child.pid not in self._workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)

    def _become(
        self, wish: Mapping[str, Any], streams: list[int], asker: socket.socket
    ) -> NoReturn:
        """Be the worker from here on, and tell who asked for it once that is so."""
        _end_with(self._pid, signal.SIGKILL)
        _adopt_orphans()  # else they would be the server's, which takes them for left behind
        self._listener.close()
        os.close(self._told)
        for connection in self._workers.values():
            connection.close()
        signal.set_wakeup_fd(-1)
        os.close(self._ended)
        os.close(self._wake)
        for number in (_OVER, signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setpgid(0, 0)
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
            os.close(stream)
        _take_over(wish)
        with asker:
            asker.sendall(worker_launcher.FORKED)
        random.seed()  # what a fork would share with its siblings
        numpy: Any = sys.modules["numpy"]
        numpy.random.seed()
        torch: Any = sys.modules["torch"]
        torch.default_generator.seed()
        program, *arguments = wish["command"]
        sys.argv = [program, *arguments]
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
        sys.exit()


def _take_over(wish: Mapping[str, Any]) -> None:
    """Take over what a process has of the one that starts it."""
    os.environ.clear()
    os.environ.update(wish["environment"])
    os.chdir(wish["directory"])
    os.umask(wish["umask"])
    os.setpriority(os.PRIO_PROCESS, 0, wish["niceness"])
    Path(worker_launcher.OOM_SCORE).write_text(wish["oom_score"])
    for name, limits in wish["limits"].items():
        with contextlib.suppress(ValueError, OSError):  # above what this process may have
            resource.setrlimit(getattr(resource, name), tuple(limits))
    signal.pthread_sigmask(signal.SIG_SETMASK, wish["blocked"])


def _end_with(parent: int, sent: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent has ended."""
    import ctypes

    if ctypes.CDLL(None).prctl(_DEATH_SIGNAL, sent) != 0 or os.getppid() != parent:
        os._exit(1)  # it would outlive it, or has already


def _adopt_orphans() -> None:
    """Be the parent of whatever processes below this one lose theirs."""
    import ctypes

    ctypes.CDLL(None).prctl(_ADOPT, 1)


def _main(listener: int, told: int, driver: int) -> None:
    signal.signal(_OVER, signal.SIG_DFL)  # whatever the driver's was
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [_OVER])
    _end_with(driver, _OVER)
    _adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the driver's to answer
    load_training()
    address = os.environ.pop(worker_launcher.VARIABLE)
    _Server(socket.socket(fileno=listener), address, told).serve()


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
