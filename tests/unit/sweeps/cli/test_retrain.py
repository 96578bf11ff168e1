"""`sweep train NAME TRIAL`: the same run again, and whether it is the same."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sweeps.cli.app import app
from sweeps.ledger.attributes import PbtPerturbation
from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.trust.reproduction import Difference, first_difference
from sweeps.view.sweep_view import SweepView
from tests.message_parts import assert_parts
from tests.unit.sweeps.trained_sweep import COMPLETE, KEY, PRUNED, RESUMED
from trainable.store.metrics_file import FILE_NAME, Row, read_rows


def _train(number: int, *words: str) -> Result:
    return CliRunner().invoke(app, ["train", "made", str(number), *words])


@pytest.mark.parametrize(
    ("number", "steps"),
    [(COMPLETE, 9), (PRUNED, 3), (RESUMED, 9)],
    ids=["complete", "pruned", "resumed"],
)
def test_same_trial_has_the_same_bits(number: int, steps: int, paths: SweepPaths) -> None:
    before = {path: path.read_bytes() for path in paths.root.rglob("*") if path.is_file()}
    done = _train(number, "--dir", "again")
    assert done.exit_code == 0, done.output
    assert f"the same as trial {number}, bit for bit, in all {steps} steps" in done.stdout
    trial, again = read_rows(paths.trial(number)), read_rows(Path("again"))
    assert [row.step for row in again] == [row.step for row in trial] == [*range(1, steps + 1)]
    assert first_difference(trial, again) is None
    config = (paths.trial(number) / TRIAL_CONFIG).read_text()
    assert Path("again", TRIAL_CONFIG).read_text() == config
    assert {path: path.read_bytes() for path in paths.root.rglob("*") if path.is_file()} == before


def test_first_difference_is_named(paths: SweepPaths) -> None:
    curve = paths.trial(COMPLETE) / FILE_NAME
    lines = [json.loads(line) for line in curve.read_text().splitlines()]
    lines[4]["metrics"]["train/loss"] += 1e-9
    curve.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = _train(COMPLETE)
    assert done.exit_code == 0
    assert_parts(done.stdout, "differs from trial 0 from step 5 on: train/loss was")


def test_curves_are_compared_bit_for_bit() -> None:
    nan, measured = float("nan"), "memory/process_mb"
    trial = [Row(1, 5, {"a": 1.0}), Row(2, 6, {"a": 0.1, measured: 1.0})]
    same = [Row(1, 0, {"a": 1.0}), Row(2, 0, {"a": 0.1, measured: 2.0})]
    assert first_difference(trial, same) is None
    assert first_difference(trial, trial[:1]) is None
    value = math.nextafter(0.1, 1.0)
    other = [trial[0], Row(2, 6, {"a": value})]
    assert first_difference(trial, other) == Difference(2, "a", 0.1, value)
    assert first_difference(trial, [Row(1, 5, {}), trial[1]]) == Difference(1, "a", 1.0, None)
    assert first_difference([Row(1, 5, {"a": nan})], [Row(1, 5, {"a": nan})]) is None
    assert first_difference([], trial) is None


def test_member_of_a_population_is_refused(paths: SweepPaths) -> None:
    ledger, space = Ledger.open(paths.ledger), SweepView(paths).spec.space
    member = ledger.add(Suggestion({KEY: 0.02}, {KEY: space[KEY].to_optuna()})).number
    ledger.mutate(1, {member: PbtPerturbation(1, RESUMED, {KEY: 0.01})})
    done = _train(member)
    assert (done.exit_code, done.stdout) == (2, "")
    assert_parts(done.stderr, "copied the weights of trial 2 after epoch 1")


@pytest.mark.usefixtures("paths")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["made", "9"], "has no trial 9"),
        (["other", "0"], "there is no sweep 'other'"),
        (["../other", "0"], "holds a path separator"),
        (["made", "0", "-s", "trials=2"], "exclude each other"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["train", *words])
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr


def test_damaged_configuration_is_named(paths: SweepPaths) -> None:
    (paths.trial(COMPLETE) / TRIAL_CONFIG).write_text("train: 3\n")
    done = _train(COMPLETE)
    assert (done.exit_code, done.stdout) == (2, "")
    assert_parts(done.stderr, "the configuration of trial 0 cannot be read", "backup")


def test_other_versions_are_said(paths: SweepPaths) -> None:
    Ledger.open(paths.ledger).add_attempt({"gradsweep.version.torch": "1.0"})
    done = _train(PRUNED)
    assert_parts(done.stderr, "torch is", "was 1.0 in the sweep")
