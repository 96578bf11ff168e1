"""Fifty trials in one process: none affects a later one, and none leaks anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.reused_process import THREADS

TRIALS, SETTLED = 50, 10
_MOST_GROWTH = 4 * 2**20
"""Bytes from the eleventh trial to the last, 100 KiB for each between them."""


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("warm")
    command = [sys.executable, "-m", "tests.integration.reused_process", directory, str(TRIALS)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_every_trial_ends_as_expected(trials: list[dict[str, Any]]) -> None:
    assert len(trials) == TRIALS
    for trial in trials:
        assert trial["ending"] == ("failed" if trial["kind"] == "meddler" else "finished")


def test_equal_trials_give_equal_bits_in_a_reused_process(
    trials: list[dict[str, Any]],
) -> None:
    found = [trial["fingerprint"] for trial in trials if trial["kind"] == "plain"]
    assert len(found) == 3 * TRIALS // 5
    assert set(found) == {found[0]}


def test_process_state_changed_by_a_task_is_restored(trials: list[dict[str, Any]]) -> None:
    assert all(trial["before"] == trials[0]["before"] for trial in trials)
    trained = [t["torch threads"] for t in trials if t["kind"] != "meddler"]
    assert set(trained) == {THREADS}


def test_no_thread_process_or_file_leaks(trials: list[dict[str, Any]]) -> None:
    settled = trials[SETTLED]
    for trial in trials[SETTLED:]:
        for kind in ("threads", "files", "children"):
            assert trial[kind] == settled[kind], kind
    assert settled["children"] == 0


def test_memory_does_not_grow_with_trials(trials: list[dict[str, Any]]) -> None:
    growth = trials[-1]["rss"] - trials[SETTLED]["rss"]
    assert growth < _MOST_GROWTH, f"{growth / 2**20:.1f} MiB in {TRIALS - SETTLED} trials"
