"""A webhook on 127.0.0.1 that keeps what it receives, and answers as a test wants.

What must not live here: what a notification must hold.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SECRET = "canary-T0pS3cret"
"""A part of the address's path."""


@dataclass
class Received:
    """One request."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    status: int


@dataclass
class WebhookServer:
    """What the server received, and how it answers."""

    answer: Callable[[dict[str, Any]], int] = lambda _: 204
    """Returns the status of the answer to a notification; it may wait."""
    headers: dict[str, str] = field(default_factory=dict)
    """Further headers of each answer."""
    received: list[Received] = field(default_factory=list)
    port: int = 0
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/services/{SECRET}?key={SECRET}"

    @property
    def taken(self) -> list[dict[str, Any]]:
        """The bodies that were answered with 2xx."""
        return [one.body for one in list(self.received) if 200 <= one.status < 300]


@contextmanager
def webhook_server(port: int = 0, certificate: Path | None = None) -> Iterator[WebhookServer]:
    """Serve until the block ends.

    Args:
        port: 0 takes a free one.
        certificate: A file with certificate and key, for https.
    """
    webhook = WebhookServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"]))
            body = json.loads(text)
            status = webhook.answer(body)
            webhook.received.append(Received(self.path, dict(self.headers), body, status))
            self.send_response(status)
            for name, value in webhook.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:  # where a followed redirect would arrive
            webhook.received.append(Received(self.path, dict(self.headers), {}, 200))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            del request, client_address  # a client that gave up

    server = Quiet(("127.0.0.1", port), Handler)
    webhook.port = server.server_address[1]
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        webhook.scheme = "https"
    thread = threading.Thread(target=server.serve_forever, args=[0.02], daemon=True)
    thread.start()
    try:
        yield webhook
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
