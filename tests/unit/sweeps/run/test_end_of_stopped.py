"""How a trial ends that a stopping rule stops, and whose metric was never finite."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sweeps.ledger.reasons import BY_THE_USER
from sweeps.reconcile.reconcile import SweepState, TrialState, UnrecordedEnd, reconcile
from tests.memory_recorder import MemoryRecorder
from tests.unit.sweeps.sweep_factory import MadeSweep
from trainable.errors import NonFiniteMetric

BY_RULE = "asha at epoch 2: val/loss nan, not a finite number"
NO_VALUE = f"non_finite: {NonFiniteMetric('val/loss', 2, math.nan)}"


@pytest.mark.parametrize(
    ("select", "values", "reason", "end"),
    [
        ("checkpoint", [math.nan, math.nan], BY_RULE, ("failed", NO_VALUE)),
        ("checkpoint", [0.5, math.nan], BY_RULE, ("pruned", BY_RULE)),
        ("final", [0.5, math.nan], BY_RULE, ("failed", NO_VALUE)),
        ("final", [math.nan, 0.5], BY_RULE, ("pruned", BY_RULE)),
        ("checkpoint", [math.nan, math.nan], BY_THE_USER, ("pruned", BY_THE_USER)),
        ("checkpoint", [], BY_RULE, ("pruned", BY_RULE)),
    ],
)
@pytest.mark.parametrize("waits", [False, True])
def test_trial_that_a_rule_stops_without_a_value_has_failed(
    tmp_path: Path, waits: bool, select: str, values: list[float], reason: str, end: Any
) -> None:
    """Alike while it trains, while it waits, and after the driver has died."""
    sweep, recorder = MadeSweep(tmp_path, more=f"select: {select}"), MemoryRecorder()
    number = sweep.add(None, *values)
    view: Any = SimpleNamespace(ended=lambda *_: None)
    keeper = sweep.handler(recorder, view)
    keeper._scheduler.stop_reasons[number] = reason
    recorder.start(number, {}, {})
    record = sweep.ledger.trial(number)
    found = TrialState(replace(record, attempts=1), stop_reason=reason)
    state = SweepState([found], metric="val/loss", select=sweep.spec.select)
    (repair,) = (one for one in reconcile(state) if isinstance(one, UnrecordedEnd))
    assert (repair.ending, repair.reason) == end
    if waits:
        keeper.stop(number, reason, live=False)
    else:
        trial: Any = SimpleNamespace(config={"number": number}, last_result={})
        keeper.on_trial_complete(0, [trial], trial)
    keeper.flush()
    record = sweep.ledger.trial(number)
    assert (record.state, record.reason) == end
    assert (recorder.runs[number].status == "FAILED") is (end[0] == "failed")
