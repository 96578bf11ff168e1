"""What a task or a loop logs becomes columns of the run's rows, and costs the step nothing."""

# ruff: noqa: ARG001, ARG005  what stands in for something keeps its signature

from __future__ import annotations

import pytest
import torch

from trainable.errors import TaskError
from trainable.history import read_rows
from trainable.logged import MAX_NAMES, Log, log_of, means
from trainable.own_loop import Context, OwnLoop
from trainable.task import Task


def _logging(toy, log):
    class Logging(toy):
        def loss(self, model, batch):
            total, weight = super().loss(model, batch)
            log(self, model, total, weight)
            return total, weight

    return Logging()


def _mean_loss(task, model, total, weight):
    task.log("aux", total / weight)


def test_a_value_of_a_step_is_a_column_of_its_row_and_one_of_an_evaluation_is_named_val(
    tmp_path, opened, configure, toy
):
    task = _logging(toy, _mean_loss)
    reports = list(opened(configure(), tmp_path, task).events())
    rows = read_rows(tmp_path)
    assert [row.metrics["aux"] for row in rows] == pytest.approx(
        [row.metrics["train/loss"] for row in rows]
    )
    assert reports[0].metrics["val/aux"] > 0
    assert "val/aux" not in rows[0].metrics
    assert log_of(Task()) is None


def test_micro_batches_of_a_step_are_averaged(tmp_path, opened, configure, toy):
    values = iter(range(1000))
    task = _logging(toy, lambda task, model, *_: model.training and task.log("n", next(values)))
    next(opened(configure(accumulation=2), tmp_path, task).events())
    assert [row.metrics["n"] for row in read_rows(tmp_path)][:2] == [0.5, 2.5]


def test_it_can_be_the_metric_and_resumes_with_each_step_once(tmp_path, opened, configure, toy):
    task = _logging(toy, _mean_loss)
    config = configure().model_copy(update={"metric": "val/aux"})
    whole = list(opened(config, tmp_path / "whole", task).events())
    trainer = opened(config, tmp_path / "cut", _logging(toy, _mean_loss))
    next(trainer.events())
    trainer.close()
    list(opened(config, tmp_path / "cut", _logging(toy, _mean_loss)).events())
    one, other = (
        [(r.step, r.metrics["aux"], r.metrics.get("val/aux")) for r in read_rows(tmp_path / name)]
        for name in ("whole", "cut")
    )
    assert one == other
    assert whole[-1].metrics["best/val/aux"] > 0


def test_a_step_that_fp16_skips_logs_nothing(tmp_path, opened, configure, toy):
    def log(task, model, total, weight):
        task.log("seen", 1.0)

    trainer = opened(configure(precision="fp16"), tmp_path, _logging(toy, log))
    list(trainer.events())
    assert all(row.metrics["seen"] == 1.0 for row in read_rows(tmp_path) if row.step)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("train/loss", 1.0, "the run itself reports"),
        ("best/x", 1.0, "the run itself reports"),
        ("val/x", 1.0, "logged in evaluate"),
        ("", 1.0, "a text of 1 to"),
        (3, 1.0, "a text of 1 to"),
        ("x" * 300, 1.0, "a text of 1 to"),
        ("x", "one", "one number"),
        ("x", torch.ones(2), "one number"),
        ("x", torch.ones(1, device="meta"), "one number"),
    ],
)
def test_what_cannot_be_logged_is_refused(name, value, said):
    with pytest.raises(TaskError, match=said):
        Log().add(name, value)


def test_names_are_bounded():
    log = Log()
    for number in range(MAX_NAMES):
        log.add(f"n{number}", 1.0)
    with pytest.raises(TaskError, match="at most"):
        log.add("more", 1.0)
    log.add("n0", 1.0)


def test_what_evaluate_returns_cannot_be_logged_too(tmp_path, opened, configure, toy):
    task = _logging(toy, lambda task, model, *_: task.log("loss", 1.0))
    with pytest.raises(TaskError, match=r"'val/loss' is logged, and .*evaluate\(\)"):
        next(opened(configure(), tmp_path, task).events())


def test_a_logged_tensor_may_change_afterwards():
    log, value = Log(), torch.ones(())
    log.add("x", value)
    value.add_(5)
    assert means([log.take()]) == [{"x": 1.0}]


def test_a_loop_logs_into_its_next_report(tmp_path, configure):
    def loop(config, context: Context):
        for epoch in context.remaining_epochs():
            context.log("aux", epoch)
            context.log("aux", torch.tensor(epoch + 1.0))
            yield {"val/loss": 1.0}, {"epoch": epoch}

    with OwnLoop(loop, configure(), tmp_path, device=torch.device("cpu")) as run:
        list(run.events())
    assert [row.metrics["aux"] for row in read_rows(tmp_path)] == [0.5, 1.5, 2.5]


def test_nothing_is_recorded_while_a_task_is_not_trained(toy):
    toy().log("anything", 1.0)
