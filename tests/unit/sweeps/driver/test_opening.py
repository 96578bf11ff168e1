"""How much of an opened sweep is left to be done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sweeps.driver.opening import OpenSweep
from tests.specs import with_overrides
from tests.unit.sweeps.made_sweep import MadeSweep

NO_RECORDER: Any = None


@pytest.mark.parametrize("trials", [1, 2, 3, 4, 6])
def test_unfinished_trials_are_left_however_few_the_sweep_is_to_have(
    tmp_path: Path, trials: int
) -> None:
    made = MadeSweep(tmp_path)
    for ending in ("complete", None, "failed", None):
        made.add(ending, 0.5)
    spec = with_overrides(made.spec, [f"trials={trials}"])
    sweep = OpenSweep(made.paths, spec, made.ledger, NO_RECORDER)
    assert sweep.left == 2 + max(0, trials - 4)
    for number in (1, 3):
        made.ledger.finish(number, "complete")
    assert sweep.left == max(0, trials - 4)


def test_a_stop_leaves_what_is_unfinished_and_begins_nothing(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, more="stop: {value: 0.5}")
    made.add("complete", 0.5)
    made.add(None, 0.7)
    sweep = OpenSweep(made.paths, made.spec, made.ledger, NO_RECORDER)
    assert sweep.left == 1
    made.ledger.finish(1, "pruned")
    assert sweep.left == 0
