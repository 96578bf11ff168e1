"""A store of an attacker: it accepts any connection, asks for a password in clear, and records
what it receives.
"""

from __future__ import annotations

import socket
import struct
import threading
from types import TracebackType

from tests.time_limits import scaled

FOREIGN = "127.1"
"""The resolver alone knows that this is 127.0.0.1; to whoever reads the address it is a host."""

_NEGOTIATIONS = (80877103, 80877104)  # for TLS, for GSS
_PASSWORD_PLEASE = b"R" + struct.pack("!ii", 8, 3)


class MaliciousStore:
    """Speaks as much of PostgreSQL as it takes to be told a password, and refuses HTTP.

    Attributes:
        port: On 127.0.0.1.
        heard: What each connection sent.
    """

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.heard: list[bytearray] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> MaliciousStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            heard = bytearray()
            self.heard.append(heard)
            threading.Thread(target=self._talk, args=[connection, heard], daemon=True).start()

    @staticmethod
    def _talk(connection: socket.socket, heard: bytearray) -> None:
        with connection:
            connection.settimeout(scaled(10))
            try:
                while said := connection.recv(65536):
                    heard += said
                    if said[:4].isalpha():
                        connection.sendall(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n")
                    elif said[:1] == b"p":
                        return
                    elif len(said) == 8 and struct.unpack("!i", said[4:])[0] in _NEGOTIATIONS:
                        connection.sendall(b"N")
                    else:
                        connection.sendall(_PASSWORD_PLEASE)
            except OSError:
                return
