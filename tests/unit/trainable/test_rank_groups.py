"""Groups of ranks: making one ends when another rank fails; its own connections end with it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.group_cases import MAKING
from trainable import rank_waits
from trainable.errors import RankFailed, RankLost, TrainingError
from trainable.group_joining import GroupPlace, listen
from trainable.parallel.collectives import GroupSockets
from trainable.parallel.rank_group import RankGroup
from trainable.processes.local_ranks import LocalRanks

pytestmark = pytest.mark.integration
LIMIT = 120.0
"""For how long a rank would wait that does not notice the end of another one."""
CASES = [
    ["exit"],
    [*(f"raise {method}" for method in MAKING), "stay group_of_model", "exit beside"],
    ["exit group_of_model"],
    ["exit leave_default_group"],
    ["within group_of_model"],
]
"""Of each process; only the last case of a process may end it."""


class Ends:
    """How the first rank's call ended, and after how many seconds, by the case."""

    errors: dict[str, TrainingError]
    seconds: dict[str, float]


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    """Run all cases."""
    found = Ends()
    found.errors, found.seconds = {}, {}
    listening = {name: listen() for names in CASES for name in names}
    places = {
        name: GroupPlace(*one.getsockname(), 2, timeout=1.0 if "stay" in name else LIMIT)
        for name, one in listening.items()
    }
    given = [[(name, asdict(places[name])) for name in names] for names in CASES]
    with LocalRanks(len(CASES) + 1) as children, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_waits, "CONNECT", 2.0)
        children.begin("tests.group_cases:end_early", {}, cases=given)
        for name, one in listening.items():
            started = time.monotonic()
            has_lost = children.has_lost if name == "exit" else lambda: False
            try:
                with RankGroup.join(places[name], 0, listening=one, has_lost=has_lost) as ranks:
                    _make(name, ranks)
            except TrainingError as error:
                found.errors[name] = error
            found.seconds[name] = time.monotonic() - started
    yield found
    assert not dist.is_initialized()


def _make(name: str, ranks: RankGroup) -> None:
    way, _, method = name.partition(" ")
    group: Any = getattr(ranks, method)()
    if way == "stay":
        ranks.collectives.end_joining()
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as problem:
            raise ranks.collectives.cause_of(problem) from problem


@pytest.mark.parametrize("name", [name for names in CASES for name in names])
def test_no_rank_waits_for_one_that_has_ended(ends: Ends, name: str) -> None:
    error = ends.errors[name]
    assert isinstance(error, RankFailed if "raise" in name else RankLost)
    assert ("bad sample 17" in str(error)) is ("raise" in name)
    assert ends.seconds[name] < LIMIT / 4


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
