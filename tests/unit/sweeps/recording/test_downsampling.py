"""Which rows of a curve are sent to tracking, and the tags of runs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.ledger.trials import TrialRecord
from sweeps.paths import SweepPaths
from sweeps.recording.descriptions import DESCRIPTION
from sweeps.recording.tags import attempt_tags, curve_tags, end_tags
from sweeps.spec.spec import SweepSpec
from tracking.unsent_rows import thin_rows
from trainable.store.metrics_file import Row

EPOCH = 15


def curve(steps: int, *, layers_every: int = 0) -> list[Row]:
    """Rows as a run writes them, with a boundary at the end of every 15 steps."""
    rows = []
    for step in range(1, steps + 1):
        metrics = {"train/loss": 1 / step, "train/lr": 0.1}
        if layers_every and step % layers_every == 0:
            metrics["grad_norm/0"] = float(step)
        if step % EPOCH == 0:
            metrics |= {"val/loss": 2 / step, "epoch": step / EPOCH}
        rows.append(Row(step, 1000 + step, metrics))
    return rows


def test_first_nth_and_epoch_end_steps_are_kept() -> None:
    rows = curve(40)
    assert list(thin_rows(rows, 7)) == [rows[s - 1] for s in (1, 7, 14, 15, 21, 28, 30, 35)]


def test_last_row_of_a_curve_that_ended_stays() -> None:
    assert [row.step for row in thin_rows(curve(40), 20)] == [1, 15, 20, 30, 40]
    assert [row.step for row in thin_rows(curve(37), 20)] == [1, 15, 20, 30]
    assert [row.step for row in thin_rows(curve(37), 20, ended=True)] == [1, 15, 20, 30, 37]
    assert list(thin_rows([], 20, ended=True)) == []


def test_layer_norms_have_their_own_interval() -> None:
    rows = list(thin_rows(curve(12, layers_every=4), 5))
    assert [(row.step, sorted(row.metrics)) for row in rows] == [
        (1, ["train/loss", "train/lr"]),
        (4, ["grad_norm/0"]),
        (5, ["train/loss", "train/lr"]),
        (8, ["grad_norm/0"]),
        (10, ["train/loss", "train/lr"]),
        (12, ["grad_norm/0"]),
    ]


def test_two_rows_of_one_step_are_one() -> None:
    step, end_of_epoch = Row(4, 1, {"train/loss": 0.5}), Row(4, 2, {"epoch": 1.0})
    assert list(thin_rows([step, end_of_epoch], 3)) == [
        Row(4, 2, {"train/loss": 0.5, "epoch": 1.0})
    ]


@given(every=st.integers(1, 30), cuts=st.lists(st.integers(0, 60), max_size=5))
def test_result_does_not_depend_on_arrival_order(every: int, cuts: list[int]) -> None:
    rows = curve(60, layers_every=4)
    places = [0, *sorted(cuts), 60]
    parts = [rows[a:b] for a, b in itertools.pairwise(places)]
    assert [row for part in parts for row in thin_rows(part, every)] == list(
        thin_rows(rows, every)
    )


def test_sweep_records_how_its_curves_were_thinned() -> None:
    assert curve_tags([1]) == curve_tags([1, 1]) == {}
    assert curve_tags([1, 4, 4]) == {
        "curves": "every step, then the first step, every 4 steps, and each epoch's end; "
        "every step is in metrics.jsonl"
    }


def test_first_command_is_kept_and_later_ones_numbered() -> None:
    run = {"gradsweep.command": "sweep run a.yaml", "gradsweep.code": "c0", "host": "a"}
    resumed = {"gradsweep.command": "sweep resume a", "gradsweep.code": "c0", "host": "a"}
    changed = resumed | {"gradsweep.code": "c1"}
    assert attempt_tags([]) == {}
    assert attempt_tags([run, resumed, changed]) == run | {
        "gradsweep.command.2": "sweep resume a",
        "gradsweep.command.3": "sweep resume a",
        "gradsweep.code.3": "c1",
    }


def _record(number: int, state: str = "complete", **known: object) -> TrialRecord:
    return TrialRecord(number=number, state=state, params={}, reports={}, value=None, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("record", "tags"),
    [
        (
            _record(0, best_step=30, best_epoch=2),
            {"outcome": "complete", "stopped_by": "", "best_step": "30", "best_epoch": "2"},
        ),
        (
            _record(0, "pruned", reason="asha at epoch 1"),
            {"outcome": "pruned", "stopped_by": "asha", "reason": "asha at epoch 1"},
        ),
        (
            _record(0, "pruned", reason="stopped by the user"),
            {"outcome": "stopped", "stopped_by": "user", "reason": "stopped by the user"},
        ),
        (
            _record(
                0, "failed", reason="KeyError: 1", traceback="Traceback\n" * 600 + "KeyError: 1"
            ),
            {
                "outcome": "failed",
                "stopped_by": "",
                "reason": "KeyError: 1",
                "failure.kind": "error",
                "failure.traceback": "…" + ("Traceback\n" * 600)[-4988:] + "KeyError: 1",
            },
        ),
    ],
)
def test_trial_records_why_it_ended(record: TrialRecord, tags: dict[str, str]) -> None:
    spec = SweepSpec.model_validate(
        {
            "name": "x",
            "task": "digits",
            "metric": "val/loss",
            "mode": "min",
            "trials": 1,
            "early_stopping": {"scheduler": "asha"},
        }
    )
    found = end_tags(record, spec, SweepPaths(Path("runs"), "x"))
    assert DESCRIPTION in found, "see test_descriptions.py"
    assert {key: found[key] for key in found if key != DESCRIPTION} == tags
