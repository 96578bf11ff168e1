"""Row 27: a second driver starts on a running sweep."""

from __future__ import annotations

import re
import socket

import pytest

from tests.chaos.invariants import SERIAL, References, Template, assert_all, assert_ended
from tests.time_limits import scaled

_IMMEDIATELY = 5.0


@pytest.mark.fault(27, "a second driver, and two that start at once after a dead one")
def test_row_27_second_driver(references: References, interrupted: Template) -> None:
    sandbox = interrupted.fresh()  # its lock still names the dead driver
    place = sandbox.probe.further("forward", 20)
    both = [sandbox.resume(), sandbox.resume()]
    both[0].until(lambda: sandbox.probe.held(place), unless_ended=False)
    sandbox.probe.held(place)
    refused, driver = both if both[1].running else reversed(both)
    held = rf"process {driver.pid} on {re.escape(socket.gethostname())}; only one driver"
    assert_ended(refused.wait(), 4, held)

    third = sandbox.resume().wait()
    assert_ended(third, 4, held)
    assert third.seconds <= scaled(_IMMEDIATELY), f"refused after {third.seconds:.1f} s"
    assert_ended(sandbox.run().wait(), 4, held)

    sandbox.probe.release(place)
    assert_all(sandbox, references.of(SERIAL), driver.wait())
