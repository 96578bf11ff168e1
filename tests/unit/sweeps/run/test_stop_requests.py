"""Stop requests to a running sweep, and their answers."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sweeps.ledger.ledger import Ledger
from sweeps.paths import SweepPaths
from sweeps.run import stop_requests
from sweeps.sweep_lock import SweepLock
from sweeps.view.sweep_view import UnknownTrial
from tests.unit.sweeps.sweep_factory import MadeSweep


class Driver:
    """A driver as far as those who ask see it: it holds the lock, and looks at its wishes."""

    def __init__(self, paths: SweepPaths) -> None:
        self.lock = SweepLock(paths.lock)
        self.wishes = stop_requests.StopRequests(paths, self.lock.acquire().token)

    def answers(self, act: Callable[[Driver], bool]) -> threading.Thread:
        """Act, a few times a second, until told that it is enough."""

        def look() -> None:
            self.wishes.look()
            while not act(self):
                time.sleep(0.02)
                self.wishes.look()

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def paths(tmp_path: Path) -> SweepPaths:
    """A sweep of three trials, of which one has ended and one has not."""
    made = MadeSweep(tmp_path)
    made.add("complete", 0.5)
    made.add(None, 0.25)
    return made.paths


@pytest.fixture
def driver(paths: SweepPaths) -> Iterator[Driver]:
    """One that holds the sweep."""
    made = Driver(paths)
    yield made
    made.lock.release()


def _silent(what: str) -> None:
    del what


def test_a_driver_that_drains_is_waited_for(paths: SweepPaths, driver: Driver) -> None:
    def drain(it: Driver) -> bool:
        if it.wishes.drain:
            it.lock.release()
        return it.wishes.drain

    driver.answers(drain)
    stopped = stop_requests.stop_sweep(paths, now=False, seconds=10, say=_silent)
    assert (stopped.done, stopped.state, stopped.trial) == (True, "interrupted", None)
    assert not driver.wishes.now


def test_a_driver_that_does_not_answer_is_named(paths: SweepPaths, driver: Driver) -> None:
    del driver
    stopped = stop_requests.stop_sweep(paths, now=False, seconds=0.1, say=_silent)
    assert not stopped.done
    assert stopped.message.endswith("stop immediately with: " + paths.command("stop", "--now"))
    assert "has not exited after 0.1 s" in stopped.message


def test_trial_end_is_reported_with_its_result(paths: SweepPaths, driver: Driver) -> None:
    def end(it: Driver) -> bool:
        for number in it.wishes.trials:
            Ledger.open(paths.ledger).finish(number, "pruned")
        return bool(it.wishes.trials)

    driver.answers(end)
    stopped = stop_requests.stop_trial(paths, 1, seconds=10, say=_silent)
    assert stopped.as_dict() == {
        "name": "small",
        "trial": 1,
        "done": True,
        "state": "pruned",
        "message": "trial 1 is pruned after epoch 1 with its best value 0.25; the sweep continues",
    }
    assert driver.wishes.trials == {1}
    assert not driver.wishes.drain


def test_requests_to_an_earlier_driver_are_ignored(
    paths: SweepPaths, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_requests, "_NOW_SECONDS", 0.0)
    for now in (True, False):
        stop_requests.stop_sweep(paths, now=now, seconds=0.0, say=_silent)
    stop_requests.stop_trial(paths, 1, seconds=0.0, say=_silent)
    driver.wishes.look()
    assert (driver.wishes.drain, driver.wishes.now, driver.wishes.trials) == (True, True, {1})
    asked = [file.name for file in paths.control.iterdir()]
    driver.lock.release()
    shutil.rmtree(paths.control)  # as every driver does when it begins
    later = Driver(paths)
    for name in asked:  # by somebody who saw the earlier driver
        (paths.control / name).touch()
    later.wishes.look()
    assert (later.wishes.drain, later.wishes.now, later.wishes.trials) == (False, False, set())
    later.lock.release()


def test_impossible_stop_is_reported(paths: SweepPaths) -> None:
    with pytest.raises(
        stop_requests.NotRunningError, match="'small' is interrupted and no driver runs"
    ):
        stop_requests.stop_sweep(paths, now=False, seconds=1, say=_silent)
    with pytest.raises(
        stop_requests.NotRunningError, match="trial 0 of sweep 'small' is complete already"
    ):
        stop_requests.stop_trial(paths, 0, seconds=1, say=_silent)
    with pytest.raises(UnknownTrial, match="has no trial 2; its trials are 0 to 1"):
        stop_requests.stop_trial(paths, 2, seconds=1, say=_silent)
    assert not paths.control.exists()


def test_other_users_cannot_request_a_stop(paths: SweepPaths) -> None:
    before = os.umask(0)
    try:
        stop_requests.StopRequests(paths, "token")
        assert paths.control.stat().st_mode & 0o077 == 0
        with pytest.raises(FileExistsError):  # another's, which could not be removed
            stop_requests.StopRequests(paths, "token")
        stop_requests.request_stop(paths)
        shutil.rmtree(paths.control)
        stop_requests.request_stop(paths)
        assert paths.control.stat().st_mode & 0o077 == 0
    finally:
        os.umask(before)
