"""Fork Ray's workers and other child processes from a process that has imported torch.

    driver -- starts --> fork server (torch is imported, nothing else has happened)
       `- Ray -- starts --> `worker_launcher` -- requests --> fork server -- forks --> the worker

Importing torch takes about three CPU seconds, which each worker would spend, replacements too. The
server imports neither Ray, whose settings a process reads only once, nor a task; it uses no GPU
and has one Python thread, because a fork copies only the thread that forks. It ends with the
driver, its workers with it, and a worker's children with the worker. The driver receives each
worker's exit code. On a cluster's nodes, and in a sandbox that forbids the server, Ray starts the
workers itself. What must not live here: what a worker does.
"""

from __future__ import annotations

import contextlib
import hmac
import os
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
from threading import Thread
from typing import Any, BinaryIO, NoReturn

import psutil

from sweeps.engine import worker_launcher
from tracking.child_process import start_python
from trainable.process_start import adopt_orphans, end_with_parent, load_training
from trainable.seeding import reseed

WORKER_START = Path(worker_launcher.__file__)
"""The program that Ray starts instead of its own."""

_EXIT_SIGNAL = signal.SIGUSR1
"""The signal that tells the server to exit: its driver has ended, or no longer needs it."""
_THREADS = "OMP_NUM_THREADS"
"""Ray sets this variable for each worker that it starts, unless the variable is set already."""
_REQUEST_SECONDS = 5.0
_EXIT_SECONDS = 5.0

_ends: BinaryIO | None = None
"""The pipe into which this process' server writes a line `PID EXIT_CODE` for each ended worker."""
_exit_codes: dict[int, int] = {}


def exit_code(pid: int, patience: float) -> int | None:
    """Return a worker's exit code, negative for a signal; None if it is unknown."""
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
    """Run a fork server while the context is open, if the system supports it."""
    # Every user can read the name of a socket; other users cannot read the secret.
    address, server = f"gradsweep-{secrets.token_hex(16)}:{secrets.token_hex(16)}", None
    if sys.platform == "linux":  # only Linux can end a process with its parent
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            server = _start(address, threads, hidden_env)
    if server is None:
        yield
        return
    Thread(target=_continue, args=[server.pid], daemon=True).start()
    # from here on, Ray's workers find the server
    os.environ[worker_launcher.VARIABLE] = address
    try:
        yield
    finally:
        _forget_ends()
        del os.environ[worker_launcher.VARIABLE]
        server.send_signal(_EXIT_SIGNAL)
        try:
            server.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _continue(server: int) -> None:
    """Continue the server whenever it is stopped (SIGSTOP): its clients would wait for ever."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError):  # it has ended
        while os.waitid(os.P_PID, server, os.WSTOPPED):
            os.kill(server, signal.SIGCONT)


def launcher() -> list[str]:
    """Return the program that starts a module which needs torch, as a fork while a server runs."""
    return [str(WORKER_START)] if worker_launcher.VARIABLE in os.environ else []


def template_command() -> list[str]:
    """Return the command that starts a template of trials."""
    return [sys.executable, "-P", *launcher(), "-m", "trainable.processes.attempt_process"]


def _forget_ends() -> None:
    global _ends
    if _ends is not None:
        _ends.close()
    _ends = None
    _exit_codes.clear()


def _start(address: str, threads: int, hidden_env: Iterable[str]) -> subprocess.Popen[str]:
    # Leave secrets out: /proc shows a process' initial environment for as long as it lives.
    kept = {key: value for key, value in os.environ.items() if key not in set(hidden_env)}
    global _ends
    # The socket listens before the server runs: a worker that connects early waits for the import
    # of torch, as it would for its own.
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        contextlib.ExitStack() as stack,
    ):
        listener.bind(worker_launcher.socket_name(address))
        listener.listen(socket.SOMAXCONN)
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        ends = stack.enter_context(os.fdopen(reader, "rb"))
        stack.callback(os.close, writer)
        numbers = [listener.fileno(), writer]
        server = start_python(
            *("-m", __spec__.name, *map(str, numbers), str(os.getpid())),
            environment={_THREADS: str(threads), **kept, worker_launcher.VARIABLE: address},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # torch's warnings on import, which Ray's workers hide, too
            pass_fds=numbers,
        )
        stack.pop_all()
        os.close(writer)
        _ends = ends
        return server


class _Server:
    """Forks a worker for each connection, and reports the worker's exit code over it."""

    def __init__(self, listener: socket.socket, address: str, ends: int) -> None:
        self._ends = ends
        self._listener = listener
        self._address = address
        self._pid = os.getpid()
        self._workers: dict[int, socket.socket] = {}
        self._ended, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> NoReturn:
        """Fork workers until the process ends."""
        signal.signal(_EXIT_SIGNAL, lambda *_: self._exit())
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
                    elif self._workers.get(key.data) is key.fileobj:  # it has not ended
                        selector.unregister(key.fileobj)
                        self._kill(key.data)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the limit on open files is reached; a worker's end closes some
            time.sleep(0.1)
            return
        streams: list[int] = []
        try:
            if worker_launcher.peer(connection) != os.geteuid():
                raise PermissionError
            connection.settimeout(_REQUEST_SECONDS)  # all other connections wait meanwhile
            request = worker_launcher.receive(connection, streams)
            connection.settimeout(None)
            known = str(request.get("address")).encode()
            if not hmac.compare_digest(known, self._address.encode()):
                raise PermissionError
            pid = os.fork()
        # The client has ended, is not authorized or sent no request; or the fork failed.
        except (OSError, ValueError, RecursionError):
            connection.close()  # without an answer the launcher starts the worker as Ray does
            pid = -1
        if pid == 0:
            selector.close()
            self._become(request, streams, connection)
        for stream in streams:
            os.close(stream)
        if pid < 0:
            return
        with contextlib.suppress(OSError):  # the fork does the same; either may be first
            os.setpgid(pid, pid)
        self._workers[pid] = connection
        selector.register(connection, selectors.EVENT_READ, pid)

    def _kill(self, pid: int) -> None:
        """Kill a worker with its process group.

        Also used when its launcher has ended, because Ray then considers the worker ended.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # not reaped yet, so the id is not reused

    def _exit(self) -> NoReturn:
        """Kill all workers with their child processes, and exit."""
        for pid in list(self._workers):
            self._kill(pid)
        os._exit(0)

    def _collect(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._ended, 512):
                pass
        adopted = False
        with contextlib.suppress(ChildProcessError):  # no child is left
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                # Kill the worker's group before the worker is reaped and its id can be reused.
                # Its children hold its connections open, so Ray would consider the worker alive.
                connection = self._workers.pop(ended.si_pid, None)
                if connection is not None:
                    self._kill(ended.si_pid)
                _, status = os.waitpid(ended.si_pid, 0)
                if connection is not None:
                    self._report_end(selector, connection, ended.si_pid, status)
                adopted = True
        if adopted:
            self._end_adopted()

    def _report_end(
        self, selector: selectors.BaseSelector, connection: socket.socket, pid: int, status: int
    ) -> None:
        """Send a worker's exit code to its launcher and to the driver."""
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):  # the driver has ended, or the pipe is full
            os.write(self._ends, f"{pid} {code}\n".encode())
        with contextlib.suppress(KeyError):  # unregistered when the launcher ended
            selector.unregister(connection)
        with connection, contextlib.suppress(OSError):  # the launcher has ended, too
            connection.sendall(worker_launcher.ENDED + bytes([code & 0xFF]))

    def _end_adopted(self) -> None:
        """Kill the orphaned children of ended workers, in any process group."""
        # The kernel makes orphans children of this process, and then the orphans' own children.
        for child in psutil.Process().children():
            if child.pid not in self._workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)

    def _become(
        self, request: Mapping[str, Any], streams: list[int], launcher: socket.socket
    ) -> NoReturn:
        """Turn this fork into the worker, and tell the launcher."""
        _end_with(self._pid, signal.SIGKILL)
        adopt_orphans()  # otherwise the server adopts and kills them
        self._listener.close()
        os.close(self._ends)
        for connection in self._workers.values():
            connection.close()
        signal.set_wakeup_fd(-1)
        os.close(self._ended)
        os.close(self._wake)
        for number in (_EXIT_SIGNAL, signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setpgid(0, 0)
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
            os.close(stream)
        _apply(request)
        with launcher:
            launcher.sendall(worker_launcher.FORKED)
        reseed()
        program, *arguments = request["command"]
        if program == worker_launcher.MODULE:
            sys.argv = arguments
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [program, *arguments]
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
        sys.exit()


def _apply(request: Mapping[str, Any]) -> None:
    """Apply the environment, directory, limits and priorities that the launcher got from Ray."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    os.umask(request["umask"])
    os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
    Path(worker_launcher.OOM_SCORE).write_text(request["oom_score"])
    for name, limits in request["limits"].items():
        with contextlib.suppress(ValueError, OSError):  # above this process' hard limit
            resource.setrlimit(getattr(resource, name), tuple(limits))
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def _end_with(parent: int, sent: signal.Signals) -> None:
    if not end_with_parent(sent) or os.getppid() != parent:
        os._exit(1)  # this process would outlive its parent, or does already


def _main(listener: int, ends: int, driver: int) -> None:
    signal.signal(_EXIT_SIGNAL, signal.SIG_DFL)  # replace the driver's setting, which is inherited
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [_EXIT_SIGNAL])
    _end_with(driver, _EXIT_SIGNAL)
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the driver handles these
    load_training()
    address = os.environ.pop(worker_launcher.VARIABLE)
    _Server(socket.socket(fileno=listener), address, ends).serve()


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
