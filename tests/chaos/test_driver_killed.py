"""Row 6: the driver dies, and is resumed."""

from __future__ import annotations

import pytest

from tests.chaos.harness import SERIAL, References, Template, assert_all


@pytest.mark.fault(6, "the power goes off in the middle of the second trial")
def test_row_06_power_off_in_a_trial(references: References, interrupted: Template) -> None:
    reference = references.of(SERIAL)
    # Otherwise nothing would be said about a scheduler that is told the past.
    assert {trial["state"] for trial in reference.trials} == {"complete", "pruned"}
    sandbox = interrupted.fresh()
    assert_all(sandbox, reference, sandbox.go_on())
