"""The connections that a process group opens are closed when its rank leaves, and no others."""

from __future__ import annotations

import os
import socket

from trainable.parallel.collectives import GroupSockets


def test_only_sockets_of_the_group_are_shut_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        other = socket.create_connection(address)
        others_end, _ = server.accept()
        sockets = GroupSockets()
        with sockets.collected():
            own, closed = (socket.create_connection(address) for _ in range(2))
        own_end, _ = server.accept()
        closed_end, _ = server.accept()
        number = closed.fileno()
        closed.close()
        os.dup2(other.fileno(), number)  # another file has the number now
        sockets.shut_down()
        own_end.settimeout(30)
        assert own_end.recv(1) == b""
        other.sendall(b"x")
        assert others_end.recv(1) == b"x"
        os.close(number)
        for one in (other, others_end, own, own_end, closed_end):
            one.close()
