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
from trainable.processes.local_ranks import LocalRanks


@pytest.mark.integration
def test_ranks_answer_or_say_why_not() -> None:
    with LocalRanks(4, [{"OWN": "a"}, {"OWN": "b"}, {}]) as ranks:
        ranks.begin("tests.rank_functions:describe", {"port": 7}, word="hello")
        answered, failed, killed = ranks.ends()
        assert ranks.cause() is failed.error
    assert answered.result | {"pid": 0} == {
        "place": {"port": 7}, "word": "hello", "pid": 0, "torch": True, "own": "a",
    }  # fmt: skip
    assert answered.result["pid"] != os.getpid()
    assert isinstance(failed.error, RankFailed)
    assert str(failed.error) == "rank 2: ValueError: bad sample 17"
    assert "in describe" in failed.error.__notes__[0]
    assert isinstance(killed.error, RankLost)
    assert "SIGKILL" in str(killed.error)
    assert killed.error.__notes__ == ["Rank 3:\nabout to die"]
    assert not killed.lost_another


@pytest.mark.integration
def test_ranks_end_with_their_parent() -> None:
    code = (
        "import os, psutil\n"
        "from trainable.processes.local_ranks import LocalRanks\n"
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
