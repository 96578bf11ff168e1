"""What samplers are told of a trial: by who ended it, the rungs that it reached, and its seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, NSGAIISampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from sweeps.ledger.attributes import EXEMPT
from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.ledger.over_seeds import repeats_of
from sweeps.ledger.reasons import BY_THE_SWEEP, BY_THE_USER
from sweeps.ledger.warm_start import PriorTrial, WarmStart
from sweeps.search.prior_trials import Comparison
from sweeps.search.shown_trials import ShownTrials
from sweeps.search.suggest import Suggester
from sweeps.spec.spec import SweepSpec, parse_spec

NAN, LOST = "non_finite: val/loss is nan", "lost: its process was killed"
OVER = BY_THE_SWEEP + "its 2 hours are over"
RULE = "val/loss 0.9, needed at most 0.5, rank 9 of 12"
NOTHING, WORST, BEHIND = "nothing", "the worst", "behind those that came further"
RIVALS = 6
SPEC = """
name: s
task: digits
metric: val/loss
mode: min
trials: 60
budget: {epochs: 9}
space: {task.x: {uniform: [0, 1]}}
search: {startup_trials: 5}
early_stopping: {scheduler: asha, grace_epochs: 1, reduction: 3}
"""


def _spec(scheduler: str, *overrides: str) -> SweepSpec:
    text = SPEC if scheduler in ("asha", "asha_promote") else SPEC.partition("early_stopping")[0]
    return parse_spec(text, "s.yaml", (f"early_stopping.scheduler={scheduler}", *overrides))


def _ledger(path: Path, spec: SweepSpec) -> Ledger:
    return Ledger.create(path / "l.db", mode=spec.mode, sweep_id="s", repeats=repeats_of(spec))


def _add(ledger: Ledger, spec: SweepSpec, x: float = 0.5) -> int:
    space = {key: one.to_optuna() for key, one in spec.space.items()}
    return ledger.add(Suggestion({"task.x": x}, space)).number


def _train(ledger: Ledger, number: int, reports: int, value: float) -> None:
    several = len(ledger.directions) > 1
    for epoch in range(1, reports + 1):
        ledger.report(
            number, epoch=epoch, step=epoch, value=value / epoch, others=[value] * several
        )


def _rivals(ledger: Ledger, spec: SweepSpec, reports: int) -> None:
    """Add trials that end after so many reports, each with all of its seeds."""

    def add() -> None:
        for _ in range(RIVALS):
            first = _add(ledger, spec)
            more = range(1, spec.repeats.seeds)
            for number in [first, *(ledger.add_extra("repeat", first, i).number for i in more)]:
                _train(ledger, number, reports, 0.9)
                ledger.finish(number, "complete" if reports == 9 else "pruned")

    ledger.transaction(add)


def _told(spec: SweepSpec, ledger: Ledger, sampler: BaseSampler | None = None) -> Any:
    """What a sampler is told of the last trial of the search: its value, or what follows."""
    shown = ShownTrials(spec, ledger)
    last = len(shown.of_search())
    trial: FrozenTrial = shown.for_sampler(sampler or TPESampler(), shown.as_points(but=last))[-1]
    if trial.state == TrialState.COMPLETE:
        return pytest.approx(trial.value)
    if trial.state == TrialState.FAIL:
        return NOTHING
    return BEHIND if trial.intermediate_values else WORST


@pytest.mark.parametrize(
    ("scheduler", "rung", "reports", "ending", "reason", "told"),
    [
        ("asha", 3, 9, "complete", None, 0.1),
        ("asha", 3, 1, "pruned", RULE, BEHIND),
        ("asha", 3, 4, "pruned", RULE, 0.1),
        ("asha", 3, 0, "failed", NAN, WORST),
        ("asha", 3, 4, "failed", NAN, WORST),
        ("asha", 3, 4, "failed", LOST, NOTHING),
        ("asha", 3, 0, "pruned", BY_THE_USER, NOTHING),
        ("asha", 3, 2, "pruned", BY_THE_USER, NOTHING),
        ("asha", 3, 2, "pruned", OVER, NOTHING),
        ("asha", 3, 4, "pruned", BY_THE_USER, 0.1),
        ("asha", 3, 4, "pruned", OVER, 0.1),
        ("asha", 1, 2, "pruned", OVER, 0.3),
        ("none", 9, 8, "pruned", BY_THE_USER, NOTHING),
        ("none", 9, 8, "pruned", OVER, NOTHING),
        ("none", 9, 0, "failed", NAN, WORST),
        ("median", 9, 8, "pruned", BY_THE_USER, NOTHING),
        ("median", 9, 8, "pruned", RULE, BEHIND),
        ("median", 3, 4, "pruned", BY_THE_USER, 0.1),
        ("asha_promote", 3, 1, "pruned", BY_THE_USER, BEHIND),  # as before, while it was paused
        ("asha_promote", 3, 1, "pruned", OVER, BEHIND),
        ("asha_promote", 3, 2, "pruned", BY_THE_USER, NOTHING),
        ("asha_promote", 3, 4, "pruned", BY_THE_USER, 0.1),
    ],
)
def test_told_is_who_ended_a_trial_and_where(
    tmp_path: Path,
    scheduler: str,
    rung: int,
    reports: int,
    ending: Any,
    reason: str | None,
    told: Any,
) -> None:
    spec = _spec(scheduler)
    ledger = _ledger(tmp_path, spec)
    _rivals(ledger, spec, rung)
    number = _add(ledger, spec)
    _train(ledger, number, reports, 0.3)
    ledger.finish(number, ending, reason=reason)
    assert _told(spec, ledger) == told
    paused = [one for one in ShownTrials(spec, ledger).as_points(but=0) if one.params]
    assert len(paused) == RIVALS, "GP leaves the neighbourhood of all points, of this one as well"


@pytest.mark.parametrize("sampler", [GPSampler(), CmaEsSampler(), NSGAIISampler()])
@pytest.mark.parametrize("scheduler", ["none", "asha"])
def test_stopped_by_the_user_is_no_result_of_any_sampler(
    tmp_path: Path, scheduler: str, sampler: BaseSampler
) -> None:
    spec = _spec(scheduler)
    ledger = _ledger(tmp_path, spec)
    _rivals(ledger, spec, 9)
    number = _add(ledger, spec)
    _train(ledger, number, 4, 0.3)
    ledger.finish(number, "pruned", reason=BY_THE_USER)
    assert _told(spec, ledger, sampler) in (NOTHING, BEHIND)  # both are ignored


def test_exempt_trial_that_the_user_stops_was_not_paused(tmp_path: Path) -> None:
    spec = _spec("asha_promote")
    ledger = _ledger(tmp_path, spec)
    _rivals(ledger, spec, 3)
    number = _add(ledger, spec)
    ledger.set_attr(number, EXEMPT, True)
    _train(ledger, number, 1, 0.3)
    ledger.finish(number, "pruned", reason=BY_THE_USER)
    assert _told(spec, ledger) == NOTHING


def test_several_metrics_are_told_alike(tmp_path: Path) -> None:
    spec = _spec("asha", "metric=[val/loss, val/accuracy]", "mode=[min, max]")
    ledger = _ledger(tmp_path, spec)
    _rivals(ledger, spec, 3)
    for reports, told in ((0, NOTHING), (2, NOTHING), (4, pytest.approx([0.1, 0.3]))):
        number = _add(ledger, spec)
        _train(ledger, number, reports, 0.3)
        ledger.finish(number, "pruned", reason=BY_THE_USER)
        shown = ShownTrials(spec, ledger)
        trial = shown.for_sampler(TPESampler(), shown.as_points(but=number + 1))[-1]
        assert (NOTHING if trial.state == TrialState.FAIL else trial.values) == told


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        ([("complete", None), ("failed", NAN)], WORST),
        ([("complete", "patience: no gain"), ("failed", LOST)], NOTHING),
        ([("complete", None), ("failed", LOST), ("failed", NAN)], WORST),
        ([("complete", None), ("failed", NAN), ("failed", LOST)], WORST),
        ([("failed", NAN)], WORST),
        ([("complete", None), ("pruned", BY_THE_USER)], NOTHING),
        ([("complete", None), ("failed", NAN), ("pruned", BY_THE_USER)], WORST),
        ([("complete", None), ("complete", None), ("complete", None)], 0.3 / 9),
    ],
)
def test_a_configuration_ends_as_the_seed_that_decides(
    tmp_path: Path, ends: list[tuple[Any, str | None]], told: Any
) -> None:
    spec = _spec("none", "repeats=3")
    ledger = _ledger(tmp_path, spec)
    _rivals(ledger, spec, 9)
    first = _add(ledger, spec)
    for index, (ending, reason) in enumerate(ends):
        number = ledger.add_extra("repeat", first, index).number if index else first
        _train(ledger, number, 9 if ending == "complete" else 5, 0.3)
        ledger.finish(number, ending, reason=reason)
    assert _told(spec, ledger) == told
    *rivals, own = ShownTrials(spec, ledger).of_search()
    wins = Comparison((1, 3, 9), (True,), "checkpoint").wins([own], rivals)
    assert wins is not None
    assert (wins < 0.3) is (told == WORST), "the priors are judged alike"


@pytest.mark.parametrize("reason", [BY_THE_USER, OVER])
def test_tpe_returns_to_a_place_where_trials_were_stopped(tmp_path: Path, reason: str) -> None:
    """The optimum is where trials were stopped, as on a machine that happened to be slow."""
    spec = _spec("none")
    ledger = _ledger(tmp_path, spec)
    suggester = Suggester(spec, ledger)
    for number in range(40):
        suggestion = suggester.propose(number)
        ledger.add(suggestion)
        x = suggestion.params["task.x"]
        if 0.7 < x < 0.8:
            ledger.finish(number, "pruned", reason=reason)
            continue
        ledger.report(number, epoch=9, step=9, value=abs(x - 0.75))
        ledger.finish(number, "complete")
    drawn = [suggester.propose(number).params["task.x"] for number in range(40, 60)]
    assert sum(0.7 < x < 0.8 for x in drawn) / 20 > 0.6, drawn


@pytest.mark.parametrize(("outside", "told"), [(2.0, 0.1), (0.5, BEHIND)])
def test_earlier_trial_outside_the_space_decides_nothing(
    tmp_path: Path, outside: float, told: Any
) -> None:
    """An earlier release stored no reports. Only where such a trial counts is nothing compared."""
    spec = _spec("asha")
    ledger = _ledger(tmp_path, spec)
    ledger.store_warm_start(WarmStart([PriorTrial({"task.x": outside}, 0.2, 9, True)]))
    _rivals(ledger, spec, 3)
    number = _add(ledger, spec)
    _train(ledger, number, 4, 0.3)
    ledger.finish(number, "pruned", reason=RULE)
    assert _told(spec, ledger) == told
