"""The descriptions of runs say what is true, and nothing in them is Markdown or HTML."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sweeps.ledger.attributes import PbtPerturbation
from sweeps.ledger.trials import TrialRecord
from sweeps.paths import SweepPaths
from sweeps.recording.descriptions import DESCRIPTION, describe_sweep, describe_trial
from sweeps.recording.tags import BY_THE_USER, end_tags
from sweeps.spec.spec import SweepSpec
from tests.specs import make_spec

REASON = "asha at epoch 3: val/loss 0.2139, needed at most 0.1144, rank 11 of 12"
PATHS = SweepPaths(Path("runs").absolute(), "small")


@pytest.fixture
def spec() -> SweepSpec:
    lr, norm = "{loguniform: [1.0e-4, 1.0e-1]}", "{loguniform: [0.1, 10]}"
    space = f"{{train.optimizer.lr: {lr}, train.clip.max_norm: {norm}}}"
    return make_spec(budget="{epochs: 10}", space=space)


def _trial(state: str = "pruned", **more: Any) -> TrialRecord:
    fields: dict[str, Any] = {
        "number": 2,
        "params": {"train.optimizer.lr": 0.0497123, "train.clip.max_norm": 2.0254},
        "value": 0.102345,
        "epoch": 3,
        "step": 69,
        "best_epoch": 2,
        "best_step": 46,
        "reports": {},
    }
    fields |= more
    fields.setdefault("suggested", fields["params"])
    return TrialRecord(state=state, **fields)


def _lines(record: TrialRecord, spec: SweepSpec) -> list[str]:
    return [line.strip() for line in end_tags(record, spec, PATHS)[DESCRIPTION].split("\n")]


def test_a_pruned_trial(spec: SweepSpec) -> None:
    assert _lines(_trial(reason=REASON), spec) == [
        "**Pruned** after 3 epochs of 10, `best val/loss 0.1023` at epoch 2.",
        f"Why it ended: `{REASON}`",
        "Searched: `lr 0.04971`, `max_norm 2.025`",
        "Checkpoint: epoch 2, step 46; export: `sweep best small 2 --export DIR`",
    ]


def test_trials_that_did_not_end_as_planned(spec: SweepSpec) -> None:
    failed = _trial("failed", value=None, epoch=0, best_epoch=None, best_step=None, reason="oom")
    assert _lines(failed, spec) == [
        "**Failed** before the end of its first epoch.",
        "Why it ended: `oom`",
        "Searched: `lr 0.04971`, `max_norm 2.025`",
    ]
    assert _lines(_trial(reason=BY_THE_USER), spec)[0].startswith("**Stopped** after 3 epochs")


def test_a_population_has_the_parameters_of_its_best(spec: SweepSpec) -> None:
    changed = {"train.optimizer.lr": 0.09, "train.clip.max_norm": 2.0254}
    record = _trial("complete", lineage=(PbtPerturbation(2, 1, changed),))
    before = "Searched, at this value: `lr 0.04971`, `max_norm 2.025`"
    assert before in _lines(record, spec)
    after = replace(record, best_epoch=3)
    assert "Searched, at this value: `lr 0.09`, `max_norm 2.025`" in _lines(after, spec)


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("![x](http://e/) <img src=x>", "`![x](http://e/) <img src=x>`"),
        ("a `b` c", "`` a `b` c ``"),
        ("a ``` b", "```` a ``` b ````"),
        ("two\nlines", r"`two\nlines`"),
    ],
)
def test_a_reason_is_no_markdown(spec: SweepSpec, reason: str, shown: str) -> None:
    assert f"Why it ended: {shown}" in _lines(_trial("failed", reason=reason), spec)


def test_long_texts_are_cut(spec: SweepSpec) -> None:
    params = {f"task.p{number}": "x" * 9_000 for number in range(99)}
    text = describe_trial(_trial(params=params, reason="y" * 9_000), spec, PATHS, "pruned")
    assert "and 69 more" in text
    assert len(text) < 9_000


def test_the_run_of_a_sweep(spec: SweepSpec) -> None:
    best = _trial()
    records = [_trial("complete", number=0), _trial("failed", number=1), best]
    assert describe_sweep(records, [best], spec).split("  \n") == [
        "**3 of 3 trials** for the `min of val/loss`: 1 complete, 1 pruned, 1 failed.",
        "Best: trial 2 (pruned), `best val/loss 0.1023` at epoch 2",
        "Its parameters: `lr 0.04971`, `max_norm 2.025`",
        "Searched: `train.optimizer.lr`, `train.clip.max_norm`",
    ]
    none = describe_sweep(records[1:2], [], spec, "oom")
    assert "**1 of 3 trials**" in none
    assert "Why it ended: `oom`" in none
    assert "Best" not in none


def test_command_of_another_root_names_it(spec: SweepSpec, tmp_path: Path) -> None:
    text = describe_trial(_trial(), spec, SweepPaths(tmp_path, "small"), "pruned")
    assert f"`sweep best small 2 --export DIR --root {tmp_path}`" in text
