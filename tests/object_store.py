"""An S3 server for one test, and a connection to it that can be cut.

The server is moto's, a process on 127.0.0.1 with its objects in memory: a peer of the protocol
over real HTTP, not S3. It forgets everything when it ends, so what fails is the wire. What must
not live here: what must be true afterwards.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType

import pytest

from tests.time_limits import Deadline, scaled

BUCKET = "sweeps-of-tests"
_SECONDS = 60.0
_CHUNK = 65536


class Wire:
    """A TCP forwarder on 127.0.0.1: what comes in goes on to the server, until it is cut.

    Args:
        server: The port to forward to.
    """

    def __init__(self, server: int) -> None:
        self._server = server
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._fatal: tuple[re.Pattern[bytes], int] | None = None
        self.is_cut = threading.Event()
        threading.Thread(target=self._accept, args=[self._listener], daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Drop every connection and refuse new ones."""
        self.is_cut.set()
        # A listener that a thread waits at goes on listening after `close`.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut_within_upload(self, key: str, after: int) -> None:
        """Cut the wire when the next upload of an object has sent so many bytes, headers included.

        Args:
            key: A regular expression for what the object's key ends with.
        """
        pattern = re.compile(rb"PUT /[^ ?]*" + key.encode() + rb"[? ]")
        self._fatal = (pattern, after)

    def mend(self) -> None:
        """Listen again, at the same port."""
        self._fatal = None
        self.is_cut.clear()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=[self._listener], daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                self._open |= {client, server}
                for source, target, requests in [(client, server, True), (server, client, False)]:
                    threading.Thread(
                        target=self._pump, args=[source, target, requests], daemon=True
                    ).start()

    def _pump(self, source: socket.socket, target: socket.socket, requests: bool) -> None:
        left: int | None = None
        with contextlib.suppress(OSError):
            while chunk := source.recv(_CHUNK):
                if requests and left is None and self._fatal and self._fatal[0].search(chunk):
                    left = self._fatal[1]
                if left is not None and len(chunk) >= left:
                    target.sendall(chunk[:left])
                    self.cut()
                    break
                left = left and left - len(chunk)
                target.sendall(chunk)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
            self._open.discard(end)


class ObjectStore:
    """A running server with one bucket, `BUCKET`; a context manager that ends it."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )
        deadline = Deadline(_SECONDS)
        while True:
            try:
                self.ask("PUT", f"/{BUCKET}")
                break
            except ConnectionRefusedError:
                assert self._process.poll() is None, "the server ended"
                assert not deadline.passed, f"not up within {deadline}"
                time.sleep(0.1)
        self.wire = Wire(self._port)

    def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Send a request past the wire, which must succeed; returns the answer's body."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=scaled(_SECONDS))
        with contextlib.closing(connection):
            connection.request(method, path, body)
            answer = connection.getresponse()
            content = answer.read()
        assert answer.status < 300, (answer.status, content)
        return content

    def objects(self) -> list[str]:
        """The keys of the bucket's objects, without the marks of empty prefixes."""
        listed = self.ask("GET", f"/{BUCKET}?list-type=2").decode()
        return [key for key in re.findall("<Key>(.*?)</Key>", listed) if not key.endswith("/")]

    def empty(self) -> None:
        """Remove every object."""
        self.ask("POST", "/moto-api/reset")
        self.ask("PUT", f"/{BUCKET}")

    @contextlib.contextmanager
    def letting_nobody_in(self) -> Iterator[None]:
        """Meanwhile credentials are checked, and none is known."""
        self.ask("POST", "/moto-api/reset-auth", b"0")
        try:
            yield
        finally:
            self.ask("POST", "/moto-api/reset-auth", b"inf")

    def environment(self) -> dict[str, str]:
        """The variables by which a process finds it, through the wire."""
        return {
            "AWS_ENDPOINT_URL": self.wire.url,
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "geheim-of-tests",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def __enter__(self) -> ObjectStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.wire.cut()
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def named_by_environment(store: ObjectStore) -> Iterator[None]:
    """Make it the store of this process and of those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
            patch.delenv(variable, raising=False)
        for variable, value in store.environment().items():
            patch.setenv(variable, value)
        yield
