"""Several seeds of each configuration, together with other features of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sweeps.ledger.attributes import EXEMPT, WOULD_STOP
from sweeps.ledger.failed_attempts import FailedAttempt, Reopened
from sweeps.ledger.over_seeds import next_seed, origins
from sweeps.reconcile.retrying import RetryRequest
from sweeps.search.shown_trials import ShownTrials, values_at
from sweeps.spec.spec import parse_spec
from sweeps.stopping.asha import Asha
from sweeps.stopping.rule import Standing
from sweeps.stopping.schedulers import WouldStop, make_scheduler, make_verdict_fn
from sweeps.stopping.simulation import SimulatedSweep, SweepShape, simulate
from sweeps.trust.audit.read import audit_data
from sweeps.trust.verification import verify
from sweeps.view.observer import TrialStart
from sweeps.view.sweep_progress import SweepProgress
from tests.unit.sweeps.confirming_sweep import found, request, run
from tests.unit.sweeps.sweep_factory import MadeSweep

REPEATS = "repeats: 3"
ASHA = "{scheduler: asha, grace_epochs: 1, reduction: 2}"
TWO = "[val/loss, val/accuracy]"


def _configuration(made: MadeSweep, *values: float, lr: float) -> int:
    first = made.add("complete", values[0], params={"train.optimizer.lr": lr})
    for value in values[1:]:
        made.repeat(first, "complete", value)
    return first


def _two_metrics() -> Any:
    spec = f"""
name: two
task: digits
metric: {TWO}
mode: [min, max]
trials: 9
repeats: 3
budget: {{epochs: 9}}
space: {{train.optimizer.lr: {{loguniform: [1.0e-4, 1.0e-1]}}}}
early_stopping: {ASHA}
"""
    return parse_spec(spec, "two.yaml")


def test_rungs_compare_the_mean_of_each_metric() -> None:
    """The first seed of 0 was lucky in both metrics; with its second one, 7 is better."""
    spec, mine = _two_metrics(), {1: (2.0, 0.5)}
    lucky = {0: {1: (1.0, 0.9)}, 7: mine}
    assert make_verdict_fn(spec)(Standing(lucky, {7}, set())).keys() == {7}
    assert make_verdict_fn(spec, {1: 0})(Standing({**lucky, 1: {1: (5.0, 0.0)}}, {7}, set())) == {}


def test_reason_names_the_trial_of_a_configuration() -> None:
    """Configuration 3 is the second one, and better than 4, the third one."""
    spec, seeds = _two_metrics(), {1: 0, 2: 0}
    reports = {0: {1: (9.0, 0.1)}, 1: {1: (9.0, 0.1)}, 3: {1: (1.0, 0.9)}, 4: {1: (2.0, 0.8)}}
    reason = make_verdict_fn(spec, seeds)(Standing(reports, {4}, set()))[4]
    assert "trial 3 is at least as good" in reason


@pytest.mark.parametrize("would_stop", [None, 1])
def test_exempt_configuration_counts_until_it_would_end(
    tmp_path: Path, would_stop: int | None
) -> None:
    made = MadeSweep(tmp_path, more=f"{REPEATS}\nearly_stopping: {ASHA}")
    first = made.add(None, 5.0, 5.0)
    _set(made, first, EXEMPT, True)
    if would_stop is not None:
        _set(made, first, WOULD_STOP, list(WouldStop(would_stop, "asha")))
    made.ledger.finish(first, "complete")
    second = made.repeat(first, None, 4.0, 0.1)
    record = made.ledger.trial(second)
    assert record.exempt
    assert record.compared_reports == ({1: 4.0} if would_stop else {1: 4.0, 2: 0.1})
    scheduler = make_scheduler(made.spec)
    scheduler.join(origins(made.ledger.trials()))
    for one in made.ledger.trials():
        scheduler.replay(one.number, one.compared_reports, repeats=one.origin)
    # At epoch 2 only the exempt configuration has reported, with the mean 2.55.
    why = scheduler.replay(9, {1: 1.0, 2: 3.0})
    assert (why is None) is (would_stop is not None)


def _set(made: MadeSweep, number: int, key: str, value: Any) -> None:
    made.ledger.set_attr(number, key, value)


def test_sampler_sees_the_mean_of_each_metric(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, metric=TWO, mode="[min, max]", more=REPEATS)
    first = made.add("complete", (1.0, 0.2))
    for others in ((2.0, 0.4), (3.0, 0.9)):
        number = made.ledger.add_extra("repeat", first, 1).number
        made.ledger.report(number, epoch=1, step=10, value=others[0], others=others[1:])
        made.ledger.finish(number, "complete")
    (shown,) = ShownTrials(made.spec, made.ledger).of_search()
    assert shown.values == pytest.approx([2.0, 0.5])
    at_rung = values_at(shown, 1, minimize=True, select="checkpoint")
    assert at_rung == pytest.approx((2.0, 0.5))


def test_confirmation_takes_configurations(tmp_path: Path) -> None:
    """Configuration 0 has the best seed, and 3 the best mean."""
    made = MadeSweep(tmp_path, more=REPEATS)
    _configuration(made, 0.1, 0.8, 0.9, lr=0.01)
    _configuration(made, 0.4, 0.3, 0.5, lr=0.02)
    assert request(made, top=2, seeds=2).leaders == (3, 0)
    before = [(one.number, one.over_seeds) for one in made.ledger.trials()]
    runs = run(made, lambda leader, seed: 0.5 + leader / 10 + seed / 100)
    assert runs[:2] == [(3, 0), (0, 0)]
    assert found(made).has_ended
    after = made.ledger.trials()
    assert [(one.number, one.over_seeds) for one in after[: len(before)]] == before
    assert made.view.num_trials == 6 + len(runs) + 3  # one more configuration may come
    assert audit_data(made.view).repeats[0][0] == 0.1  # the first seed's own value


def test_progress_counts_seeds_and_confirming_trials(tmp_path: Path) -> None:
    """Two of three configurations are complete, and a confirmation of 4 runs begins."""
    made = MadeSweep(tmp_path, more=REPEATS)
    for lr in (0.01, 0.02):
        _configuration(made, 0.1, 0.8, 0.9, lr=lr)
    progress = SweepProgress(made.spec, made.ledger.trials(), total=6 + 3 + 4)
    assert progress.total == 13
    progress.started(TrialStart(6, {}, role="confirm", origin=0))
    assert progress.total == 13
    progress.started(TrialStart(7, {}))
    progress.ended(7, "pruned")  # it gets no further seeds
    assert progress.total == 11


def test_retried_seed_makes_its_configuration_unfinished(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, more=REPEATS)
    first = made.add("complete", 0.1)
    seed = made.repeat(first, "failed", 0.2)
    trials = made.ledger.trials()
    assert trials[first].over_seeds.state == "failed"
    assert next_seed(trials, 3) is None
    assert RetryRequest().choose(made.view.with_spec(made.spec)) == [seed]
    attempt = FailedAttempt(1, "ValueError: x", 1, None, 1, "")
    made.ledger.reopen(seed, attempt, Reopened(False, False), steps={1: 10})
    trials = made.ledger.trials()
    assert (trials[first].over_seeds.state, trials[seed].role) == ("running", "repeat")
    assert next_seed(trials, 3) == (first, 2)


def test_verification_compares_a_seed_with_its_own_value(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, more=REPEATS)
    _configuration(made, 0.1, 0.8, 0.9, lr=0.01)
    wrong = [one.what for one in verify(made.paths).contradictions]
    assert not any("its value is" in one for one in wrong)


def test_simulation_trains_further_seeds_and_exempt_trials() -> None:
    def plan(**more: Any) -> SimulatedSweep:
        return simulate(Asha(), SweepShape(epochs=9, trials=27, at_once=2, **more))

    one, three, all_exempt = plan(), plan(seeds=3), plan(exempt=1.0)
    assert three.epochs == pytest.approx(one.epochs + 2 * 9 * one.complete, rel=0.2)
    assert three.complete == pytest.approx(3 * one.complete, rel=0.2)
    assert (all_exempt.epochs, all_exempt.complete) == (27 * 9, 27)
    assert one.epochs < plan(exempt=0.3).epochs < 27 * 9
