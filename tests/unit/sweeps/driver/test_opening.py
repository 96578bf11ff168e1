"""How much of an opened sweep is left to be done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sweeps.driver.opening import OpenSweep
from sweeps.driver.run import run_sweep
from sweeps.engine.resources import Machine, plan
from tests.specs import with_overrides
from tests.unit.sweeps.made_sweep import RATE, MadeSweep

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
    assert sweep.num_trials == max(4, trials)
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


NOTHING_LEFT = "nothing is left to train; what changed holds for new trials; "
ANOTHER = "start a new sweep with: sweep run FILE --name NAME"


@pytest.mark.parametrize(
    ("more", "overrides", "remedy"),
    [
        ("", ["budget.epochs=20"], "begin some with: {resume} -s trials=6 --root {root}"),
        ("", ["train.batch_size=32"], "begin some with: {resume} -s trials=6 --root {root}"),
        ("search: {sampler: grid}", ["budget.epochs=20"], ANOTHER),
        ("", ["tracking.every=2"], None),
        ("", ["budget.epochs=20", "trials=4"], None),
        ("", [], None),
    ],
)
def test_a_change_that_finds_nothing_to_train_is_told(
    tmp_path: Path, more: str, overrides: list[str], remedy: str | None
) -> None:
    space = "{train.batch_size: {choice: [8, 16, 32]}}" if "grid" in more else RATE
    made = MadeSweep(tmp_path, more=more, space=space)
    for _ in range(3):
        made.add("complete", 0.7)
    spec = with_overrides(made.spec, overrides)
    told = OpenSweep(made.paths, spec, made.ledger, NO_RECORDER).in_vain(made.spec)
    if remedy is not None:
        remedy = NOTHING_LEFT + remedy.format(resume="sweep resume small", root=tmp_path)
    assert told == remedy


def test_a_change_in_vain_of_a_sweep_that_a_stop_ended(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, more="stop: {value: 0.5}")
    made.add("complete", 0.5)
    spec = with_overrides(made.spec, ["budget.epochs=20"])
    told = OpenSweep(made.paths, spec, made.ledger, NO_RECORDER).in_vain(made.spec)
    assert told is not None
    assert told.startswith(f"{NOTHING_LEFT}begin some with: sweep resume small -s stop.value=null")


def test_a_resume_says_that_its_change_finds_nothing_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadeSweep(tmp_path)
    for _ in range(3):
        made.add("complete", 0.7)
    said: list[str] = []
    monkeypatch.setattr("sweeps.driver.run.conclude", lambda *_: None)
    spec = with_overrides(made.spec, ["budget.epochs=20"])
    machine = Machine.probe()
    run_sweep(
        made.paths,
        spec,
        plan(spec.resources, spec.trials, spec.concurrency, machine),
        machine,
        lambda *_: pytest.fail("a trial was to be run"),
        new=False,
        offline=True,
        warn=said.append,
        tell=lambda _: None,
    )
    changed, nothing = said
    assert changed == "changed: budget.epochs: 10 -> 20"
    assert nothing.startswith(NOTHING_LEFT)
