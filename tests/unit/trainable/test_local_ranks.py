"""Ranks without Ray: child processes that call a function and end with their parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.time_limits import Deadline
from trainable.local_ranks import LocalRanks

CALLS = "tests.rank_functions"


@pytest.mark.integration
def test_a_rank_gets_its_number_and_answers() -> None:
    with LocalRanks(3, [{"OWN": "a"}, {"OWN": "b"}]) as ranks:
        ranks.begin(f"{CALLS}:describe", {"port": 7}, word="hello")
        first, second = ranks.ends()
    assert (first.rank, second.rank) == (1, 2)
    assert [end.result["own"] for end in (first, second)] == ["a", "b"]
    assert first.result["torch"], "torch is imported before the function is called"
    assert first.result["place"] == {"port": 7}
    assert first.result["pid"] != os.getpid()


@pytest.mark.integration
def test_a_failed_rank_says_why() -> None:
    with LocalRanks(3) as ranks:
        ranks.begin(f"{CALLS}:fail", {})
        first, second = ranks.ends()
    assert first.reason is None
    assert second.reason == "ValueError: bad sample 17"
    assert second.kind == "error"
    assert "in fail" in second.traceback


@pytest.mark.integration
def test_a_killed_rank_is_lost_and_the_others_end() -> None:
    with LocalRanks(3) as ranks:
        ranks.begin(f"{CALLS}:die", {})
        children = psutil.Process().children()
        deadline = Deadline(20)
        while (lost := ranks.lost()) is None and not deadline.passed:
            time.sleep(0.01)
    assert lost is not None
    assert (lost.rank, lost.kind) == (1, "lost")
    assert "SIGKILL" in str(lost.reason)
    assert lost.traceback == "about to die"
    assert not any(child.is_running() for child in children)


@pytest.mark.integration
def test_ranks_end_with_their_parent() -> None:
    code = (
        "import os\n"
        "from trainable.local_ranks import LocalRanks\n"
        "ranks = LocalRanks(2)\n"
        f"ranks.begin('{CALLS}:die', {{}}) if False else None\n"
        "print(ranks._children[0]._process.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    deadline = Deadline(20)
    while psutil.pid_exists(int(printed)) and not deadline.passed:
        time.sleep(0.01)
    assert not psutil.pid_exists(int(printed))
