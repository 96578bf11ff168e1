"""What the bookkeeper writes down of a report, and what it leaves to Tune."""

from __future__ import annotations

from numbers import Number
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sweeps.callbacks import Bookkeeper, Progress
from tests.unit.sweeps.made_sweep import MadeSweep
from tracking.recorder import MemoryRecorder
from trainable.ray_adapter import OBJECTIVE

_METRICS = {"val/loss": 0.5, "val/accuracy": 0.75, "train/loss": 0.6, "train/lr": 0.1}


def _result() -> dict[str, Any]:
    """A report as it comes from Tune, which adds times, counts and the configuration to ours."""
    return {
        OBJECTIVE: 0.5,
        "epoch": 1,
        "step": 23,
        "metrics": _METRICS,
        "rows": [(23, 1000, _METRICS)],
        "signals": ["the loss jumped"],
        "resolved": {"device": "cpu", "precision": "fp32"},
        "should_checkpoint": False,
        "done": True,
        "ending": "finished",
        "training_iteration": 1,
        "time_total_s": 1.5,
        "time_this_iter_s": 1.5,
        "time_since_restore": 1.5,
        "iterations_since_restore": 1,
        "config": {"number": 0, "config": {"train": {"batch_size": 64}}},
    }


def test_tune_keeps_of_a_result_what_is_asked_of_it_later(tmp_path: Path) -> None:
    sweep, recorder = MadeSweep(tmp_path), MemoryRecorder()
    number = sweep.add(None)
    shown: list[Progress] = []
    view: Any = SimpleNamespace(reported=shown.append)
    keeper = Bookkeeper(
        sweep.spec, sweep.paths, sweep.ledger, recorder, view,
        on_step=lambda: None, on_end=lambda _: None,
    )  # fmt: skip
    trial: Any = SimpleNamespace(config={"number": number, "params": {}})
    recorder.start(number, {}, {})

    result = _result()
    keeper.on_trial_result(0, [trial], trial, result)

    numbers = {key for key, value in result.items() if isinstance(value, Number)}
    assert numbers == {OBJECTIVE, "epoch", "should_checkpoint", "done", "training_iteration"}
    assert not [key for key, value in result.items() if isinstance(value, dict | list)]
    assert result["ending"] == "finished"
    assert shown == [Progress(number, {}, 1, 23, _METRICS)]
    tags = recorder.runs[number].tags
    assert (tags["gradsweep.device"], tags["gradsweep.precision"]) == ("cpu", "fp32")
    record = sweep.ledger.trial(number)
    assert (record.reports, record.step) == ({1: 0.5}, 23)
    assert record.signals == ("the loss jumped",)
