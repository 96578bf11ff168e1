"""`select`: every view, every export and Optuna agree on what the value of a trial is."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState
from rich.console import Console
from typer.testing import CliRunner

from sweeps.artifacts.export import _rank_in_sweep
from sweeps.cli.app import app
from sweeps.cli.run_console import ProgressTable
from sweeps.errors import SearchChanged
from sweeps.ledger.warm_start import WarmStartRefused, collect_warm_start
from sweeps.reconcile.reconcile import end_of_training
from sweeps.reconcile.stop_criteria import active_stop_criterion
from sweeps.recording.tags import best_tags, end_tags, front_tags, leaders_view
from sweeps.search.shown_trials import OneRung
from sweeps.spec.resume_checks import check_search_changes
from sweeps.spec.spec import parse_spec
from sweeps.stores import best_generation
from sweeps.view.compare import Incomparable, compare
from sweeps.view.observer import TrialProgress, TrialStart
from sweeps.view.sweep_progress import SweepProgress, best_name, best_of
from sweeps.view.sweep_view import NoBest
from sweeps.view.tables import select_rows
from tests.fake_checkpoints import commit
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import MadeSweep

REPORTS: dict[int, tuple[str, list[float]]] = {
    0: ("complete", [0.30, 0.50]),
    1: ("complete", [0.60, 0.40]),
    2: ("pruned", [0.10]),
}
"""With `checkpoint` trial 2 is the best, then 0 and 1; with `final` trial 1, then 0."""
BEST = {"checkpoint": (2, 0.10), "final": (1, 0.40)}
VALUES = {"checkpoint": [0.30, 0.40, 0.10], "final": [0.50, 0.40, 0.10]}


@pytest.fixture(params=["checkpoint", "final"])
def select(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def sweep(tmp_path: Path, select: str) -> MadeSweep:
    return _made(tmp_path, select)


def _made(root: Path, select: str, name: str = "small") -> MadeSweep:
    made = MadeSweep(root, name, more=f"select: {select}")
    for ending, values in REPORTS.values():
        number = made.add(ending, *values)  # type: ignore[arg-type]
        for epoch in range(1, len(values) + 1):
            commit(made.paths.trial(number), epoch, step=10 * epoch)
    return made


def test_every_view_shows_the_same_best(sweep: MadeSweep, select: str) -> None:
    view, (number, value) = sweep.view, BEST[select]
    assert [(one.number, one.value) for one in sweep.ledger.front()] == [(number, value)]
    assert [(one.number, one.value) for one in view.front()] == [(number, value)]
    status = view.status()["best"]
    assert (status["number"], status["value"]) == (number, value)
    assert view.best()["number"] == number
    assert [row["value"] for row in view.rows()] == VALUES[select]
    leaders = compare([view], top=5)["leaders"]
    assert [one["number"] for one in leaders] == (
        [2, 0, 1] if select == "checkpoint" else [1, 0, 2]
    )
    best = sweep.ledger.trial(number)
    assert best_tags(best)["best_trial"] == str(number)
    assert best_tags(best)["best_value"] == repr(value)
    assert _rank_in_sweep(view, view.records[number]) == "the best"
    assert view.outcome().best[0].number == number
    ranked = select_rows(view.rows(), sweep.spec, sort="value", state="complete")
    assert [row["number"] for row in ranked] == ([0, 1] if select == "checkpoint" else [1, 0])


def test_live_table_shows_the_same_best(select: str) -> None:
    text = f"name: s\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 3\nselect: {select}"
    spec = parse_spec(text, "s.yaml")
    progress = SweepProgress(spec)
    table = ProgressTable(Console(file=io.StringIO()), progress)
    for number, (ending, values) in REPORTS.items():
        table.started(TrialStart(number, {}, 1))
        for epoch, value in enumerate(values, start=1):
            metrics = {"val/loss": value, "best/val/loss": min(values[:epoch])}
            table.reported(TrialProgress(number, {}, epoch, epoch, metrics))
        table.ended(number, ending, None, None)
    best = best_of(progress.rows, spec)
    assert best is not None
    assert (best.number, best.metrics[best_name(spec)]) == BEST[select]
    assert f"trial {BEST[select][0]}" in table._summary()


def test_best_so_far_counts_trials_that_have_not_ended(sweep: MadeSweep, select: str) -> None:
    """Of one that still trains, the best report is in a checkpoint; its last one is not final."""
    running = sweep.add(None, 0.05, 0.7)
    so_far = (running, 0.05) if select == "checkpoint" else BEST[select]
    view = sweep.view
    status, (best,) = view.status()["best"], view.outcome().best
    assert (status["number"], status["value"]) == (best.number, best.value) == so_far
    assert view.best()["number"] == BEST[select][0]  # what is exported has ended
    progress = SweepProgress(sweep.spec, view.records)
    assert (
        f"(trial {so_far[0]})" in ProgressTable(Console(file=io.StringIO()), progress)._summary()
    )
    shown = CliRunner().invoke(app, ["status", "small", "--root", str(sweep.paths.root)])
    word = "best so far" if select == "checkpoint" else "best"
    assert f"{word}: trial {so_far[0]} with val/loss {so_far[1]:g}" in shown.output


def test_first_trials_without_a_column_are_the_best(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path, mode="max")
    for value in (0.2, 0.9, 0.5):
        sweep.add("complete", value)
    rows = sweep.view.rows()
    chosen = {
        (sort, top): [row["number"] for row in select_rows(rows, sweep.spec, sort=sort, top=top)]
        for sort, top in ((None, 2), (None, None), ("state", 2))
    }
    assert chosen == {(None, 2): [1, 2], (None, None): [0, 1, 2], ("state", 2): [0, 1]}


@pytest.mark.parametrize(("value", "mode"), [(math.nan, "min"), (-math.inf, "min")])
def test_live_table_takes_no_value_that_is_not_finite_for_the_best(
    value: float, mode: str, select: str
) -> None:
    text = f"name: s\ntask: digits\nmetric: val/loss\nmode: {mode}\ntrials: 3\nselect: {select}"
    progress = SweepProgress(spec := parse_spec(text, "s.yaml"))
    for number, reported in enumerate((value, 0.5)):
        progress.started(TrialStart(number, {}))
        metrics = {"val/loss": reported, best_name(spec): reported}
        progress.reported(TrialProgress(number, {}, 1, 1, metrics))
        progress.ended(number, "complete")
    best = best_of(progress.rows, spec)
    assert best is not None
    assert best.number == 1


def test_optuna_receives_the_value_that_ranks(sweep: MadeSweep, select: str) -> None:
    trials = sweep.ledger.frozen_trials()
    assert [one.state for one in trials] == [
        TrialState.COMPLETE, TrialState.COMPLETE, TrialState.PRUNED
    ]  # fmt: skip
    assert [one.value for one in trials[:2]] == VALUES[select][:2]
    rung = OneRung([1, 2], minimize=True, select=sweep.spec.select)
    shown = rung.show(trials, startup=1, enough=2)
    assert [one.value for one in shown[:2]] == VALUES[select][:2]


def test_checkpoint_is_that_of_the_value(sweep: MadeSweep, select: str) -> None:
    for number, steps in {"checkpoint": {0: 10, 1: 20}, "final": {0: 20, 1: 20}}[select].items():
        record = sweep.view.records[number]
        assert record.best_step == steps
        assert end_tags(sweep.ledger.trial(number), sweep.spec, sweep.paths)["best_step"] == str(
            steps
        )
    if select == "checkpoint":
        return  # these checkpoints all have one value
    found = best_generation(sweep.paths, sweep.spec, sweep.view.records[0])
    assert not isinstance(found, str)
    assert found.step == 20
    assert sweep.view.trial(sweep.view.records[0])["best_checkpoint"].endswith("step-00000020")


def test_lost_last_checkpoint_is_reported(tmp_path: Path) -> None:
    sweep = _made(tmp_path, "final")
    last = sweep.paths.trial(1) / "checkpoints/step-00000020"
    (last / "state.pt").write_bytes(b"state of epoch 3")
    assert "at step 20, is missing or damaged" in str(
        best_generation(sweep.paths, sweep.spec, sweep.view.records[1])
    )
    assert sweep.view.outcome().lost_weights is not None
    last.rename(tmp_path / "away")
    assert sweep.view.trial(sweep.view.records[1])["best_checkpoint"] is None


def test_last_value_must_be_finite(select: Any) -> None:
    reports = {1: 0.5, 2: math.nan}
    ending, reason = end_of_training(reports, "val/loss", select)
    assert ending == ("complete" if select == "checkpoint" else "failed")
    assert (reason is None) is (select == "checkpoint")
    assert end_of_training({1: math.nan, 2: 0.5}, "val/loss", select)[0] == "complete"


def test_final_needs_a_complete_trial(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path, more="select: final")
    sweep.add("pruned", 0.1)
    with pytest.raises(NoBest, match="trained to its end"):
        sweep.view.best()
    assert sweep.view.best(0)["value"] == 0.1  # a trial that is named, whatever its state


def test_several_metrics_are_of_the_last_report(tmp_path: Path) -> None:
    sweep = MadeSweep(
        tmp_path, metric="[val/loss, val/accuracy]", mode="[min, max]", more="select: final"
    )
    sweep.add("complete", [0.2, 0.9], [0.5, 0.8])
    sweep.add("complete", [0.6, 0.5], [0.4, 0.7])
    sweep.add("pruned", [0.1, 0.99])
    sweep.add(None, [0.3, 0.6], [0.2, math.inf])
    assert [one.values for one in sweep.view.records] == [(0.5, 0.8), (0.4, 0.7), (0.1, 0.99), ()]
    assert [one.number for one in sweep.view.front()] == [1, 0]
    tags = front_tags(sweep.ledger.front(), sweep.ledger.trials())
    assert tags == {None: {"pareto_front": "0, 1"}, 0: {"pareto": "true"}, 1: {"pareto": "true"}}
    assert sweep.ledger.frozen_trials()[0].values == [0.5, 0.8]


def test_stop_criteria_read_the_value_that_ranks(sweep: MadeSweep, select: str) -> None:
    spec = with_overrides(sweep.spec, ["stop.value=0.35", "trials=9"])
    met = active_stop_criterion(spec, sweep.ledger.trials(), 0.0)
    assert (met is not None) is (select == "checkpoint")


def test_resume_cannot_change_it(sweep: MadeSweep, select: str) -> None:
    other = "final" if select == "checkpoint" else "checkpoint"
    with pytest.raises(SearchChanged, match=f"select is {select} .* cannot become {other}"):
        check_search_changes(sweep.spec, with_overrides(sweep.spec, [f"select={other}"]), 0)
    check_search_changes(sweep.spec, sweep.spec, 3)


def test_sweeps_that_differ_in_it_are_not_mixed(tmp_path: Path) -> None:
    one, two = _made(tmp_path, "checkpoint", "one"), _made(tmp_path, "final", "two")
    with pytest.raises(Incomparable, match="select: final"):
        compare([one.view, two.view], top=3)
    with pytest.raises(WarmStartRefused, match="its select is checkpoint"):
        collect_warm_start(tmp_path, with_overrides(two.spec, ["search.warm_start=one"]))


def test_mlflow_page_sorts_by_the_value_that_ranks(sweep: MadeSweep, select: str) -> None:
    state = leaders_view(sweep.spec).state
    assert ("best/val/loss" in state) is (select == "checkpoint")
