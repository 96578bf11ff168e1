"""Ranks without Ray: child processes that call a function and end with their parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.time_limits import Deadline
from trainable.errors import RankFailed, RankLost
from trainable.local_ranks import LocalRanks

CALLS = "tests.rank_functions"


@pytest.mark.integration
def test_ranks_are_called_and_answer_or_say_why_not() -> None:
    with LocalRanks(3, [{"OWN": "a"}, {"OWN": "b"}]) as ranks:
        ranks.begin(f"{CALLS}:describe", {"port": 7}, word="hello")
        first, second = ranks.ends()
        assert ranks.cause() is second.error
    assert first.result | {"pid": 0} == {
        "place": {"port": 7}, "word": "hello", "pid": 0, "torch": True, "own": "a",
    }  # fmt: skip
    assert first.result["pid"] != os.getpid()
    assert isinstance(second.error, RankFailed)
    assert str(second.error) == "rank 2: ValueError: bad sample 17"
    assert "in describe" in second.error.__notes__[0]


@pytest.mark.integration
def test_a_killed_rank_is_lost_and_leaves_its_last_words() -> None:
    with LocalRanks(2) as ranks:
        ranks.begin(f"{CALLS}:die", {})
        (end,) = ranks.ends()
        assert ranks.cause() is end.error
    assert isinstance(end.error, RankLost)
    assert "SIGKILL" in str(end.error)
    assert end.error.__notes__ == ["Rank 1:\nabout to die"]


@pytest.mark.integration
def test_ranks_end_with_their_parent() -> None:
    code = (
        "import os, psutil\n"
        "from trainable.local_ranks import LocalRanks\n"
        "ranks = LocalRanks(2)\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "os._exit(0)\n"
    )
    command = [sys.executable, "-c", code]
    pid = int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    deadline = Deadline(20)
    while psutil.pid_exists(pid) and not deadline.passed:
        time.sleep(0.01)
    assert not psutil.pid_exists(pid)
