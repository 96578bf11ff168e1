"""Real signals to this process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sweeps.engine.signals import Interruption, exit_on_signal
from sweeps.errors import ExitRequested


class Heard:
    """What an interruption called."""

    def __init__(self, grace: float = 30.0, look: Callable[[], None] = lambda: None) -> None:
        self.first, self.last = threading.Event(), threading.Event()
        self.interruption = Interruption(self.first.set, self.last.set, grace=grace, look=look)


def test_the_first_drains_and_the_second_leaves() -> None:
    heard = Heard()
    with heard.interruption as interruption:
        assert not interruption.requested
        assert interruption.left == float("inf")
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.first.wait(5)
        assert interruption.requested
        assert interruption.exit_code == 143
        assert 20 < interruption.trial_grace_remaining < interruption.left <= 30
        assert not heard.last.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert heard.last.wait(5)
        assert interruption.exit_code == 143


def test_first_signal_still_counts_after_a_stop_request() -> None:
    wish = threading.Event()

    def look() -> None:
        if wish.is_set():
            heard.interruption.drain()

    heard = Heard(look=look)
    with heard.interruption as interruption:
        wish.set()
        assert heard.first.wait(5)
        assert interruption.exit_code == 130
        os.kill(os.getpid(), signal.SIGINT)
        assert not heard.last.wait(0.5)


def test_the_end_of_the_grace_period_leaves() -> None:
    heard = Heard(grace=0.1)
    with heard.interruption:
        os.kill(os.getpid(), signal.SIGINT)
        assert heard.last.wait(5)


def test_library_that_takes_signals_does_not_block_them() -> None:
    taken: list[Any] = []
    heard = Heard()
    with heard.interruption:
        signal.signal(signal.SIGTERM, lambda number, frame: taken.append((number, frame)))
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.first.wait(5)
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.last.wait(5)
        assert len(taken) == 2


def test_first_signal_exits_when_nothing_is_to_drain() -> None:
    with pytest.raises(ExitRequested) as left, exit_on_signal():
        os.kill(os.getpid(), signal.SIGTERM)
    assert left.value.exit_code == 143
