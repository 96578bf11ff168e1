"""The model of PB2: its choices, and the gains that it learns from."""

from __future__ import annotations

import importlib.util
import math

import pytest

from sweeps.errors import UserError
from sweeps.ledger.attributes import PbtPerturbation
from sweeps.ledger.trials import TrialRecord
from sweeps.search.dry_run import dry_run
from sweeps.search.pbt_exploit import PopulationBasedBandits
from sweeps.spec.search_space import SearchSpace
from sweeps.spec.space import LogUniform
from sweeps.spec.spec import parse_spec

RATES = SearchSpace({"train.optimizer.lr": LogUniform(1e-4, 1e-1)})


def _members(count: int, *, epochs: int, sign: float = -1.0) -> dict[int, TrialRecord]:
    """Members that gain the more, the nearer their rate is to 0.01; halfway through the space."""
    found = {}
    for number in range(count):
        rate = RATES.distributions["train.optimizer.lr"].at(number / count)
        gain = math.exp(-(math.log10(rate / 0.01) ** 2) * 4)
        reports = {epoch: sign * gain * epoch for epoch in range(1, epochs + 1)}
        params = {"train.optimizer.lr": rate}
        found[number] = TrialRecord(
            number=number, state="running", params=params, suggested=params, value=None,
            reports=reports,
        )  # fmt: skip
    return found


@pytest.mark.parametrize("minimize", [True, False])
def test_the_bandit_goes_where_members_gained_most(minimize: bool) -> None:
    members = _members(8, epochs=3, sign=-1.0 if minimize else 1.0)
    bandit = PopulationBasedBandits(RATES, members, 3, minimize=minimize)
    chosen = [bandit.choose({"train.optimizer.lr": 1e-4}, seed=s) for s in range(4)]
    rates = [one["train.optimizer.lr"] for one in chosen]
    assert all(0.003 < rate < 0.03 for rate in rates[:1]), rates
    assert len(set(rates)) == 4
    repeated = PopulationBasedBandits(RATES, members, 3, minimize=minimize)
    assert repeated.choose({"train.optimizer.lr": 1e-4}, seed=0) == chosen[0]


def test_pb2_keeps_parameters_until_it_has_data() -> None:
    bandit = PopulationBasedBandits(RATES, _members(8, epochs=1), 1, minimize=True)
    assert bandit.choose({"train.optimizer.lr": 0.5}, seed=0) == {"train.optimizer.lr": 0.5}


@pytest.mark.parametrize("loss", [1e30, 1e160, 1.7e308])
def test_pb2_works_beside_a_diverged_member(loss: float) -> None:
    members = _members(8, epochs=2)
    members[0].reports[2] = loss
    bandit = PopulationBasedBandits(RATES, members, 2, minimize=True)
    chosen = [bandit.choose({"train.optimizer.lr": 1e-4}, seed=s) for s in range(3)]
    assert all(RATES.project(one) == one for one in chosen)
    assert all(map(math.isfinite, bandit._gains))


def test_inherited_value_is_no_gain() -> None:
    """One that jumped to another's weights gained what it made of them."""
    members = _members(2, epochs=2)
    good, bad = ({"train.optimizer.lr": members[n].params["train.optimizer.lr"]} for n in (1, 0))
    heir = TrialRecord(
        number=2, state="running", params=good, suggested=bad, value=None,
        lineage=(PbtPerturbation(1, 1, good),), reports={1: 5.0, 2: members[1].reports[2]},
    )  # fmt: skip
    bandit = PopulationBasedBandits(RATES, {**members, 2: heir}, 2, minimize=True)
    assert bandit._gains[2] == pytest.approx(bandit._gains[1])
    assert bandit._points[2] == bandit._points[1]
    unknown = PopulationBasedBandits(RATES, {0: members[0], 2: heir}, 2, minimize=True)
    assert len(unknown._gains) == 1, "nobody can say what it gained"


def test_missing_package_is_named_before_a_sweep_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    population = "early_stopping: {scheduler: pb2}\nbudget: {epochs: 4}\n"
    space = "space: {train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}}\n"
    head = "name: s\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 4\n"
    for scheduler in ("pbt", "pb2"):
        spec = parse_spec(head + space + population.replace("pb2", scheduler), "s.yaml")
        dry_run(spec)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"^early_stopping\.scheduler: pb2 needs .*; write pbt"):
        dry_run(spec)
