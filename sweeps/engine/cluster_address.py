"""The address of a Ray cluster: where it comes from, and what can be known without Ray.

Nothing here takes longer than a few seconds. What must not live here: connecting (`cluster`).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping

import psutil

VARIABLE = "RAY_ADDRESS"
_AUTO, _LOCAL = "auto", "local"
_RULE = "a Ray cluster is named by its head, as `ray start --head` prints it: HOST:PORT"
_KNOCK_SECONDS = 5.0


class ClusterRefused(ValueError):
    """A Ray cluster cannot be used as it is; nothing was created."""


def find_address(given: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the address of the cluster that a command is to use.

    Args:
        given: What `--address` says; it wins over `RAY_ADDRESS`.
        environ: Where `RAY_ADDRESS` is looked up.

    Returns:
        `HOST:PORT` or `auto`; None for a Ray of this machine's own (`local`, or nothing).

    Raises:
        ClusterRefused: It is neither.
    """
    name, address = (
        ("--address", given) if given is not None else (VARIABLE, environ.get(VARIABLE))
    )
    address = (address or _LOCAL).strip()
    if address in (_AUTO, _LOCAL):
        return address if address == _AUTO else None
    if address.startswith("ray://"):
        raise ClusterRefused(
            f"{name} {address}: is Ray Client's; a sweep has to see the cluster's nodes, and its "
            f"trials have to end with it; {_RULE} (6379, not 10001), and the sweep is started on "
            "one of its nodes"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ClusterRefused(
            f"{name} {address}: is no address; {_RULE}, such as 10.0.0.5:6379; `auto` takes the "
            "one that this machine is a node of, and `local` a Ray of this machine's own"
        )
    return address


def locate(address: str) -> str:
    """Return where a cluster's head is, if somebody listens there and this machine is a node.

    Args:
        address: What `find_address` returned.

    Raises:
        ClusterRefused: Nobody listens there, or no node of that cluster runs on this machine.
    """
    heads = heads_of_local_nodes()
    if address == _AUTO:
        if len(heads) != 1:
            found = f"of several: {', '.join(sorted(heads))}" if heads else "of none"
            raise ClusterRefused(
                f"address auto: this machine is a node {found}; it must be a node of exactly one "
                f"Ray cluster; start it with `ray start`, or write its address; {_RULE}"
            )
        (address,) = heads
    if (cause := tcp_probe(address)) is not None:
        raise ClusterRefused(
            f"nobody answers at {address} ({cause}); {_RULE}, and it must be reachable from here; "
            "look with `ray status` on the head, or correct the address"
        )
    port = address.rpartition(":")[2]
    if not any(head.rpartition(":")[2] == port for head in heads):
        raise ClusterRefused(
            f"this machine is no node of the Ray cluster at {address}; a sweep is started on one; "
            f"join it with `ray start --address={address} --num-cpus=0`, which takes no trials "
            "here, or start the sweep on one of its nodes"
        )
    return address


def tcp_probe(address: str, seconds: float = _KNOCK_SECONDS) -> str | None:
    """Return why nobody can be reached at `HOST:PORT`, None if somebody listens."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except UnicodeError as error:  # no name that could be looked up
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    return None


def is_loopback(address: str) -> bool:
    """Whether a head's address is one that only this machine can mean."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def heads_of_local_nodes() -> set[str]:
    """The heads' addresses of all clusters that have a node on this machine."""
    heads: set[str] = set()
    for process in psutil.process_iter():
        try:
            if process.name() != "raylet":
                continue
            words = process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue  # gone meanwhile
        # One argument may be a whole command.
        flags = [w for word in words for w in word.split() if w.startswith("--gcs-address=")]
        heads.update(flag.partition("=")[2] for flag in flags)
    return heads
