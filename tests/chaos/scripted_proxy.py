"""An HTTP proxy on 127.0.0.1 that injects network and server faults into single requests.

It stands before a real tracking server and passes on what no script speaks of. What must not live
here: MLflow, or what must be true afterwards.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.time_limits import scaled

_OF_ONE_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length", "host"}
_UPSTREAM_SECONDS = 60.0

SentPoint = tuple[str, str, int]
"""A run, a metric's key and a step."""


@dataclass
class Reply:
    """What is sent back."""

    status: int
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""


class Exchange:
    """One request, and what can be done with it."""

    def __init__(self, handler: _Handler, body: bytes) -> None:
        self._handler = handler
        self._body = body
        self.method, self.path = handler.command, handler.path
        self.authorization = handler.headers.get("Authorization")
        self.points = _points_in(body) if self.path.endswith("/runs/log-batch") else []

    @property
    def kind(self) -> str:
        """The path, with `#metrics` behind it where metrics are sent."""
        return f"{self.path}#metrics" if self.points else self.path

    def forward(self) -> Reply:
        """Let the server do what it is asked for; returns its reply, which nobody has seen yet.

        Raises:
            OSError: The server is not there, or ended meanwhile.
        """
        upstream = http.client.HTTPConnection(
            self._handler.server.proxy.upstream, timeout=scaled(_UPSTREAM_SECONDS)
        )
        try:
            kept = {k: v for k, v in self._handler.headers.items() if k.lower() not in _OF_ONE_HOP}
            upstream.request(self.method, self.path, self._body or None, kept)
            answer = upstream.getresponse()
            headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in _OF_ONE_HOP]
            reply = Reply(answer.status, headers, answer.read())
            if answer.status == 200:
                self._handler.server.proxy.note_points(self.points)
            return reply
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        finally:
            upstream.close()

    def reply(self, reply: Reply) -> None:
        """Send a reply back."""
        handler = self._handler
        handler.send_response_only(reply.status)
        for name, value in [*reply.headers, ("Content-Length", str(len(reply.body)))]:
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(reply.body)

    def reset(self) -> None:
        """Drop the connection without a word: TCP's reset, not its orderly end."""
        connection = self._handler.connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._handler.close_connection = True
        os.close(connection.detach())  # close() alone would wait for the handler's own files


def _points_in(body: bytes) -> list[SentPoint]:
    sent = json.loads(body)
    metrics = sent.get("metrics", ())
    return [(sent["run_id"], metric["key"], int(metric["step"])) for metric in metrics]


Fault = Callable[[Exchange], None]


def answer(status: int, **headers: str) -> Fault:
    """Answer in the server's place, which learns nothing of the request."""
    named = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return lambda exchange: exchange.reply(Reply(status, named, b"scripted"))


def late(seconds: float) -> Fault:
    """Let the server do it at once, and pass its reply on later."""

    def fault(exchange: Exchange) -> None:
        found = exchange.forward()
        time.sleep(seconds)
        exchange.reply(found)

    return fault


def done_late(seconds: float) -> Fault:
    """Let the server do it only later, as when the request lay in a queue."""

    def fault(exchange: Exchange) -> None:
        time.sleep(seconds)
        exchange.reply(exchange.forward())

    return fault


def reset(exchange: Exchange) -> None:
    """Drop the connection; the server learns nothing of the request."""
    exchange.reset()


def commit_and_drop(exchange: Exchange) -> None:
    """Let the server do it, and drop the connection in place of its reply."""
    exchange.forward()
    exchange.reset()


def pass_on(exchange: Exchange) -> None:
    """Do nothing to it."""
    exchange.reply(exchange.forward())


class Proxy:
    """A scripted proxy; a context manager that ends it.

    Args:
        upstream: The server's address, such as `http://127.0.0.1:5000`.

    Attributes:
        url: The proxy's address, the same for its whole life.
        seen: The path of every request so far.
        points: How often each (run, key, step) was sent and taken. A store drops a row that it
            has, so what lies there does not tell whether it came twice.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.seen: list[str] = []
        self.points: Counter[SentPoint] = Counter()
        self.connections: set[socket.socket] = set()
        self._script: list[tuple[str, Fault]] = []
        self._otherwise: Fault = pass_on
        self._lock = threading.Lock()
        self._server: _Server | None = _Server(self, 0)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def script(self, path: str, *faults: Fault) -> None:
        """Do these, in turn, to the next requests with `path` in their kind."""
        with self._lock:
            self._script += [(path, fault) for fault in faults]

    def otherwise(self, fault: Fault) -> None:
        """Do this to every request of which the script does not speak."""
        self._otherwise = fault

    @property
    def unused(self) -> list[str]:
        """The paths of what the script still waits for."""
        return [path for path, _ in self._script]

    def count(self, path: str) -> int:
        """How many requests there were with `path` in their path."""
        return sum(path in seen for seen in self.seen)

    def down(self) -> None:
        """Refuse connections, and drop those that are open."""
        assert self._server is not None, "it is down already"
        self._server.shutdown()
        self._server.server_close()
        self._server = None
        for connection in list(self.connections):
            with contextlib.suppress(OSError):  # it was dropped meanwhile
                connection.shutdown(socket.SHUT_RDWR)

    def up(self) -> None:
        """Accept connections again, under the same address."""
        assert self._server is None, "it is up already"
        self._server = _Server(self, int(self.url.rpartition(":")[2]))

    def note_points(self, points: list[SentPoint]) -> None:
        """Count the metrics of a request that the server has taken."""
        with self._lock:
            self.points.update(points)

    def treat(self, exchange: Exchange) -> None:
        """Do to a request what the script says; called by the threads that serve."""
        with self._lock:
            self.seen.append(exchange.path)
            spoken = [entry for entry in self._script if entry[0] in exchange.kind]
            if spoken:
                self._script.remove(spoken[0])
        fault = spoken[0][1] if spoken else self._otherwise
        try:
            fault(exchange)
        except OSError:  # the server is gone, or the client is
            with contextlib.suppress(OSError):
                exchange.reset()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self.down()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, proxy: Proxy, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.proxy = proxy
        serve = threading.Thread(
            target=self.serve_forever, args=(0.02,), name="scripted-proxy", daemon=True
        )
        serve.start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open, as they do with a real server
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.proxy.connections.add(self.connection)

    def finish(self) -> None:
        self.server.proxy.connections.discard(self.connection)
        super().finish()

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.server.proxy.treat(Exchange(self, self.rfile.read(length)))

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve
