"""Start a worker of Ray's: as a fork of the driver's fork server, or else as Ray does.

    python worker_start.py default_worker.py ARGUMENTS...

is what a raylet runs in the place of Ray's own `setup_worker.py`. It lives as long as the worker
that was forked for it, ends as that one does, and takes it along when it is killed. Each worker
pays for what is imported here. What must not live here: what is only needed by the server.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # this directory: a program finds its neighbours under the names of others

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
"""The environment variable that holds the server's address: where it listens, a colon, and what
it asks who comes to know."""
OOM_SCORE = "/proc/self/oom_score_adj"
"""How soon a process is ended when memory is short; Ray has its workers end first."""

FORKED = b"f"
"""What a worker answers once it is one."""
ENDED = b"e"
"""What a server answers when it is none any more; its exit code follows."""

_SECONDS_TO_FORK = 45.0  # Ray waits for a minute; a server imports for seconds when it begins
_LENGTH = 8  # bytes that say how long the rest is
_MOST_BYTES = 1 << 24  # an environment is a few thousand
_LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


def place(address: str) -> bytes:
    """Return where a server listens: a name and no file, which is gone with the server."""
    return b"\0" + address.partition(":")[0].encode()


def peer(connection: socket.socket) -> int:
    """Return the user at the other end: a name is everybody's who finds it free."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    user: int = struct.unpack("3i", credentials)[1]
    return user


def receive(connection: socket.socket, streams: list[int]) -> dict[str, Any]:
    """Read what `_ask` sent: what the worker is to be.

    Args:
        streams: Its three streams are added to it, also where it raises.

    Raises:
        OSError: The other end is gone.
        ValueError: What came is not whole.
    """
    head, received, _, _ = socket.recv_fds(connection, _LENGTH, 3)
    streams += received
    length, body = int.from_bytes(head, "big"), b""
    if length > _MOST_BYTES:
        raise ValueError("no wish")
    while len(body) < length:
        if not (part := connection.recv(length - len(body))):
            break
        body += part
    if not isinstance(wish := json.loads(body), dict):
        raise ValueError("no wish")
    return wish


def _ask(
    connection: socket.socket, address: str, command: list[str], added: dict[str, str]
) -> int:
    """Have a worker forked, and wait for its end.

    Returns:
        Its exit code; 1 where its server ended before, and the worker with it.

    Raises:
        OSError: There is none: the server is gone, silent, or another user's, or could fork none.
    """
    connection.settimeout(_SECONDS_TO_FORK)
    connection.connect(place(address))
    if peer(connection) != os.geteuid():
        raise PermissionError("another user's")
    umask = os.umask(0)
    os.umask(umask)
    wish = json.dumps(
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
    socket.send_fds(connection, [len(wish).to_bytes(_LENGTH, "big")], [0, 1, 2])
    connection.sendall(wish)
    if connection.recv(1) != FORKED:
        raise ConnectionError("there is no worker")
    connection.settimeout(None)
    with contextlib.suppress(ConnectionError):  # the server is gone, and the worker with it
        if connection.recv(1) == ENDED:
            return connection.recv(1)[0]
    return 1


def _main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", dest="context", default="{}")
    parser.add_argument("--language")
    parser.add_argument("--worker-type", default="WORKER")  # else one that moves objects
    options, command = parser.parse_known_args(arguments)
    context = json.loads(options.context)
    added = context.pop("env_vars", None) or {}
    if context.get("py_executable") == sys.executable:
        del context["py_executable"]
    address = os.environ.get(VARIABLE)
    if address and not any(context.values()) and options.worker_type == "WORKER":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with connection, contextlib.suppress(OSError):  # it has ended
            sys.exit(_ask(connection, address, command, added))
        if os.environ.get("RAY_RAYLET_PID") not in (None, str(os.getppid())):
            sys.exit(1)  # the raylet has ended as well, and so has its driver
    theirs = os.path.join(os.path.dirname(command[0]), "setup_worker.py")
    os.execv(sys.executable, [sys.executable, "-P", theirs, *arguments])


if __name__ == "__main__":
    _main(sys.argv[1:])
