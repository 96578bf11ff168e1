"""Sweeps with several metrics: the result of a trial, the Pareto front, and what is refused."""

from __future__ import annotations

import io
import math
import random
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from rich.console import Console

from sweeps.artifacts.export import export_best
from sweeps.cli import render
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.ranking import undominated
from sweeps.ledger.reader import LedgerReader
from sweeps.reconcile.collect_state import read_sweep_state
from sweeps.reconcile.reconcile import reconcile, unreported
from sweeps.reconcile.repairs import report_missing
from sweeps.recording.tags import front_tags
from sweeps.view.sweep_view import NoBest, NoChoice
from tests.fake_checkpoints import commit
from tests.unit.sweeps.sweep_factory import MadeSweep
from trainable.store.metrics_file import Row

METRICS = "[val/loss, train/samples_per_second]"
SPACE = "{train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}, train.batch_size: {int: [8, 64]}}"


@pytest.fixture
def sweep(tmp_path: Path) -> MadeSweep:
    return MadeSweep(tmp_path, metric=METRICS, mode="[min, max]", space=SPACE)


def _study(ledger: Ledger) -> optuna.Study:
    return optuna.load_study(storage=f"sqlite:///{ledger.location}", study_name="sweep")


def test_trial_result_is_the_best_report_of_the_first_metric(sweep: MadeSweep) -> None:
    number = sweep.add("complete", [0.5, 900.0], [0.4, 100.0], [0.4, 950.0], [0.6, 1000.0])
    record = sweep.ledger.trial(number)
    # of equals the earlier; and not 1000, which the weights of that report do not have
    assert (record.values, record.best_epoch, record.best_step) == ((0.4, 100.0), 2, 20)
    assert record.result == [0.4, 100.0]
    assert record.reports == {1: 0.5, 2: 0.4, 3: 0.4, 4: 0.6}
    told = _study(sweep.ledger).trials[number]
    assert (told.state, told.values) == (TrialState.COMPLETE, [0.4, 100.0])


def test_non_finite_report_is_never_the_best(sweep: MadeSweep) -> None:
    number = sweep.add("complete", [0.5, 1.0], [0.1, math.nan], [math.inf, 2.0])
    record = sweep.ledger.trial(number)
    assert (record.values, record.best_epoch) == ((0.5, 1.0), 1)
    reports = sweep.view.ledger.reports_of(number)
    assert repr(reports) == "{1: [0.5, 1.0], 2: [0.1, nan], 3: [inf, 2.0]}"


def test_reader_equals_ledger_and_front_equals_optunas(sweep: MadeSweep) -> None:
    draw = random.Random(3)
    for _ in range(2):  # equal ones are both on the front
        sweep.add("complete", [-1.0, 0.5])
    for _ in range(25):
        reports = [
            [draw.randint(0, 20) / 4, draw.choice([math.nan, *map(float, range(1, 20))])]
            for _ in range(draw.randint(1, 3))
        ]
        finite = any(not math.isnan(speed) for _, speed in reports)
        endings = ["failed", None] + ["complete"] * 6 * finite
        sweep.add(draw.choice(endings), *reports)
    records, view = sweep.ledger.trials(), LedgerReader(sweep.paths.ledger)
    assert list(map(repr, view.records())) == list(map(repr, records))
    front = [trial.number for trial in view.front()]
    assert sorted(front) == [trial.number for trial in _study(sweep.ledger).best_trials]
    assert front == [trial.number for trial in sweep.ledger.front()]
    assert 2 < len(front) < sum(record.state == "complete" for record in records)
    values = [records[number].values[0] for number in front]
    assert values == sorted(values)


def test_undominated_of_three_with_a_direction_each() -> None:
    values = [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (0.5, 0.0, 9.0), (1.0, 2.0, 1.0), (2.0, 2.0, 2.0)]
    assert undominated(values, (True, False, True)) == [2, 1, 3]
    assert undominated([], (True, True)) == []


def test_unrecorded_report_is_completed_after_a_kill(sweep: MadeSweep) -> None:
    number = sweep.add(None, [0.5, 900.0])
    sweep.log(
        number,
        Row(10, 0, {"val/loss": 0.5, "train/samples_per_second": 1.0, "epoch": 1.0}),
        Row(15, 0, {"train/loss": 0.1}),
        Row(20, 0, {"val/loss": 0.4, "train/samples_per_second": 800.0, "epoch": 2.0}),
    )
    commit(sweep.paths.trial(number), 2, step=20)
    facts = read_sweep_state(sweep.paths, sweep.spec, sweep.ledger.trials(), live=False)
    told = [str(wrong) for wrong in reconcile(facts)]
    assert f"trial {number}: the ledger lacks the report of epoch 2" in told
    report_missing(unreported(facts.trials[0]), sweep.ledger)
    sweep.ledger.finish(number, "complete")
    # epoch 1 was measured anew after a kill, and stays as it was first told
    assert sweep.view.ledger.reports_of(number) == {1: [0.5, 900.0], 2: [0.4, 800.0]}
    assert _study(sweep.ledger).trials[number].values == [0.4, 800.0]


def test_best_asks_for_a_choice_on_a_front(sweep: MadeSweep, tmp_path: Path) -> None:
    sweep.add("complete", [0.5, 900.0])
    assert sweep.view.best()["value"] == [0.5, 900.0], "the only one is the best"
    sweep.add("complete", [0.4, 800.0])
    sweep.add("complete", [0.6, 700.0])
    target = tmp_path / "out"
    with pytest.raises(NoChoice, match=r"2 trials .* on the Pareto front: 1, 0; .*as TRIAL"):
        export_best(sweep.view, target)
    assert not target.exists()
    assert sweep.view.best(0)["number"] == 0
    assert sweep.view.best(2)["number"] == 2, "any trial can be chosen"
    assert sweep.ledger.best() is None


def test_a_sweep_without_a_complete_trial_has_no_front(sweep: MadeSweep) -> None:
    sweep.add("failed", [0.5, 900.0])
    found = sweep.view.status()
    assert found["best"] == []
    console = Console(file=io.StringIO(), width=200)
    console.print(render.sweeps([found], sweep.paths.root))
    console.print(render.status(found, sweep.view))
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert told.splitlines()[1].split()[-1] == "-"
    assert "best:" not in told
    with pytest.raises(NoBest):
        sweep.view.select_trial(None)


def test_runs_are_tagged_on_and_off_the_front(sweep: MadeSweep) -> None:
    sweep.add("complete", [0.5, 900.0])
    sweep.add("complete", [0.6, 950.0])
    sweep.add("failed", reason="oom")
    tags = front_tags(sweep.ledger.front(), sweep.ledger.trials())
    assert tags == {None: {"pareto_front": "0, 1"}, 0: {"pareto": "true"}, 1: {"pareto": "true"}}
    sweep.add("complete", [0.4, 1000.0])
    tags = front_tags(sweep.ledger.front(), sweep.ledger.trials())
    assert tags[None] == {"pareto_front": "3"}
    assert [tags[n]["pareto"] for n in (0, 1, 3)] == ["false", "false", "true"]
