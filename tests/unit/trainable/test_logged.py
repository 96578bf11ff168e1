"""Values that a task or a loop logs become columns of the rows at no cost for the step."""

# ruff: noqa: ARG001, ARG005  what stands in for something keeps its signature

from __future__ import annotations

import os

import pytest
import torch

from trainable.custom_loop import CustomLoop
from trainable.errors import TaskError
from trainable.logged import MAX_NAMES, NOTED, Log, close_run, current_run, log_of, means, run_log
from trainable.loop_context import Context, Opening
from trainable.store.metrics_file import logged_files, read_logged, read_rows
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


def test_step_value_is_a_column_and_eval_value_has_val_prefix(tmp_path, opened, configure, toy):
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


def test_logged_value_can_be_the_metric(tmp_path, opened, configure, toy):
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
        ("val/x", 1.0, "are for evaluate"),
        ("", 1.0, "a text of 1 to"),
        (3, 1.0, "a text of 1 to"),
        ("x" * 300, 1.0, "a text of 1 to"),
        ("x", "one", "one number"),
        ("x", torch.ones(2), "one number"),
        ("x", torch.ones(1, device="meta"), "one number"),
    ],
)
def test_unloggable_values_are_refused(name, value, said):
    with pytest.raises(TaskError, match=said):
        Log().add(name, value)


def test_names_are_bounded():
    log = Log()
    for number in range(MAX_NAMES):
        log.add(f"n{number}", 1.0)
    with pytest.raises(TaskError, match="at most"):
        log.add("more", 1.0)
    log.add("n0", 1.0)


def test_keys_of_evaluate_cannot_be_logged_too(tmp_path, opened, configure, toy):
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

    with CustomLoop(loop, configure(), Opening(tmp_path, torch.device("cpu"))) as run:
        list(run.events())
    assert [row.metrics["aux"] for row in read_rows(tmp_path)] == [0.5, 1.5, 2.5]


def test_values_with_own_steps_are_kept_apart_and_cut_back(tmp_path, configure):
    def loop(config, context: Context):
        log, _ = current_run()
        for epoch in context.remaining_epochs():
            for i in range(2):
                log.add_row("inner", float(epoch), 2 * epoch + i + 10, 5)
            log.add_row("val/loss", 7.0, epoch, 5)
            log.add_row("stepless", 1.0, 0, 5)
            yield {"val/loss": 1.0}, {"epoch": epoch}

    asked = iter([False, True])
    with CustomLoop(
        loop,
        configure(),
        Opening(tmp_path, torch.device("cpu")),
        should_stop=lambda: next(asked),
    ) as run:
        reports = list(run.events())
    assert [row.step for row in reports[1].rows if "inner" in row.metrics] == [12, 13]
    with (tmp_path / "logged.jsonl").open("a") as file:
        file.write('{"step": 3, "own_step": 14, "time": 5, "metrics": {"inner": 2.0}}\n{"st')
    with CustomLoop(loop, configure(), Opening(tmp_path, torch.device("cpu"))) as run:
        (last,) = run.events()
    found = read_logged(tmp_path)
    assert [row.step for _, row in found if "inner" in row.metrics] == [10, 11, 12, 13, 14, 15]
    assert [row.step for _, row in found if "stepless" in row.metrics] == [0, 2, 3]
    assert [row.step for _, row in found if "logged/val/loss" in row.metrics] == [0, 1, 2]
    assert [row.metrics["val/loss"] for row in read_rows(tmp_path)] == [1.0, 1.0, 1.0]
    assert last.finished
    assert current_run() is None


def test_rows_behind_the_checkpoint_are_logged_at_their_steps_again(tmp_path, configure):
    def loop(config, context: Context):
        for epoch in context.remaining_epochs():
            log, _ = current_run()
            log.add_row("plain", 1.0, epoch, 5)
            log.add_row("epoch", 1.0, epoch, 5)
            yield {"val/loss": 1.0}, {"epoch": epoch}

    rows = [
        f'{{"step": 1, "own_step": 0, "time": 5, "metrics": {{"{name}": 1.0}}}}\n'
        for name in ("plain", "logged/epoch")
    ]
    (tmp_path / "logged.jsonl").write_text("".join(rows))  # its process died before it saved
    with CustomLoop(loop, configure(), Opening(tmp_path, torch.device("cpu"))) as run:
        list(run.events())
    found = [(row.step, name) for _, row in read_logged(tmp_path) for name in row.metrics]
    assert found == [(step, name) for step in range(3) for name in ("plain", "logged/epoch")]


def test_files_and_figures_lie_with_the_run(tmp_path, opened, configure, toy):
    source = tmp_path / "source.txt"
    source.write_text("hello")

    class Figure:
        def savefig(self, path):
            path.write_bytes(b"png")

    def log(task, *_):
        task.log_file(source)
        task.log_file(source, "notes/again.txt")
        task.log_figure("samples", Figure())

    next(opened(configure(), tmp_path / "run", _logging(toy, log)).events())
    assert [name for _, name in logged_files(tmp_path / "run")] == [
        "notes/again.txt",
        "samples.png",
        "source.txt",
    ]
    for name in ("../x", "/x", ""):
        with pytest.raises(TaskError, match="stays below the run"):
            Log().add_file(source, name)
    with pytest.raises(TaskError, match="savefig"):
        Log().add_figure("x", 3)


def test_links_in_a_run_directory_are_not_followed(tmp_path):
    theirs = tmp_path / "id_rsa"
    theirs.write_text("secret")
    run = tmp_path / "run"
    (run / "artifacts").mkdir(parents=True)
    (run / "artifacts" / "samples.png").symlink_to(theirs)
    (run / "artifacts" / "home").symlink_to(tmp_path)
    assert not logged_files(run)
    source = tmp_path / "source.txt"
    source.write_text("hello")
    log = Log()
    log.directory = run
    log.add_file(source, "samples.png")
    (run / "artifacts" / "linked.txt").hardlink_to(theirs)
    log.add_file(source, "linked.txt")
    assert (run / "artifacts" / "linked.txt").read_text() == "hello"
    assert theirs.read_text() == "secret"
    (run / "artifacts" / "linked.txt").unlink()
    assert [name for _, name in logged_files(run)] == ["samples.png"]
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "artifacts").symlink_to(tmp_path)
    assert not logged_files(linked)


def test_logging_from_another_process_is_refused():
    log = Log()
    child = os.fork()
    if not child:
        refused = 0
        for add in (lambda: log.add("x", 1.0), lambda: log.add_row("x", 1.0, 1, 1)):
            try:
                add()
            except TaskError:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_lost_parameters_and_tags_are_carried_over(tmp_path):
    log = run_log(tmp_path)
    log.set_values("params", {"a": "1"})
    log.set_values("tags", {"t": "x", "ü": "two\nlines"})
    log.set_values("tags", {"t": "y"})
    assert log.take_values() == {"params": {"a": "1"}, "tags": {"t": "y", "ü": "two\nlines"}}
    assert log.take_values() == {}
    close_run(tmp_path)  # and that report never arrived
    again = run_log(tmp_path)
    again.set_values("tags", {"t": "z"})
    assert again.take_values() == {"params": {"a": "1"}, "tags": {"t": "z", "ü": "two\nlines"}}
    close_run(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"params": 1}', '{"tags": {}}', "[" * 9000])
def test_a_damaged_file_of_notes_ends_nothing(tmp_path, content):
    (tmp_path / NOTED).write_text(content)
    log = run_log(tmp_path)
    assert log.take_values() == {}
    log.set_values("params", {"a": "1"})
    close_run(tmp_path)
    assert run_log(tmp_path).take_values() == {"params": {"a": "1"}}
    close_run(tmp_path)
