"""With `repeats`, the search suggests configurations; further trials train their other seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.tune.search import Searcher

from sweeps.ledger.ledger import Ledger
from sweeps.ledger.over_seeds import repeats_of
from sweeps.ledger.trials import TrialRecord
from sweeps.paths import SweepPaths
from sweeps.search.searcher import Capacity, DriverCallbacks, LedgerSearcher
from sweeps.search.shown_trials import ShownTrials
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.spec.trial_run import TrialSeed
from trainable.seeding import derive_seed

SPEC = """
name: quad
task: digits
metric: val/loss
mode: min
trials: 6
repeats: 3
budget: {epochs: 4}
space:
  train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}
search: {sampler: tpe, startup_trials: 3}
"""


def _loss(config: dict[str, Any], epoch: int = 4) -> float:
    """Return a loss with noise of the trial's seed."""
    noise = config["config"]["seed"] % 97 / 970
    return float((config["params"]["train.optimizer.lr"] - 0.01) ** 2 + noise + 1 / epoch)


class Driver:
    """Asks and tells as a sweep does that runs one trial at a time, or several."""

    def __init__(self, path: Path, spec: SweepSpec, concurrency: int = 1) -> None:
        self.ledger = (
            Ledger.open(path)
            if path.exists()
            else Ledger.create(path, mode="min", sweep_id="s", repeats=repeats_of(spec))
        )
        self.searcher = LedgerSearcher(
            self.ledger,
            spec,
            SweepPaths(path.parent, "quad"),
            DriverCallbacks(fence=lambda: None, refuse=lambda *_: None),
            Capacity(concurrency, 1),
        )
        self.turn = 0

    def ask(self) -> tuple[str, Any]:
        self.turn += 1
        return f"t{self.turn}", self.searcher.suggest(f"t{self.turn}")

    def end(self, trial_id: str, config: dict[str, Any], ending: Any = "complete") -> None:
        self.ledger.report(config["number"], epoch=4, step=4, value=_loss(config))
        self.ledger.finish(config["number"], ending, reason=None)
        self.searcher.on_trial_complete(trial_id)


def _run(
    path: Path, spec: SweepSpec, *, killed_at: frozenset[int] = frozenset()
) -> list[TrialRecord]:
    """Run to the end; at each of these turns the driver dies before the trial ends."""
    driver = Driver(path, spec)
    for turn in range(100):
        trial_id, config = driver.ask()
        if config == Searcher.FINISHED:
            return driver.ledger.trials()
        if turn in killed_at:
            driver = Driver(path, spec)
        else:
            driver.end(trial_id, config)
    raise AssertionError("the search did not end")


@pytest.fixture
def spec() -> SweepSpec:
    return parse_spec(SPEC, "quad.yaml")


def test_each_configuration_trains_with_the_common_seeds(tmp_path: Path, spec: SweepSpec) -> None:
    driver = Driver(tmp_path / "l.db", spec)
    seeds: dict[str, list[int]] = {}
    while (found := driver.ask())[1] != Searcher.FINISHED:
        seeds.setdefault(str(found[1]["params"]), []).append(found[1]["config"]["seed"])
        driver.end(*found)
    expected = [derive_seed(spec.seed, "repeat", index) for index in range(3)]
    assert list(seeds.values()) == [expected] * 6


@pytest.mark.parametrize("killed_at", [{1}, {2}, {4, 5, 9}, set(range(0, 60, 2))])
def test_killed_driver_changes_no_configuration(
    tmp_path: Path, spec: SweepSpec, killed_at: set[int]
) -> None:
    once = _run(tmp_path / "once.db", spec)
    killed = _run(tmp_path / "killed.db", spec, killed_at=frozenset(killed_at))
    assert [(t.role, t.origin, t.seed_index, t.params) for t in killed] == [
        (t.role, t.origin, t.seed_index, t.params) for t in once
    ]


def test_further_seeds_start_when_the_first_is_complete(tmp_path: Path, spec: SweepSpec) -> None:
    driver = Driver(tmp_path / "l.db", spec, concurrency=3)
    first, second = driver.ask(), driver.ask()
    assert [first[1]["role"], second[1]["role"]] == ["search", "search"]
    driver.end(*first)
    repeats = [driver.ask(), driver.ask()]
    assert [(c["role"], c["origin"]) for _, c in repeats] == [("repeat", 0), ("repeat", 0)]
    assert driver.ask()[1] is None  # three run
    driver.end(*repeats[0])
    assert driver.ask()[1]["role"] == "search"  # the second configuration still trains


@pytest.mark.parametrize("ending", ["pruned", "failed"])
def test_stopped_configuration_gets_no_further_seed(
    tmp_path: Path, spec: SweepSpec, ending: str
) -> None:
    driver = Driver(tmp_path / "l.db", spec)
    driver.end(*driver.ask(), ending)
    assert driver.ask()[1]["role"] == "search"


def test_failed_seed_fails_its_configuration(tmp_path: Path, spec: SweepSpec) -> None:
    driver = Driver(tmp_path / "l.db", spec)
    driver.end(*driver.ask())
    driver.end(*driver.ask(), "failed")
    assert driver.ask()[1]["role"] == "search"
    assert driver.ledger.trials()[0].over_seeds.state == "failed"
    assert driver.ledger.front() == []


def test_sampler_sees_one_trial_per_configuration(tmp_path: Path, spec: SweepSpec) -> None:
    driver = Driver(tmp_path / "l.db", spec)
    values = []
    for _ in range(3):
        found = driver.ask()
        values.append(_loss(found[1]))
        driver.end(*found)
    driver.end(*driver.ask())  # the first seed of the next one
    shown = ShownTrials(spec, driver.ledger).of_search()
    assert [trial.state.name for trial in shown] == ["COMPLETE", "RUNNING"]
    assert shown[0].value == pytest.approx(sum(values) / 3)
    assert shown[0].user_attrs["num_seeds"] == 3
    assert shown[0].user_attrs["standard_error"] > 0
    assert [trial.number for trial in shown] == [0, 1]


def test_best_is_by_the_value_over_seeds(tmp_path: Path, spec: SweepSpec) -> None:
    trials = _run(tmp_path / "l.db", spec)
    ledger = Ledger.open(tmp_path / "l.db")
    by_mean = {}
    for first in (trial for trial in trials if trial.role == "search"):
        mine = [t for t in trials if first.number in (t.number, t.origin)]
        assert len(mine) == 3
        by_mean[first.number] = sum(min(t.reports.values()) for t in mine) / 3
    (best,) = ledger.front()
    assert best.number == min(by_mean, key=by_mean.__getitem__)
    assert best.value == pytest.approx(by_mean[best.number])
    assert best.own_value == min(best.reports.values())
    assert best.over_seeds.typical() in best.over_seeds.trials


def test_one_seed_changes_nothing(tmp_path: Path, spec: SweepSpec) -> None:
    one = spec.model_copy(update={"repeats": parse_spec(SPEC, "q", ("repeats=1",)).repeats})
    trials = _run(tmp_path / "l.db", one)
    assert {trial.role for trial in trials} == {"search"}
    assert [trial.seed for trial in trials] == [TrialSeed("trial", number) for number in range(6)]
    assert all(trial.over_seeds is None for trial in trials)
