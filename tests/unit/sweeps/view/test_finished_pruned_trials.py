"""A trial that finishes a pruned one, in every view that counts, compares or describes trials."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from sweeps.recording.descriptions import describe_sweep
from sweeps.recording.notifications import Notifier
from sweeps.report.data import read_sweep
from sweeps.spec.spec import parse_spec
from sweeps.trust.findings import find
from sweeps.trust.next_search import next_overrides
from sweeps.view.sweep_progress import epochs_left
from tests.unit.sweeps.sweep_factory import MadeSweep
from tests.unit.sweeps.trust.test_findings import stopped_sweep


def _finish(sweep: MadeSweep, number: int, *values: float) -> int:
    """Train a pruned trial to its end; its new trial begins with the old one's reports."""
    new = sweep.ledger.add_extra("finish", number).number
    known = sweep.ledger.trial(number).reports.values()
    for epoch, value in enumerate([*known, *values], start=1):
        sweep.ledger.report(new, epoch=epoch, step=epoch * 10, value=value)
    sweep.ledger.finish(new, "complete")
    return new


@pytest.fixture
def sweep(tmp_path: Path) -> MadeSweep:
    """A sweep that was extended after a trial had been finished: numbers have a gap."""
    made = stopped_sweep(tmp_path, count=12)
    pruned = [one for one in made.view.records if one.state == "pruned"]
    best = min(pruned, key=lambda one: one.value or 0.0)
    _finish(made, best.number, *[(best.value or 0.0) * 1.01] * 9)
    for point in range(4):  # in the bad region, and numbered beyond the finishing trial
        params = {**best.params, "train.optimizer.lr": 2e-4 * (1 + point)}
        made.add("pruned", 3.0, reason="asha at epoch 1", params=params)
    return made


def test_findings_are_those_of_the_search(sweep: MadeSweep) -> None:
    regions = [one for one in find(sweep.view).sentences if one.topic == "region"]
    assert len(regions) == 1
    assert "were stopped at epoch 1" in regions[0].sentence
    assert "16 trials" in next(
        o.sentence for o in find(sweep.view).sentences if o.topic == "epochs"
    )


def test_next_command_counts_the_search_alone(sweep: MadeSweep) -> None:
    assert len(sweep.view.records) == 17
    assert next_overrides(sweep.view, [], [])[0] == f"trials={2 * 16}"
    assert "trials=32" in find(sweep.view).overrides


def test_best_finished_trial_is_compared_like_the_one_it_finishes(tmp_path: Path) -> None:
    made = stopped_sweep(tmp_path)
    pruned = next(one for one in made.view.records if one.state == "pruned")
    new = _finish(made, pruned.number, *[0.001] * 9)
    best = next(one.sentence for one in find(made.view).sentences if one.topic == "best")
    assert best.startswith(f"Trial {new} has the best val/loss, 0.001")
    assert "of 11 trials that trained to the end" in best


def test_report_compares_the_search_alone(sweep: MadeSweep) -> None:
    data = read_sweep(sweep.paths)
    assert set(data.values) == set(range(17)) - {12}


def test_totals_count_what_has_not_started(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path)
    made.spec = made.spec.model_copy(update={"trials": 8})
    for _ in range(4):
        made.add("complete", 1.0)
    _finish(made, made.add("pruned", 2.0), 1.5)
    text = describe_sweep(made.view.records, [], made.spec)
    assert "**6 of 9 trials**" in text
    queued: dict[str, str] = {}
    notifier = Notifier(
        made.paths, made.spec, "id", 1, made.ledger, lambda _key, body: queued.update(body)
    )
    notifier.sweep_ended("INTERRUPTED", None)
    assert "6 of 9 trials" in queued["text"]


def test_finishing_without_improvement_is_no_news(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path)
    pruned = made.add("pruned", 1.0)
    queued: list[str] = []
    notifier = Notifier(
        made.paths, made.spec, "id", 1, made.ledger, lambda key, _body: queued.append(key)
    )
    notifier.trial_ended(_finish(made, pruned, 2.0))
    assert queued == []
    notifier.trial_ended(_finish(made, made.add("pruned", 3.0), 0.5))
    assert len(queued) == 1


def test_finishing_trials_train_to_the_end() -> None:
    text = "name: s\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 9\nbudget: {epochs: 9}\n"
    asha, halving = (
        parse_spec(f"{text}early_stopping: {{scheduler: {rule}, grace_epochs: 1}}\n", "s.yaml")
        for rule in ("asha", "asha_promote")
    )
    ended = [1] * 8 + [9]
    assert epochs_left(asha, Counter(ended), [], 0, finishing=[3]) == 6
    assert epochs_left(halving, Counter([]), [], 0, finishing=[3, 8]) == 6 + 1
