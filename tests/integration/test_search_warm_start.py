"""Trials of earlier sweeps inform the sampler, stay fixed, and are not shown."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sweeps.config.provenance_check import Origin
from sweeps.config.resume_checks import check_search_changes
from sweeps.config.spec import SweepSpec
from sweeps.driver.session import open_ledger
from sweeps.errors import SearchChanged
from sweeps.ledger.attributes import PbtPerturbation
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.reader import LedgerReader
from sweeps.ledger.suggestion import Suggestion
from sweeps.ledger.warm_start import WarmStart, WarmStartRefused, collect_warm_start
from sweeps.paths import SweepPaths
from sweeps.search.dry_run import dry_run
from sweeps.search.samplers import SamplerRejected
from sweeps.search.shown_trials import ShownTrials
from sweeps.search.suggest import Suggester
from tests.integration.serial_search import end, loss, search, spec_of
from tests.unit.sweeps.sweep_factory import MadeSweep

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
    made.ledger.finish(0, "pruned", reason="stopped by the user")
    (taken,) = collect_warm_start(tmp_path, _warm()).trials
    assert (taken.params, taken.value, taken.epoch) == (changed, 0.7, 2)


def _warm(*overrides: str, sampler: str = "tpe", names: str = "old") -> SweepSpec:
    return spec_of(
        f"search.warm_start={names}", f"search.sampler={sampler}", "search.startup_trials=6",
        "name=new", *overrides,
    )  # fmt: skip


def _create(root: Path, spec: SweepSpec) -> Ledger:
    paths = SweepPaths(root, spec.name)
    paths.directory.mkdir(exist_ok=True)
    return open_ledger(paths, spec, Origin(), new=not paths.exists(), accepted=False)


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
    assert told.startswith(f"warm start from {len(inside)} trials of 'old'")
    assert f"{8 - 2 - len(inside)} outside the space" in told


def test_parameter_fixed_in_prior_sweep_counts(tmp_path: Path) -> None:
    _earlier(tmp_path, trials=3)
    more = _warm("space.train.accumulation={choice: [1, 2]}")
    assert [
        one.params["train.accumulation"] for one in collect_warm_start(tmp_path, more).trials
    ] == [1] * 3
    other = _warm("space.train.accumulation={choice: [2, 4]}")
    assert not collect_warm_start(tmp_path, other).trials


@pytest.mark.parametrize("sampler", ["tpe", "gp", "cmaes", "nsgaii"])
def test_first_trials_profit(tmp_path: Path, sampler: str) -> None:
    _earlier(tmp_path, trials=30)
    count = {"gp": 4, "nsgaii": 16}.get(sampler, 8)  # half of what nsgaii draws is mutated
    spec = _warm(f"trials={count}", sampler=sampler)
    ledger = _create(tmp_path, spec)
    warm = search(ledger.location.path, spec)
    cold = search(tmp_path / "cold.db", spec_of("search.sampler=random", f"trials={count}"))
    assert sum(map(loss, warm)) < (0.9 if sampler == "nsgaii" else 0.7) * sum(map(loss, cold))


@pytest.mark.parametrize("sampler", ["tpe", "cmaes", "nsgaii"])
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
    view = LedgerReader(ledger.location)
    assert (ledger.trials(), ledger.frozen_trials(), ledger.best()) == ([], [], None)
    assert (view.trials, view.best()) == ([], None)


def test_prior_trials_of_a_prior_sweep_need_its_name(tmp_path: Path) -> None:
    _earlier(tmp_path, trials=6)
    middle = MadeSweep(tmp_path, "middle", space=SPACE)
    middle.ledger.store_warm_start(collect_warm_start(tmp_path, _warm("name=middle")))
    _add(middle, 50, 0.5, "complete")
    assert [one.value for one in collect_warm_start(tmp_path, _warm(names="middle")).trials] == [
        0.5
    ]
    both = collect_warm_start(tmp_path, _warm(names="[old, middle]"))
    assert both.summary == "warm start from 6 trials of 'old' and 1 trials of 'middle'"


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
