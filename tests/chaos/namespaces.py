"""Hosts with networks of their own on this machine: network namespaces on one bridge.

What must not live here: what runs in them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from dataclasses import dataclass


def no_namespaces() -> str:
    """Why there are none here; empty where there can be."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; on Debian and Ubuntu: apt-get install iproute2"
    name = f"gs{uuid.uuid4().hex[:6]}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "this machine lets nobody make network namespaces"
    _ip("netns", "del", name)
    return ""


@dataclass(frozen=True)
class Host:
    """One namespace with an address."""

    name: str
    link: str
    """Its network's end outside of the namespace."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before a command that runs there."""
        return ("ip", "netns", "exec", self.name)

    def delay(self, *, milliseconds: int) -> None:
        """Delay all that is sent to it."""
        delay = ("netem", "delay", f"{milliseconds}ms")
        subprocess.run(["tc", "qdisc", "add", "dev", self.link, "root", *delay], check=True)

    def cut(self) -> None:
        """Cut its network; nobody is told."""
        _ip("link", "set", self.link, "nomaster")


class Network:
    """Hosts that see each other.

    Args:
        hosts: How many, up to 200.
    """

    def __init__(self, *, hosts: int) -> None:
        tag = uuid.uuid4().hex[:6]
        self._bridge = f"gsb{tag}"
        self.hosts = [Host(f"gs{tag}-{each}", f"gs{tag}v{each}") for each in range(hosts)]

    def __enter__(self) -> Network:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        for each, host in enumerate(self.hosts, start=1):
            inside = f"{host.link}i"
            _ip("netns", "add", host.name)
            _ip("link", "add", host.link, "type", "veth", "peer", "name", inside)
            _ip("link", "set", inside, "netns", host.name)
            _ip("link", "set", host.link, "master", self._bridge, "up")
            _ip("-n", host.name, "addr", "add", f"10.213.77.{each}/24", "dev", inside)
            for link in ("lo", inside):
                _ip("-n", host.name, "link", "set", link, "up")
            _ip("-n", host.name, "route", "add", "default", "dev", inside)
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            _ip("netns", "del", host.name)
        _ip("link", "del", self._bridge)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
