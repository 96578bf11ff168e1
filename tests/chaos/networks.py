"""Hosts with their own networks on this machine: network namespaces on a switch that can drop or
delay frames.

A namespace lives as long as a process in it, a TAP device as long as the descriptor that the
switch reads. So neither has a name that is kept anywhere, and both go with the process that made
them, whatever ends it. What must not live here: what runs on the hosts.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass

INSTALL = "apt-get install iproute2 (Debian, Ubuntu)"
_TUN = "/dev/net/tun"
_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x1002  # linux/if_tun.h
_INTERFACE_REQUEST = struct.Struct("16sH22x")
_FRAME_BYTES = 2**16
_LOOK_EVERY = 0.1


def missing_tool() -> str | None:
    """The program that is not installed; None when all are."""
    return next((t for t in ("ip", "unshare", "nsenter") if shutil.which(t) is None), None)


def refusal() -> str | None:
    """Why this machine lets us make no hosts; None where it does. All tools must be there."""
    remedy = "be root on a machine of your own, or in a container with --privileged"
    if os.geteuid() != 0:
        return f"network namespaces are for root alone; {remedy}"
    done = subprocess.run(
        ["unshare", "--net", "true"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        return f"no network namespace can be made ({done.stderr.strip()}); {remedy}"
    try:
        os.close(_open_tap()[0])
    except OSError as error:
        return f"no TAP device can be made ({error}); modprobe tun; {remedy}"
    return None


@dataclass(frozen=True)
class Host:
    """One network namespace.

    Attributes:
        address: Its own, in a network that is nowhere else.
        within: What to put before a command that is to run there.
    """

    address: str
    within: tuple[str, ...]


class Network:
    """Hosts on one switch; to be closed.

    Args:
        count: How many hosts, up to 250.
    """

    def __init__(self, count: int) -> None:
        self.hosts: list[Host] = []
        self._ports: dict[int, Host] = {}
        self._delays: dict[Host, float] = defaultdict(float)
        self._cut_off: set[Host] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._switch, name="switch", daemon=True)
        self._made = ExitStack()
        with ExitStack() as made:
            for number in range(1, count + 1):
                self._add(f"10.77.0.{number}", made)
            self._made = made.pop_all()
        self._thread.start()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._made.close()

    def delay(self, host: Host, seconds: float) -> None:
        """Keep what is sent to a host, and what it sends, for so long on its way."""
        self._delays[host] = seconds

    def cut(self, host: Host) -> None:
        """Lose all that is sent to a host and by it; nobody is told."""
        self._cut_off.add(host)

    def heal(self, host: Host) -> None:
        """Undo `cut`."""
        self._cut_off.remove(host)

    def _add(self, address: str, made: ExitStack) -> None:
        # It ends with its input, which is this process', and with it what it holds.
        holder = made.enter_context(
            subprocess.Popen(
                ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        )
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(b"\n")
        holder.stdin.flush()
        holder.stdout.read(1)  # it is in its namespace
        host = Host(address, ("nsenter", f"--net=/proc/{holder.pid}/ns/net"))
        port, name = _open_tap()
        made.callback(os.close, port)
        _run("ip", "link", "set", name, "netns", str(holder.pid))
        _run(*host.within, "ip", "address", "add", f"{address}/24", "dev", name)
        for link in ("lo", name):
            _run(*host.within, "ip", "link", "set", link, "up")
        # Who asks for its own address asks by which way the world would be reached.
        _run(*host.within, "ip", "route", "add", "default", "dev", name)
        self.hosts.append(host)
        self._ports[port] = host

    def _switch(self) -> None:
        ways: dict[bytes, int] = {}
        order = itertools.count()
        waiting: list[tuple[float, int, int, bytes]] = []
        while not self._over.is_set():
            until = waiting[0][0] - time.monotonic() if waiting else _LOOK_EVERY
            for port in select.select([*self._ports], [], [], min(max(until, 0), _LOOK_EVERY))[0]:
                frame = os.read(port, _FRAME_BYTES)
                target, source = frame[:6], frame[6:12]
                ways[source] = port
                known = ways.get(target)
                for to in [known] if known is not None else self._ports.keys() - {port}:
                    ends = self._ports[port], self._ports[to]
                    if self._cut_off.isdisjoint(ends):
                        due = time.monotonic() + sum(self._delays[end] for end in ends)
                        heapq.heappush(waiting, (due, next(order), to, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, to, frame = heapq.heappop(waiting)
                os.write(to, frame)


def _open_tap() -> tuple[int, str]:
    """A new TAP device: its descriptor, which it lives as long as, and the name it was given."""
    port = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
    try:
        asked = _INTERFACE_REQUEST.pack(b"chaos%d", _TAP_WITHOUT_HEADER)
        told = fcntl.ioctl(port, _TUNSETIFF, asked)
    except OSError:
        os.close(port)
        raise
    return port, _INTERFACE_REQUEST.unpack(told)[0].rstrip(b"\0").decode()


def _run(*words: str) -> None:
    subprocess.run(words, check=True)
