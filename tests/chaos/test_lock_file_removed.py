"""Row 27: the lock file of a running driver is removed."""

from __future__ import annotations

import pytest

from tests.chaos.invariants import (
    SERIAL,
    References,
    Sandbox,
    assert_all,
    assert_prints_resume_command,
)


@pytest.mark.chaos
@pytest.mark.fault(27, "the lock is removed under a driver, and another one takes the sweep")
def test_row_27_lock_removed(references: References, sandbox: Sandbox) -> None:
    driver, _ = sandbox.run_to("forward", 20)
    sandbox.paths.lock.unlink()
    sandbox.probe.release("forward-20")
    ended = driver.wait()
    assert_prints_resume_command(ended, 4, "was removed or replaced under this driver")
    assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end())
