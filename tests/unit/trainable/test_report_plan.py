"""Budgets in steps, samples and tokens: when a run reports, and that reporting changes nothing."""

from __future__ import annotations

import pytest
import torch

from trainable.config import BudgetConfig, TrialConfig
from trainable.data import WindowPlan
from trainable.errors import ConfigError
from trainable.report_plan import ReportPlan
from trainable.train_state import TrainProgress


def _plan(budget, *, samples=43, batch_size=12, tokens=None):
    train = WindowPlan(samples=samples, batch_size=batch_size, micro_batch_size=batch_size)
    return ReportPlan(BudgetConfig.model_validate(budget), train, tokens), train


def _steps_of_reports(budget, **options):
    """Step through a whole run; return at which steps it reports."""
    plan, train = _plan(budget, **options)
    progress, found = TrainProgress(), []
    while progress.reports < plan.reports:
        progress.samples += train.size(progress.window)
        progress.step += 1
        progress.window += 1
        progress.since_report += 1
        if progress.window == train.windows:
            progress.epoch, progress.window = progress.epoch + 1, 0
        if plan.is_due(progress):
            progress.reports, progress.since_report = progress.reports + 1, 0
            found.append(progress.step)
    return found, plan.total_steps


@pytest.mark.parametrize(
    ("budget", "options", "steps"),
    [
        ({"epochs": 3}, {}, [4, 8, 12]),
        ({"epochs": 3, "report_every": 0.5}, {}, [2, 4, 6, 8, 10, 12]),
        # the last two fall on one step: one more lies between them
        ({"epochs": 2, "report_every": 0.3}, {}, [2, 3, 4, 5, 6, 8, 9]),
        ({"epochs": 5, "report_every": 2}, {}, [8, 16, 20]),
        ({"steps": 10, "report_every": 4}, {}, [4, 8, 10]),
        ({"samples": 86, "report_every": 43}, {}, [4, 8]),
        ({"samples": 86, "report_every": 43}, {"batch_size": 24}, [2, 4]),
        ({"samples": 100, "report_every": 30}, {}, [3, 6, 9, 10]),
        ({"tokens": 860, "report_every": 430}, {"tokens": 10}, [4, 8]),
    ],
    ids=str,
)
def test_reports_fall_on_these_steps(budget, options, steps):
    found, total = _steps_of_reports(budget, **options)
    assert found == steps
    assert total in (steps[-1], steps[-1] - 1)
    assert len(found) == BudgetConfig.model_validate(budget).reports


@pytest.mark.parametrize(
    ("budget", "options", "key", "words"),
    [
        ({"epochs": 3, "report_every": 0.1}, {}, "report_every", "an epoch has 4 steps"),
        ({"samples": 90, "report_every": 9}, {}, "report_every", "write 12 or more"),
        ({"tokens": 900, "report_every": 90}, {"tokens": 10}, "report_every", "write 120 or more"),
        ({"tokens": 900, "report_every": 90}, {}, "tokens", "tokens_per_sample"),
    ],
    ids=str,
)
def test_budget_that_does_not_fit_the_data(budget, options, key, words):
    with pytest.raises(ConfigError, match=words) as caught:
        _plan(budget, **options)
    assert caught.value.key == f"budget.{key}"


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ({"epochs": 2, "steps": 3}, "epochs: 2 and steps: 3 are given"),
        ({"epochs": None}, "no length is given"),
        ({"steps": 100}, "report_every is missing.*write for example report_every: 5"),
        ({"steps": 100, "report_every": 101}, "the budget has 100 steps"),
        ({"steps": 100, "report_every": 2.5}, "a whole number of steps"),
        ({"epochs": 2, "report_every": 3}, "the budget has 2 epochs"),
        ({"steps": 0, "report_every": 1}, "greater than or equal to 1"),
        ({"val_batches": 0}, "greater than or equal to 1"),
    ],
    ids=str,
)
def test_budget_that_makes_no_sense(budget, words):
    with pytest.raises(ValueError, match=words):
        BudgetConfig.model_validate(budget)


def test_budget_is_written_as_it_was_given():
    for given in (
        {"epochs": 10},
        {"steps": 9, "report_every": 2},
        {"epochs": 2, "val_batches": 3},
    ):
        assert BudgetConfig.model_validate(given).model_dump(mode="json") == given
    assert BudgetConfig() == BudgetConfig(epochs=10)


def test_checkpoints_follow_the_reports(configure):
    def interval(budget, **checkpoint):
        data = configure(budget=budget).model_dump() | {"checkpoint": checkpoint}
        return str(TrialConfig.model_validate(data).checkpoint.every)

    steps = {"steps": 9, "report_every": 2}
    assert interval({"epochs": 2}) == "1 epoch"
    assert interval(steps) == "1 report"
    assert interval({"epochs": 2, "report_every": 0.5}, keep=3) == "1 report"
    assert interval(steps, every="1 epoch") == "1 epoch"


def _train(opened, config, directory, task):
    run = opened(config, directory, task)
    reports = list(run.events())
    return run, reports


@pytest.mark.parametrize("augmented", [False, True], ids=["tensors", "loader"])
@pytest.mark.parametrize(
    "budget",
    [
        {"steps": 12, "report_every": 5},
        {"epochs": 3, "report_every": 0.5},
        {"samples": 129, "report_every": 43},
    ],
    ids=str,
)
def test_reports_do_not_change_the_training(tmp_path, opened, configure, toy, budget, augmented):
    task = {"augmented": augmented}
    plain, _ = _train(opened, configure(), tmp_path / "plain", toy(**task))
    other, reports = _train(opened, configure(budget=budget), tmp_path / "other", toy(**task))
    first, second = plain.state.state_dict(), other.state.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(*map(_tensors, (first, second)), strict=True))
    assert [report.epoch for report in reports] == [*range(1, len(reports) + 1)]
    assert reports[-1].finished
    assert reports[-1].step == 12
    assert reports[-1].metrics["epoch"] == 3.0
    assert reports[-1].metrics["report"] == len(reports)


def _tensors(state):
    optimizer = [v for one in state["optimizer"]["state"].values() for v in one.values()]
    return [*state["model"].values(), *optimizer, state["random"]["torch"]]


def test_report_tells_the_part_of_the_epoch(tmp_path, opened, configure, toy):
    config = configure(budget={"steps": 7, "report_every": 3})
    _, reports = _train(opened, config, tmp_path, toy())
    assert [report.metrics["epoch"] for report in reports] == [0.75, 1.5, 1.75]
    assert [len(report.rows) for report in reports] == [3, 3, 1]


def test_evaluates_the_first_batches_each_time(tmp_path, opened, configure, toy):
    class Counting(toy):
        seen = ()

        def evaluate(self, model, batches):
            batches = list(batches)
            Counting.seen = (*Counting.seen, torch.cat([inputs for inputs, _ in batches]))
            return super().evaluate(model, batches)

    def evaluated(**train):
        Counting.seen = ()
        config = configure(budget={"steps": 4, "report_every": 2, "val_batches": 2}, **train)
        _train(opened, config, tmp_path / str(train), Counting())
        return Counting.seen

    first, second = evaluated()
    assert torch.equal(first, toy().build_data().val[0][:24])
    assert torch.equal(first, second)
    finer = evaluated(accumulation=4)  # as after a halving: the same samples
    assert torch.equal(finer[0], first)


@pytest.mark.parametrize("until", [1, 3])
def test_pauses_at_a_report(tmp_path, opened, configure, toy, until):
    config = configure(budget={"steps": 13, "report_every": 3})
    whole, _ = _train(opened, config, tmp_path / "whole", toy())
    paused = opened(config, tmp_path / "paused", toy(), until=until)
    last = list(paused.events())[-1]
    assert (last.epoch, last.step, last.finished) == (until, 3 * until, True)
    paused.close()
    rest, reports = _train(opened, config, tmp_path / "paused", toy())
    assert reports[0].epoch == until + 1
    first, second = whole.state.state_dict(), rest.state.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(*map(_tensors, (first, second)), strict=True))


def _worse_each_time(toy):
    class Worse(toy):
        def evaluate(self, _, batches):
            list(batches)
            self.losses = getattr(self, "losses", [5.0, 3.0, 4.0, 3.5, 3.0, 2.0])
            return {"loss": self.losses.pop(0)}

    return Worse()


def test_patience_ends_a_run_with_its_best(tmp_path, opened, configure, toy):
    run, reports = _train(opened, configure(epochs=6, patience=3), tmp_path, _worse_each_time(toy))
    assert [report.finished for report in reports] == [False] * 4 + [True]
    assert reports[-1].out_of_patience
    assert reports[-1].metrics["best/val/loss"] == 3.0
    assert run.store.best().epoch == 2
    assert run.store.newest().epoch == 5  # the last state is saved, too
    run.close()
    config = configure(epochs=6, patience=3)
    repeated = _train(opened, config, tmp_path, _worse_each_time(toy))[1]
    assert [(one.epoch, one.finished, one.rows) for one in repeated] == [(5, True, [])]


@pytest.mark.parametrize("until", range(1, 5))
def test_patience_counts_across_interruptions(tmp_path, opened, configure, toy, until):
    config = configure(epochs=6, patience=3)
    first = opened(config, tmp_path, _worse_each_time(toy), until=until)
    reports = list(first.events())
    first.close()
    reports += _train(opened, config, tmp_path, _worse_each_time(toy))[1]
    assert [report.epoch for report in reports] == [1, 2, 3, 4, 5]
    assert reports[-1].out_of_patience
