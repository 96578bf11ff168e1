"""Outcome constraints in ledger, ranking, views, stopping rules and search."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sweeps.errors import NO_SUCCESS, SearchChanged
from sweeps.ledger.ledger import Ledger, LedgerReport, Suggestion
from sweeps.ledger.over_seeds import repeats_of
from sweeps.ledger.ranking import closest
from sweeps.ledger.reader import LedgerReader
from sweeps.recording.tags import feasibility_tags
from sweeps.search.suggest import Suggester
from sweeps.spec.own_values import resolve_search
from sweeps.spec.resume_checks import check_search_changes
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.stopping.rule import Standing
from sweeps.stopping.schedulers import make_scheduler, make_verdict_fn
from sweeps.trust.confirm import find_leaders
from sweeps.trust.findings import find
from sweeps.view.compare import leaders
from sweeps.view.sweep_progress import best_of, is_feasible, row_of
from sweeps.view.sweep_view import NoBest
from sweeps.view.tables import trials_frame
from tests.golden.messages import compare_messages
from tests.unit.sweeps.sweep_factory import MadeSweep

SPEC = """
name: limited
task: digits
metric: val/loss
mode: min
trials: 40
budget: {epochs: 4}
space:
  train.optimizer.lr: {uniform: [0.001, 1.0]}
  train.clip.max_norm: {uniform: [0.1, 1.0]}
constraints: {val/ms: {max: 5}}
search: {sampler: tpe, startup_trials: 8}
"""
Made = Callable[..., Ledger]


def spec_of(*overrides: str) -> SweepSpec:
    return parse_spec(SPEC, "limited.yaml", overrides)


@pytest.fixture
def make(tmp_path: Path) -> Made:
    """Return what makes a ledger whose trials have made these reports: (loss, ms) each."""

    def made(
        spec: SweepSpec, *trials: list[tuple[float, ...]], ending: Any = "complete"
    ) -> Ledger:
        ledger = Ledger.create(
            tmp_path / "ledger.db",
            mode=spec.modes,
            sweep_id="s",
            select=spec.select,
            repeats=repeats_of(spec),
            limits=spec.limits,
        )
        for number, reports in enumerate(trials):
            ledger.add(Suggestion({}, {}))
            for epoch, (value, *others) in enumerate(reports, 1):
                ledger.report_all(number, [LedgerReport(epoch, epoch, value, others)])
            if ending is not None:
                ledger.finish(number, ending)
        return ledger

    return made


def test_the_best_trial_is_feasible_for_each_reader_of_the_ledger(make: Made) -> None:
    ledger = make(spec_of(), [(0.1, 7.0)], [(0.5, 4.0), (0.3, 5.0)], [(0.2, 9.0), (0.6, 1.0)])
    for read in (ledger, Ledger.open(ledger.location.path), LedgerReader(ledger.location.path)):
        best = read.best()
        assert best is not None
        assert (best.number, best.value, best.limited) == (1, 0.3, (5.0,))
        trials = read.trials() if isinstance(read, Ledger) else read.trials
        assert [one.feasible for one in trials] == [False, True, False]
        # The report with the best loss has the checkpoint, so it is the one that is judged.
        assert trials[2].missed == "val/ms 9, at most 5 allowed"
        assert closest(trials) is None
    curves = {one.number: one.compared_reports for one in ledger.trials()}
    assert curves[1] == {1: (0.5, 4.0), 2: (0.3, 5.0)}
    assert [one.compared_reports for one in LedgerReader(ledger.location.path).records()] == [
        *curves.values()
    ]


def test_without_a_feasible_trial_none_is_the_best_and_the_closest_is_known(make: Made) -> None:
    ledger = make(spec_of(), [(0.1, 9.0)], [(0.5, 6.0)], ending=None)
    assert ledger.front() == []
    near = closest(ledger.trials())
    assert near is not None
    assert (near.number, near.limits.missed(near.judged)) == (1, {"val/ms": 1.0})


def test_edited_limits_judge_what_was_reported_before(make: Made) -> None:
    ledger = make(spec_of(), [(0.1, 9.0)], [(0.5, 4.0)])
    assert [one.number for one in ledger.front()] == [1]
    looser = spec_of("constraints.val/ms.max=9")
    check_search_changes(spec_of(), looser, 2)
    ledger.store_limits(looser.limits)
    assert [one.number for one in ledger.front()] == [0]
    assert [one.number for one in LedgerReader(ledger.location.path).front()] == [0]


@pytest.mark.parametrize("change", ["constraints={}", "constraints.val/size.min=1"])
def test_other_metrics_cannot_get_limits_later(change: str) -> None:
    with pytest.raises(SearchChanged, match="the ledger has of each report"):
        check_search_changes(spec_of(), spec_of(change), 0)


def test_limit_on_the_metric_itself(make: Made) -> None:
    spec = spec_of("constraints={val/loss: {min: 0.2}}")
    assert (spec.reported, spec.trial_config(0, {}).metric) == (("val/loss",), "val/loss")
    ledger = make(spec, [(0.1,)], [(0.3,)])
    assert [one.number for one in ledger.front()] == [1]
    assert [one.feasible for one in LedgerReader(ledger.location.path).records()] == [False, True]


def test_the_front_of_several_metrics_has_feasible_trials_alone(make: Made) -> None:
    spec = spec_of("metric=[val/loss, val/size]", "mode=[min, max]")
    assert spec.reported == ("val/loss", "val/size", "val/ms")
    ledger = make(spec, [(0.1, 9.0, 6.0)], [(0.3, 2.0, 5.0)], [(0.2, 1.0, 1.0)], [(0.4, 1.0, 1.0)])
    for read in (ledger, LedgerReader(ledger.location.path)):
        assert [(one.number, one.values) for one in read.front()] == [
            (2, (0.2, 1.0)),
            (1, (0.3, 2.0)),
        ]


@pytest.mark.parametrize(("value", "feasible"), [("mean", False), ("median", True)])
def test_the_limited_metric_of_a_configuration_is_combined_as_its_metric_is(
    make: Made, value: str, feasible: bool
) -> None:
    spec = spec_of(f"repeats={{seeds: 3, value: {value}}}")
    ledger = make(spec, [(0.1, 1.0)])
    for ms in (2.0, 30.0):
        number = ledger.add_extra("repeat", 0, 1).number
        ledger.report(number, epoch=1, step=1, value=0.1, others=(ms,))
        ledger.finish(number, "complete")
    first = ledger.trials()[0]
    assert first.limited == ((11.0,) if value == "mean" else (2.0,))
    assert first.feasible is feasible
    assert bool(ledger.front()) is feasible


class _Trial:
    def __init__(self, number: int) -> None:
        self.config = {"number": number}


def _told(spec: SweepSpec, *reports: tuple[float, float]) -> dict[int, str]:
    scheduler = make_scheduler(spec)
    for number, values in enumerate(reports):
        result = {"epoch": 1, "objective": values[0], "objectives": values}
        scheduler.on_trial_result(None, _Trial(number), result)
        # Tune repeats the result of a stopped trial, of which only the first metric is left.
        last = {"epoch": 1, "objective": values[0]}
        scheduler.on_trial_complete(None, _Trial(number), last)
    return scheduler.stop_reasons


@pytest.mark.parametrize(
    "rule",
    ["{scheduler: asha, reduction: 2}", "{scheduler: median, min_trials: 1}"],
    ids=["asha", "median"],
)
def test_an_infeasible_trial_raises_no_bar_for_feasible_ones(rule: str) -> None:
    spec = spec_of(f"early_stopping={rule}")
    # A loss that would stop the others, if it counted.
    assert _told(spec, (0.01, 50.0), (0.5, 1.0), (0.4, 5.0)) == {}
    stopped = _told(spec, (0.5, 1.0), (0.01, 50.0), (0.9, 1.0), (0.6, 6.0))
    assert {1, 3} <= stopped.keys()
    assert "val/ms 50, infeasible (val/ms 50, at most 5 allowed), needed" in stopped[1]


def test_infeasible_trials_compete_by_their_violation() -> None:
    spec = spec_of("early_stopping={scheduler: asha, reduction: 2}")
    stopped = _told(spec, (0.5, 9.0), (0.01, 50.0), (0.9, 6.0))
    assert stopped.keys() == {1}
    assert "needed a smaller violation to be in the best 1/" in stopped[1]


def test_a_feasible_trial_is_promoted_before_a_better_infeasible_one() -> None:
    spec = spec_of("early_stopping={scheduler: asha_promote, reduction: 2}", "trials=2")
    reports = {0: {1: (0.9, 5.0)}, 1: {1: (0.1, 7.0)}}
    judge = make_verdict_fn(spec)
    stopped = judge(Standing({**reports, 0: {1: (0.9, 5.0), 4: (0.8, 5.0)}}, {1}, complete={0}))
    assert stopped == {
        1: "asha_promote at epoch 1: val/loss 0.1, val/ms 7, infeasible (val/ms 7, at most 5 "
        "allowed), never promoted, rank 2 of 2"
    }
    assert judge(Standing(reports, {0, 1})) == {}


LIMITS = "constraints: {val/ms: {max: 5}, val/recall: {min: 0.5}}"


def test_sweep_without_a_feasible_trial_says_by_how_much_it_misses(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    sweep = MadeSweep(tmp_path, more=LIMITS)
    for report in ((0.1, 9.0, 0.9), (0.5, 6.0, 0.45), (0.2, 5.0, 0.1)):
        sweep.add("complete", report)
    view = sweep.view
    status, outcome = view.status(), view.outcome()
    assert (status["state"], status["best"]) == ("failed", None)
    assert status["closest"] == {
        "number": 1,
        "feasible": False,
        "violations": {"val/ms": 1.0, "val/recall": pytest.approx(0.05)},
    }
    assert (outcome.exit_code, outcome.best) == (NO_SUCCESS, [])
    assert outcome.failure is not None
    with pytest.raises(NoBest) as refused:
        view.best()
    refusal, _, see = str(refused.value).partition("; see: ")
    assert see == view.paths.command("trials")
    found = find(view).sentences
    assert [one.topic for one in found][:1] == ["constraints"]
    compare_messages(
        request,
        [outcome.failure.cause, outcome.failure.remedy, refusal, found[0].sentence],
    )


def test_views_mark_infeasible_trials_and_confirm_none_of_them(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path, more=LIMITS)
    for report in ((0.1, 9.0, 0.9), (0.5, 5.0, 0.5), (0.4, 4.0, 0.8), (0.3, 1.0, 0.4)):
        sweep.add("complete", report)
    view, spec = sweep.view, sweep.spec
    assert [row["feasible"] for row in view.rows()] == [False, True, True, False]
    assert view.best()["number"] == 2
    assert find_leaders(view.paths, spec, view.records, None) == [2, 1]
    assert [one.number for one in leaders(view, 4)] == [2, 1, 3, 0]
    rows = [row_of(record, spec, record.state) for record in view.records]
    best = best_of(rows, spec)
    assert best is not None
    assert best.number == 2
    assert [is_feasible([row], spec) for row in rows] == [False, True, True, False]
    tags = [feasibility_tags(record) for record in view.records]
    assert tags[0] == {"feasible": "false", "constraint_violation": "val/ms: 4.0"}
    assert tags[1] == {"feasible": "true", "constraint_violation": ""}
    assert list(trials_frame(view)["feasible"]) == [False, True, True, False]


def _search(path: Path, spec: SweepSpec) -> list[tuple[float, bool]]:
    """Search for a small loss, where a low rate is good and forbidden."""
    ledger = Ledger.create(path, mode="min", sweep_id="s", limits=spec.limits)
    suggester = Suggester(spec, ledger)
    found = []
    for number in range(spec.trials):
        params = ledger.add(suggester.propose(number)).params
        rate, norm = params["train.optimizer.lr"], params["train.clip.max_norm"]
        value, ms = rate + (norm - 0.5) ** 2, 10 - 10 * rate
        others = (ms,) if spec.constraints else ()
        ledger.report(number, epoch=4, step=4, value=value, others=others)
        ledger.finish(number, "complete")
        found.append((value, ms <= 5))
    return found


@pytest.mark.parametrize("sampler", ["tpe", "gp", "nsgaii"])
def test_samplers_find_the_feasible_optimum(sampler: str, tmp_path: Path) -> None:
    with_limit = spec_of(f"search.sampler={sampler}")
    limited = _search(tmp_path / "limited.db", with_limit)
    free = _search(tmp_path / "free.db", spec_of("constraints={}", f"search.sampler={sampler}"))
    share, share_free = (sum(ok for _, ok in one[8:]) / 32 for one in (limited, free))
    assert share > share_free + 0.2
    if sampler != "nsgaii":  # its generations are longer
        assert min(value for value, ok in limited if ok) < 0.55  # 0.5 is the optimum


def test_cmaes_is_said_not_to_know_constraints() -> None:
    said = "cmaes learns from values alone"
    cautions = resolve_search(spec_of("search.sampler=cmaes"), {}).cautions
    assert any(one.startswith(said) for one in cautions)
    assert not any(one.startswith(said) for one in resolve_search(spec_of(), {}).cautions)
