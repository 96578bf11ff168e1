"""Trials of earlier sweeps inform the sampler, stay fixed, and are not shown."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import TrialState

from sweeps.errors import SearchChanged
from sweeps.formatting import counted
from sweeps.ledger.attributes import PbtPerturbation
from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.ledger.ranking import value_of
from sweeps.ledger.reader import LedgerReader
from sweeps.ledger.reasons import BY_THE_SWEEP, BY_THE_USER
from sweeps.ledger.warm_start import (
    WarmStart,
    WarmStartRefused,
    collect_warm_start,
    with_history,
)
from sweeps.paths import SweepPaths
from sweeps.run.session import open_ledger
from sweeps.search.dry_run import dry_run
from sweeps.search.samplers import SamplerRejected
from sweeps.search.shown_trials import ShownTrials
from sweeps.search.suggest import Suggester
from sweeps.spec.priors import Prior
from sweeps.spec.resume_checks import check_search_changes
from sweeps.spec.spec import SweepSpec
from tests.slices import samplers
from tests.unit.sweeps.search.serial_search import end, loss, search, spec_of
from tests.unit.sweeps.sweep_factory import MadeSweep, prepared

SPACE = (
    "{train.optimizer.lr: {loguniform: [1e-4, 1e-1]}, train.clip.max_norm: {uniform: [0.1, 10]}}"
)


def _earlier(root: Path, name: str = "old", *, trials: int = 20) -> MadeSweep:
    """A sweep of random points whose loss is known; every fifth was stopped."""
    made = MadeSweep(root, name, space=SPACE)
    for number in range(trials):
        value = loss(made.spec.search_space().draw(number) or {})
        _add(made, number, value, "pruned" if number % 5 == 4 else "complete")
    return made


def _add(made: MadeSweep, seed: int, value: float, ending: str | None) -> None:
    space = made.spec.search_space()
    params = space.draw(seed) or {}
    distributions = {key: made.spec.space[key].to_optuna() for key in params}
    number = made.ledger.add(Suggestion(params, distributions)).number
    made.ledger.report(number, epoch=1, step=1, value=value)
    if ending in ("complete", "pruned", "failed"):
        made.ledger.finish(number, ending)  # type: ignore[arg-type]


def test_stopped_population_member_counts_with_last_values(tmp_path: Path) -> None:
    made = _earlier(tmp_path, trials=0)
    _add(made, 0, 0.5, None)
    changed = {"train.optimizer.lr": 0.02, "train.clip.max_norm": 2.0}
    made.ledger.mutate(1, {0: PbtPerturbation(1, 1, changed)})
    made.ledger.report(0, epoch=2, step=2, value=0.7)
    made.ledger.finish(0, "pruned", reason="pbt: never promoted")
    (taken,) = collect_warm_start(tmp_path, _warm()).trials
    assert (taken.params, taken.value, taken.epoch) == (changed, 0.7, 2)
    assert not taken.reports  # the first one belongs to other parameters


def _warm(*overrides: str, sampler: str = "tpe", names: str = "old") -> SweepSpec:
    return spec_of(
        f"search.warm_start={names}", f"search.sampler={sampler}", "search.startup_trials=6",
        "name=new", *overrides,
    )  # fmt: skip


def _create(root: Path, spec: SweepSpec) -> Ledger:
    paths = SweepPaths(root, spec.name)
    paths.directory.mkdir(exist_ok=True)
    return open_ledger(prepared(paths, spec, new=not paths.exists(), accept_changes=False), print)


def test_taken_and_skipped_trials_are_listed(tmp_path: Path) -> None:
    made = _earlier(tmp_path, trials=6)
    _add(made, 90, 0.5, "failed")
    _add(made, 91, 0.5, None)
    _earlier(tmp_path, "more", trials=2)
    warm = collect_warm_start(tmp_path, _warm(names="[old, more]"))
    assert warm.summary == (
        "warm start from 6 trials of 'old' (left out: 1 unfinished, 1 without a result) and "
        "2 trials of 'more'"
    )
    assert [one.complete for one in warm.trials] == [True] * 4 + [False, True, True, True]
    narrow = _warm("space.train.clip.max_norm={uniform: [0.1, 5]}")
    inside = [t for t in made.ledger.trials()[:6] if t.params["train.clip.max_norm"] <= 5]
    told = collect_warm_start(tmp_path, narrow).summary
    assert told.startswith(f"warm start from {counted(len(inside), 'trial')} of 'old'")
    assert f"{8 - 2 - len(inside)} outside the space" in told


@pytest.mark.parametrize("sampler", samplers("tpe", "gp", "cmaes", "nsgaii"))
def test_first_trials_profit(tmp_path: Path, sampler: str) -> None:
    _earlier(tmp_path, trials=30)
    count = {"gp": 4, "nsgaii": 16}.get(sampler, 8)  # half of what nsgaii draws is mutated
    spec = _warm(f"trials={count}", sampler=sampler)
    ledger = _create(tmp_path, spec)
    warm = search(ledger.location.path, spec)
    cold = search(tmp_path / "cold.db", spec_of("search.sampler=random", f"trials={count}"))
    assert sum(map(loss, warm)) < (0.9 if sampler == "nsgaii" else 0.7) * sum(map(loss, cold))


@pytest.mark.parametrize("sampler", samplers("tpe", "cmaes", "nsgaii"))
def test_warm_start_is_fixed_across_a_kill(tmp_path: Path, sampler: str) -> None:
    old = _earlier(tmp_path)
    spec = _warm("trials=7", sampler=sampler)
    path = _create(tmp_path, spec).location.path
    shutil.copy(path, tmp_path / "once.db")
    once = search(tmp_path / "once.db", spec)
    shutil.rmtree(old.paths.directory)
    assert search(path, spec, deaths=[0, 3]) == once


def test_prior_trials_are_not_shown(tmp_path: Path) -> None:
    _earlier(tmp_path)
    ledger = _create(tmp_path, _warm())
    view = LedgerReader(ledger.location.path)
    assert (ledger.trials(), ledger.frozen_trials(), ledger.best()) == ([], [], None)
    assert (view.trials, view.best()) == ([], None)


def test_dry_run_uses_the_trials_of_a_warm_start(
    tmp_path: Path,
) -> None:
    """CMA-ES takes a `sigma0` beside fewer than it would learn from, and does not beside more."""
    given = _warm("search.arguments={sigma0: 0.1}", sampler="cmaes")
    _earlier(tmp_path, trials=9)
    _create(tmp_path, given)
    path = SweepPaths(tmp_path, "new").ledger
    dry_run(given, WarmStart.from_data(LedgerReader(path).warm_start()))
    _earlier(tmp_path, "more", trials=20)
    with pytest.raises(SamplerRejected, match="beside trials of"):
        dry_run(given, collect_warm_start(tmp_path, _warm(names="more")))
    made = MadeSweep(tmp_path, "alone")
    dry_run(given, WarmStart.from_data(LedgerReader(made.paths.ledger).warm_start()))


def test_edited_space_keeps_prior_trials_inside(tmp_path: Path) -> None:
    _earlier(tmp_path)
    ledger = _create(tmp_path, _warm())
    edited = _warm("space.train.clip.max_norm={choice: [1, 5]}", "trials=1")
    assert not ShownTrials(edited, ledger).warm_start
    assert Suggester(edited, ledger).propose(0).params["train.clip.max_norm"] in (1, 5)
    end(ledger, ledger.add(Suggester(_warm(), ledger).propose(0)).number)


def _said(error: Exception) -> str:
    return " ".join(str(error).split())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["search.warm_start=older"], "'older': there is no such sweep below"),
        (["metric=val/accuracy"], "'old': its metric is val/loss, and this sweep's is val/acc"),
        (
            ["mode=max"],
            "'old': its mode is min, and this sweep's is max; a sampler",
        ),
    ],
)
def test_unusable_prior_sweep_is_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    _earlier(tmp_path, trials=1)
    with pytest.raises(WarmStartRefused) as caught:
        collect_warm_start(tmp_path, _warm(*overrides))
    assert message in _said(caught.value)


def test_used_prior_sweeps_cannot_change() -> None:
    check_search_changes(_warm(), _warm("trials=30", "search.sampler=gp"), 5)
    with pytest.raises(SearchChanged, match=r"warm_start is \[old\] .* cannot become \[\]"):
        check_search_changes(_warm(), spec_of(), 0)
    one, other, two = (
        spec_of(f"search.try_first={points}")
        for points in (
            "[{train.clip.max_norm: 1}]",
            "[{train.clip.max_norm: 2}]",
            "[{train.clip.max_norm: 1}, {train.clip.max_norm: 2}]",
        )
    )
    check_search_changes(one, two, 1)
    check_search_changes(one, other, 0)
    for before, after, drawn in ((one, other, 1), (one, two, 2), (one, spec_of(), 3)):
        with pytest.raises(SearchChanged, match=r"its first \d points cannot change: \d trials"):
            check_search_changes(before, after, drawn)


def test_population_setting_cannot_change() -> None:
    pbt = ("early_stopping.scheduler=pbt",)
    check_search_changes(spec_of(*pbt), spec_of("early_stopping.scheduler=pb2"), 3)
    check_search_changes(spec_of(*pbt), spec_of(*pbt, "trials=40"), 0)
    with pytest.raises(SearchChanged, match=r"trials is \d+ in this sweep and cannot become 40: "):
        check_search_changes(spec_of(*pbt), spec_of(*pbt, "trials=40"), 1)
    for before, after in (((), pbt), (pbt, ())):
        with pytest.raises(SearchChanged, match=r"early_stopping\.scheduler is .* cannot become"):
            check_search_changes(spec_of(*before), spec_of(*after), 1)


ASHA = ("early_stopping.scheduler=asha", "budget.epochs=9", "search.startup_trials=4")
"""Rungs at 1, 3 and 9 reports; so many own trials decide which of them is taken."""


def _reported(
    made: MadeSweep, *reports: float, ending: str | None = "complete", reason: str | None = None
) -> int:
    """Add a trial with these reports."""
    number = len(made.ledger.trials())
    params = made.spec.search_space().draw(number) or {}
    space = {key: made.spec.space[key].to_optuna() for key in params}
    made.ledger.add(Suggestion(params, space))
    for epoch, value in enumerate(reports, start=1):
        made.ledger.report(number, epoch=epoch, step=epoch, value=value)
    if ending is not None:
        made.ledger.finish(number, ending, reason=reason)  # type: ignore[arg-type]
    return number


def _old(root: Path, epochs: int = 9, *, more: str = "") -> MadeSweep:
    return MadeSweep(root, "old", space=SPACE, budget=f"{{epochs: {epochs}}}", more=more)


def _own(ledger: Ledger, spec: SweepSpec, *reports: float) -> None:
    """Add trials of the new sweep itself that the rule has stopped, as many as are needed."""
    space = {key: one.to_optuna() for key, one in spec.space.items()}
    for _ in range(4):
        number = ledger.add(Suggestion(spec.search_space().draw(7) or {}, space)).number
        for epoch, value in enumerate(reports, start=1):
            ledger.report(number, epoch=epoch, step=epoch, value=value)
        ledger.finish(number, "pruned")


def _shown(spec: SweepSpec, ledger: Ledger, sampler: BaseSampler | None = None) -> list[Any]:
    """What TPE is told of each trial: its value, or its state."""
    shown = ShownTrials(spec, ledger)
    points = shown.as_points(but=len(shown.of_search()))
    received = shown.for_sampler(sampler or TPESampler(), points)
    return [one.value if one.state == TrialState.COMPLETE else one.state.name for one in received]


@pytest.mark.parametrize("sampler", [TPESampler(), GPSampler()])
def test_trials_compare_at_the_rung_of_the_sweep_s_own(
    tmp_path: Path, sampler: BaseSampler
) -> None:
    old = _old(tmp_path)
    for last in (0.1, 0.2):
        _reported(old, 0.9, 0.8, 0.85, 0.6, 0.5, 0.4, 0.3, 0.25, last)
    _reported(old, 0.7, 0.75, ending="pruned", reason="val/loss 0.7, rank 2 of 3")
    spec = _warm(*ASHA)
    ledger = _create(tmp_path, spec)
    before = [0.1, 0.2, "PRUNED"]
    assert _shown(spec, ledger, sampler) == before
    _own(ledger, spec, 0.8)
    assert _shown(spec, ledger, sampler) == [0.9, 0.9, 0.7, 0.8, 0.8, 0.8, 0.8]
    _own(ledger, spec, 0.6, 0.55, 0.5)
    expected = [0.8, 0.8, "PRUNED", *["PRUNED"] * 4, *[0.5] * 4]
    assert _shown(spec, ledger, sampler) == expected
    assert _shown(spec, Ledger.open(ledger.location.path), sampler) == expected, "after a resume"


@pytest.mark.parametrize(("select", "at_rung"), [("checkpoint", 0.5), ("final", 0.8)])
def test_prior_trial_keeps_its_values_at_all_rungs(
    tmp_path: Path, select: str, at_rung: float
) -> None:
    old = MadeSweep(tmp_path, "old", space=SPACE, budget="{epochs: 9}", more=f"select: {select}")
    _reported(old, 0.9, 0.5, 0.8, math.nan, 0.7, 0.6, 0.4, 0.4, 0.45)
    spec = _warm(*ASHA, f"select={select}")
    (taken,) = WarmStart.from_data(
        json.loads(json.dumps(collect_warm_start(tmp_path, spec).to_data()))
    ).trials
    record = old.ledger.trials()[0]
    for rung in (1, 2, 3, 5, 9):
        values = [
            value_of({e: (v,) for e, v in one.items() if e <= rung}, minimize=True, select=select)
            for one in (taken.reports, record.reports)
        ]
        assert values[0] == values[1]
        if rung == 3:
            assert values[0] == (at_rung,)


def test_shorter_budget_counts_as_far_as_it_reaches(tmp_path: Path) -> None:
    old = _old(tmp_path, 3, more="early_stopping: {patience: 2}")
    _reported(old, 0.9, 0.8, 0.7)
    _reported(old, 0.6, 0.65, reason="patience: no new best")
    spec = _warm(*ASHA)
    ledger = _create(tmp_path, spec)
    assert _shown(spec, ledger) == [0.7, 0.6], "the sweep has nothing of its own"
    _own(ledger, spec, 0.6, 0.55, 0.5)
    assert _shown(spec, ledger)[:2] == [0.7, 0.6]
    _own(ledger, spec, *[0.4] * 9)
    assert _shown(spec, ledger)[:2] == ["FAIL", 0.6], "patience ends what gains no more"


def test_request_that_stopped_a_prior_trial_says_nothing_of_it(tmp_path: Path) -> None:
    old = _old(tmp_path, more="early_stopping: {scheduler: asha_promote}")
    for reason in (BY_THE_USER, BY_THE_SWEEP + "its hours are over"):
        _reported(old, ending="pruned", reason=reason)  # without a value
        _reported(old, 0.9, 0.8, ending="pruned", reason=reason)
        _reported(old, 0.9, ending="pruned", reason=reason)  # it waited at a rung
    spec = _warm(*ASHA)
    ledger = _create(tmp_path, spec)
    assert [one.cut_off for one in ledger.warm_start.trials] == [True, False] * 2
    assert _shown(spec, ledger) == ["FAIL", "PRUNED"] * 2
    _own(ledger, spec, 0.6)
    assert _shown(spec, ledger)[:4] == [0.9] * 4
    _own(ledger, spec, 0.6, 0.55, 0.5)
    assert _shown(spec, ledger)[:4] == ["FAIL", "PRUNED"] * 2
    without = collect_warm_start(tmp_path, _warm("budget.epochs=9"))
    assert "2 stopped by a request before they could be compared" in without.summary


@pytest.mark.parametrize(
    "budget", ["{steps: 90, report_every: 10}", "{epochs: 9, report_every: 0.5}"]
)
def test_other_reports_are_not_compared_and_the_run_says_so(tmp_path: Path, budget: str) -> None:
    old = MadeSweep(tmp_path, "old", space=SPACE, budget=budget)
    _reported(old, *[0.9] * 9)
    spec = _warm(*ASHA)
    ledger = _create(tmp_path, spec)
    _own(ledger, spec, 0.6)
    assert _shown(spec, ledger) == [0.9, *["PRUNED"] * 4]
    assert ledger.warm_start.summary == (
        "warm start from 1 trial of 'old'; 1 of these trials have no reports like those of this "
        "sweep, so its own stopped trials rank behind all complete ones and are not compared at "
        "rungs; for that, let both budgets report alike (unit, report_every, val_batches), take "
        "no population (pbt, pb2), or leave search.warm_start out"
    )
    for silent in (_warm("budget.epochs=9"), _warm(*ASHA, sampler="nsgaii")):
        told = collect_warm_start(tmp_path, silent).summary
        assert told == "warm start from 1 trial of 'old'"


def test_prior_configuration_is_compared_over_its_seeds(tmp_path: Path) -> None:
    old = _old(tmp_path, more="repeats: 2")
    _reported(old, 0.9, *[0.3] * 8)
    number = old.ledger.add_extra("repeat", 0, 1).number
    for epoch in range(1, 10):
        old.ledger.report(number, epoch=epoch, step=epoch, value=0.7 if epoch == 1 else 0.3)
    old.ledger.finish(number, "complete")
    spec = _warm(*ASHA)
    ledger = _create(tmp_path, spec)
    _own(ledger, spec, 0.6)
    assert _shown(spec, ledger)[0] == pytest.approx(0.8)


def test_warm_start_does_not_keep_tpe_from_its_own_trials(tmp_path: Path) -> None:
    """The best of the earlier trials were poor; all of the sweep's own wait at the first rung."""
    old = _old(tmp_path)
    for _ in range(12):
        _reported(old, *[50.0] * 9)
    spec = _warm(*ASHA, "early_stopping.scheduler=asha_promote", "trials=60")
    ledger = _create(tmp_path, spec)
    suggester = Suggester(spec, ledger)
    for number in range(40):
        suggestion = suggester.propose(number)
        ledger.add(suggestion)
        ledger.report(number, epoch=1, step=1, value=loss(dict(suggestion.params)))
    norms = [trial.params["train.clip.max_norm"] for trial in ledger.trials()[20:]]
    assert sum(abs(norm - 5) < 1 for norm in norms) >= 10, norms


@pytest.mark.parametrize("select", ["checkpoint", "final"])
def test_prior_configuration_has_its_value_at_the_end(tmp_path: Path, select: str) -> None:
    """Its seeds are best at other epochs, and patience ends one of them early."""
    old = _old(tmp_path, more=f"repeats: 2\nselect: {select}\nearly_stopping: {{patience: 3}}")
    for mine in ([0.9, 0.1, *[0.8] * 7], [*[0.9] * 7, 0.1, 0.3]), ([0.9] * 4, [0.8, *[0.1] * 8]):
        first = _reported(old, *mine[0], reason="patience: no gain" if len(mine[0]) < 9 else None)
        number = old.ledger.add_extra("repeat", first, 1).number
        for epoch, value in enumerate(mine[1], start=1):
            old.ledger.report(number, epoch=epoch, step=epoch, value=value)
        old.ledger.finish(number, "complete")
    spec = _warm(*ASHA, f"select={select}")
    ledger = _create(tmp_path, spec)
    _own(ledger, spec, *[0.5] * 9)
    views = [trial.value for trial in old.ledger.trials() if trial.role == "search"]
    assert _shown(spec, ledger)[:2] == pytest.approx(views)


LR, NORM = "train.optimizer.lr", "train.clip.max_norm"


def _with_history(root: Path, *overrides: str) -> tuple[SweepSpec, str]:
    spec = spec_of("search.priors=history", "name=new", *overrides)
    return with_history(SweepPaths(root, "new"), spec)


def test_history_expects_good_values_where_the_leaders_of_earlier_sweeps_are(
    tmp_path: Path,
) -> None:
    made = _earlier(tmp_path)
    _earlier(tmp_path, "few", trials=3)
    complete = [one for one in made.ledger.trials() if one.state == "complete"]
    best, *others = sorted(complete, key=lambda one: one.value or math.inf)[:5]
    spec, found = _with_history(tmp_path)
    assert found.startswith(f"priors from old: {LR} ")
    assert f", {NORM} " in found
    for key, one in spec.space.items():
        assert one.prior is not None
        assert one.prior.value == best.params[key]
        shares = [one.share(trial.params[key]) for trial in (best, *others)]
        assert one.prior.width == pytest.approx(
            min(max(statistics.pstdev(shares), 0.05), 0.25), abs=1e-3
        )


def test_one_leader_does_not_say_how_far_good_values_lie_apart(tmp_path: Path) -> None:
    _earlier(tmp_path, trials=6)
    priors = [one.prior for one in _with_history(tmp_path)[0].space.values()]
    assert [one and one.width for one in priors] == [0.1, 0.1]


def test_history_leaves_a_prior_of_ones_own_and_what_was_not_searched(tmp_path: Path) -> None:
    made = _earlier(tmp_path)
    decay = "train.optimizer.weight_decay"
    space = {key: one.to_data() for key, one in made.spec.space.items()}
    space[LR] |= {"prior": 0.003}
    space[decay] = {"loguniform": [1e-5, 1.0]}
    spec, found = _with_history(tmp_path, f"space={json.dumps(space)}")
    assert found.startswith(f"priors from old: {NORM} ")
    assert spec.space[LR].prior == Prior(0.003)
    assert spec.space[decay].prior is None


@pytest.mark.parametrize("override", ["metric=val/accuracy", "mode=max", "task=blobs"])
def test_history_of_another_question_gives_no_prior(tmp_path: Path, override: str) -> None:
    _earlier(tmp_path)
    spec, found = _with_history(tmp_path, override)
    assert all(one.prior is None for one in spec.space.values())
    assert found.startswith(f"no priors from earlier sweeps: none below {tmp_path} has 5 trials")


def test_task_of_ones_own_is_another_one_in_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _earlier(tmp_path)
    monkeypatch.setattr("sweeps.ledger.warm_start.BUILT_IN", {})
    for code, found in (("/elsewhere", "no priors"), (os.getcwd(), "priors from old")):
        made.ledger.store_run_from({"code": code})
        assert _with_history(tmp_path)[1].startswith(found)


def test_history_tells_of_sweeps_that_it_cannot_read(tmp_path: Path) -> None:
    SweepPaths(tmp_path, _earlier(tmp_path).spec.name).ledger.write_bytes(b"damaged")
    assert "old" in _with_history(tmp_path)[1].partition("within this space")[2]


def test_history_is_read_once(tmp_path: Path) -> None:
    """The priors are those of the stored spec; the earlier sweeps may go, or others come."""
    _earlier(tmp_path)
    spec, _ = _with_history(tmp_path)
    _create(tmp_path, spec)
    shutil.rmtree(tmp_path / "old")
    again, found = _with_history(tmp_path)
    assert (again.space, found) == (spec.space, "")
    with pytest.raises(SearchChanged, match="earlier sweeps are read once"):
        check_search_changes(spec_of(), spec, 0)
