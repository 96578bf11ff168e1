"""Start a process as a fork of the driver's fork server, or as usual without one.

    python worker_launcher.py default_worker.py ARGUMENTS...
    python worker_launcher.py -m MODULE ARGUMENTS...

A raylet runs the first instead of Ray's own `setup_worker.py`, the driver the second for a module
that needs torch. It lives and ends as the fork does; if it is killed, the server kills the fork.
What must not live here: code that only the server needs, as each import delays a start.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # this directory: its modules would shadow others of the same name

import argparse
import contextlib
import json
import os
import resource
import signal
import socket
import struct
from pathlib import Path
from typing import Any

VARIABLE = "GRADSWEEP_FORK_SERVER"
"""The environment variable with the server's address: its socket's name, a colon, and the secret
that each request must contain."""
OOM_SCORE = "/proc/self/oom_score_adj"
"""How early the kernel kills a process when memory is short; Ray has its workers killed first."""

MODULE = "-m"
"""The first argument if a module is to run instead of Ray's program."""
FORKED = b"f"
"""The answer of a forked worker that is ready."""
ENDED = b"e"
"""The server's answer when the worker has ended; the exit code follows."""

_SECONDS_TO_FORK = 45.0  # Ray waits for a minute; a server imports for seconds when it begins
_LENGTH = 8  # bytes of the prefix that holds the length of the request
_MOST_BYTES = 1 << 24  # an environment has a few thousand bytes
_LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


def socket_name(address: str) -> bytes:
    """Return the name of a server's abstract socket, which ends with the server."""
    return b"\0" + address.partition(":")[0].encode()


def peer(connection: socket.socket) -> int:
    """Return the user id of the peer; to be checked, because any user can bind a free name."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    user: int = struct.unpack("3i", credentials)[1]
    return user


def receive(connection: socket.socket, streams: list[int]) -> dict[str, Any]:
    """Read the request that `_ask` sent."""
    head, received, _, _ = socket.recv_fds(connection, _LENGTH, 3)
    streams += received
    length, body = int.from_bytes(head, "big"), b""
    if length > _MOST_BYTES:
        raise ValueError("not a request")
    while len(body) < length:
        if not (part := connection.recv(length - len(body))):
            break
        body += part
    if not isinstance(request := json.loads(body), dict):
        raise ValueError("not a request")
    return request


def _ask(
    connection: socket.socket, address: str, command: list[str], added: dict[str, str]
) -> int:
    """Request a worker from the fork server, and wait until it ends."""
    connection.settimeout(_SECONDS_TO_FORK)
    connection.connect(socket_name(address))
    if peer(connection) != os.geteuid():
        raise PermissionError("the socket is another user's")
    umask = os.umask(0)
    os.umask(umask)
    request = json.dumps(
        {
            "address": address,
            "command": command,
            "environment": {**os.environ, **added},
            "directory": os.getcwd(),
            "umask": umask,
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "oom_score": Path(OOM_SCORE).read_text(),
            "limits": {name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        }
    ).encode()
    socket.send_fds(connection, [len(request).to_bytes(_LENGTH, "big")], [0, 1, 2])
    connection.sendall(request)
    if connection.recv(1) != FORKED:
        raise ConnectionError("no worker was forked")
    connection.settimeout(None)
    with contextlib.suppress(ConnectionError):  # the server has ended, and the worker with it
        if connection.recv(1) == ENDED:
            return connection.recv(1)[0]
    return -signal.SIGKILL & 0xFF


def _run_module(arguments: list[str]) -> None:
    """Run a module as `python -P -m` does, and end with its exit code or by its signal."""
    code = None
    if address := os.environ.pop(VARIABLE, None):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with connection, contextlib.suppress(OSError):  # the server has ended
            code = _ask(connection, address, arguments, {})
    if code is not None:
        if 1 < (number := 256 - code) < signal.NSIG:  # 255 is what most mean by -1
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the module's process left one
            os.kill(os.getpid(), number)
        sys.exit(code)
    os.execv(sys.executable, [sys.executable, "-P", *arguments])


def _main(arguments: list[str]) -> None:
    if arguments[0] == MODULE:
        _run_module(arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", dest="context", default="{}")
    parser.add_argument("--language")
    parser.add_argument("--worker-type", default="WORKER")  # workers of other types move objects
    options, command = parser.parse_known_args(arguments)
    context = json.loads(options.context)
    added = context.pop("env_vars", None) or {}
    if context.get("py_executable") == sys.executable:
        del context["py_executable"]
    address = os.environ.get(VARIABLE)
    if address and not any(context.values()) and options.worker_type == "WORKER":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with connection, contextlib.suppress(OSError):  # the server has ended
            sys.exit(_ask(connection, address, command, added))
        if os.environ.get("RAY_RAYLET_PID") not in (None, str(os.getppid())):
            sys.exit(1)  # the raylet has ended, too, and so has its driver
    setup_worker = os.path.join(os.path.dirname(command[0]), "setup_worker.py")
    os.execv(sys.executable, [sys.executable, "-P", setup_worker, *arguments])


if __name__ == "__main__":
    _main(sys.argv[1:])
