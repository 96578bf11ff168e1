"""Find the address of a Ray cluster, and check it without importing Ray.

Each check takes a few seconds at most. What must not live here: connecting (`cluster`).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping

import psutil

VARIABLE = "RAY_ADDRESS"
_AUTO, _LOCAL = "auto", "local"
_RULE = "the address of a Ray cluster is HOST:PORT of its head, as `ray start --head` prints it"
_PROBE_SECONDS = 5.0


class ClusterRefused(ValueError):
    """A Ray cluster cannot be used; nothing was created."""


def find_address(given: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the address of the cluster that a command uses."""
    name, address = (
        ("--address", given) if given is not None else (VARIABLE, environ.get(VARIABLE))
    )
    address = (address or _LOCAL).strip()
    if address in (_AUTO, _LOCAL):
        return address if address == _AUTO else None
    if address.startswith("ray://"):
        raise ClusterRefused(
            f"{name} {address}: is an address of Ray Client, which a sweep cannot use; {_RULE} "
            "(port 6379, not 10001); start the sweep on one of the cluster's nodes with that "
            "address"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ClusterRefused(
            f"{name} {address}: is no address; {_RULE}, such as 10.0.0.5:6379; write it so, or "
            "`auto` for the cluster of which this machine is a node, or `local` for a local Ray"
        )
    return address


def locate(address: str) -> str:
    """Return the address of a cluster's head, and check that this machine is a node."""
    heads = heads_of_local_nodes()
    if address == _AUTO:
        if len(heads) != 1:
            found = f"of several: {', '.join(sorted(heads))}" if heads else "of none"
            raise ClusterRefused(
                f"address auto: this machine is a node {found}; it must be a node of exactly one "
                f"Ray cluster; join it with `ray start`, or write its address; {_RULE}"
            )
        (address,) = heads
    if (cause := tcp_probe(address)) is not None:
        raise ClusterRefused(
            f"no process answers at {address} ({cause}); {_RULE}, and this machine must reach it; "
            "run `ray status` on the head, or correct the address"
        )
    port = address.rpartition(":")[2]
    if not any(head.rpartition(":")[2] == port for head in heads):
        raise ClusterRefused(
            f"this machine is no node of the Ray cluster at {address}; a sweep must start on a "
            f"node; join with `ray start --address={address} --num-cpus=0`, which runs no trials "
            "here, or start the sweep on one of its nodes"
        )
    return address


def tcp_probe(address: str, seconds: float = _PROBE_SECONDS) -> str | None:
    """Return why no process can be reached at `HOST:PORT`; None if one listens."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except UnicodeError as error:  # the host is no valid name
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    return None


def is_loopback(address: str) -> bool:
    """Return whether an address is one of the loopback interface."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def heads_of_local_nodes() -> set[str]:
    """Return the addresses of the heads of all clusters that have a node on this machine."""
    heads: set[str] = set()
    for process in psutil.process_iter():
        try:
            if process.name() != "raylet":
                continue
            words = process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue  # the process has ended, or is another user's
        # One argument may itself be a command line with several flags.
        flags = [w for word in words for w in word.split() if w.startswith("--gcs-address=")]
        heads.update(flag.partition("=")[2] for flag in flags)
    return heads
