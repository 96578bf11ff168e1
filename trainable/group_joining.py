"""Join the ranks of a trial to a group: where they meet, its store, and the network interface.

What must not live here: what ranks exchange (`parallel`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from trainable import rank_waits
from trainable.errors import RankLost


@dataclass(frozen=True)
class GroupPlace:
    """Where the ranks of a trial meet.

    Attributes:
        address: The address of the first rank, at which it alone listens; 127.0.0.1 if all ranks
            are on one machine.
        timeout: Seconds for which a rank waits for the others in a step.
        join_timeout: Seconds for which a rank waits until all have joined, and have opened the run
            and begun its first report.
        key: Signs the states that ranks send each other, which are partly pickles. It reaches the
            ranks as their place does, and never by the connections of the group.
    """

    address: str
    port: int
    size: int
    timeout: float = rank_waits.STEP
    join_timeout: float = rank_waits.JOIN
    key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)


def find_backend() -> None:
    """Have torch find the backend of groups, for which it reads what all packages declare.

    Forks of this process have it then: in each of them it would take most of the time of joining.
    """
    dist.BackendConfig(dist.Backend("gloo"))


def listen(address: str = "127.0.0.1") -> socket.socket:
    """Return a socket that listens at an address, on a free port, for the first rank's group."""
    return socket.create_server((address, 0), backlog=128)


@dataclass(frozen=True)
class JoinedGroup:
    """What a rank has of the group that it has joined: torch's default group, and more."""

    place: GroupPlace
    rank: int
    store: Store
    direct: bool
    own_address: str


class _Default:
    """torch's default group in this process."""

    is_of_trial = False
    """Whether `join_group` made it."""


def join_group(
    place: GroupPlace,
    rank: int,
    *,
    device: torch.device,
    listening: socket.socket | None,
    own_address: str,
    has_lost: Callable[[], bool],
) -> JoinedGroup:
    """Join; returns once all ranks have joined."""
    patience = timedelta(seconds=place.join_timeout)
    fd = None if listening is None else listening.detach()
    try:
        store = TCPStore(
            place.address,
            place.port,
            is_master=rank == 0,
            timeout=patience,
            wait_for_workers=False,
            master_listen_fd=fd,
        )
        _await_arrivals(store, rank, place, has_lost)
        direct = _have_own_devices(store, rank, place.size, device)
        with _interface(own_address), _own_excepthook():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" and direct else "gloo",
                store=store,
                rank=rank,
                world_size=place.size,
                timeout=patience,
            )
    except (RuntimeError, ValueError) as problem:
        raise RankLost(
            f"rank {rank} of {place.size} could not join the others at {place.address}:"
            f"{place.port} within {place.join_timeout:g} s ({problem}); a rank has ended, or "
            "its machine cannot be reached; the trial is retried"
        ) from problem
    _Default.is_of_trial = True
    return JoinedGroup(place, rank, store, direct, own_address)


def further_group(joined: JoinedGroup, backend: str | None = None) -> Any:
    """Return another group of the same ranks, which have just met."""
    with _connecting(joined) as limit:
        return dist.new_group(backend=backend, timeout=limit)


def replace_default_group(joined: JoinedGroup) -> Any:
    """End torch's default group; return one on the CPU, of the same ranks, which have just met."""
    with _connecting(joined) as limit:
        store = PrefixStore("loop", joined.store)
        group: Any = dist.ProcessGroupGloo(store, joined.rank, joined.place.size, limit)
    end_default_group()
    return group


def end_default_group() -> None:
    """End the group that `join_group` made torch's default one."""
    _Default.is_of_trial = False
    dist.destroy_process_group()


@contextlib.contextmanager
def hidden_group() -> Iterator[None]:
    """Have torch say that there is no process group, where it is that of the trial's ranks.

    Libraries such as torchmetrics exchange whatever they compute once there is a group. Where the
    other ranks do not run the same code, they would wait for each other, or add up what every rank
    has alike. An operation that names its group works nevertheless. A group that the task made
    itself stays.
    """
    if not _Default.is_of_trial:
        yield
        return
    before = dist.group.WORLD
    dist.group.WORLD = None
    try:
        yield
    finally:
        dist.group.WORLD = before


def sees_group() -> bool:
    """Return whether torch says now that there is the group of the trial's ranks."""
    return _Default.is_of_trial and dist.group.WORLD is not None


@contextlib.contextmanager
def _connecting(joined: JoinedGroup) -> Iterator[timedelta]:
    """Give the time-out of a further group while it is made."""
    try:
        with _interface(joined.own_address):
            yield timedelta(seconds=rank_waits.CONNECT)
    except RuntimeError as problem:
        raise RankLost(
            f"rank {joined.rank} of {joined.place.size} could not reach the others ({problem}); "
            "the trial is retried"
        ) from problem


def _await_arrivals(
    store: Store, rank: int, place: GroupPlace, has_lost: Callable[[], bool]
) -> None:
    """Wait on the first rank until all have come: making a group does not notice that one ends."""
    store.set(f"arrived/{rank}", "")
    if rank:
        return
    arrivals = [f"arrived/{other}" for other in range(place.size)]
    deadline = time.monotonic() + place.join_timeout
    while True:
        try:
            store.wait(arrivals, timedelta(seconds=rank_waits.ARRIVAL_PROBE))
            return
        except RuntimeError:
            if has_lost():
                raise RuntimeError("the process of a rank has ended") from None
            if time.monotonic() > deadline:
                raise


def _have_own_devices(store: Store, rank: int, size: int, device: torch.device) -> bool:
    """Return whether no two ranks share a GPU, as NCCL requires; True on CPUs."""
    if device.type != "cuda":
        return True
    name = str(torch.cuda.get_device_properties(device).uuid)
    store.set(f"device/{rank}", name)
    names = [store.get(f"device/{other}").decode() for other in range(size)]
    return len(set(names)) == size


@contextlib.contextmanager
def _own_excepthook() -> Iterator[None]:
    """Keep this process' hook for uncaught exceptions: torch puts `[rank0]` before each line."""
    before = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = before


@contextlib.contextmanager
def _interface(address: str) -> Iterator[None]:
    """Have gloo use the network interface with an address; it would take that of the host name."""
    name = interface_of(address)
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = before


def interface_of(address: str) -> str | None:
    """Return the network interface of this machine that has an address; None if unknown."""
    if address.startswith("127."):
        return "lo"
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return str(name)
    return None
