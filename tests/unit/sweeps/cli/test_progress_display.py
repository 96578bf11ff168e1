"""The progress display of a running sweep, on a terminal and in a log."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from sweeps.cli.run_console import PlainLines, ProgressTable, view_on
from sweeps.ledger.trials import TrialRecord
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.view.observer import TrialProgress, TrialStart
from sweeps.view.sweep_progress import SweepProgress

SPEC = """
name: s
task: digits
metric: val/loss
mode: min
trials: 4
budget: {epochs: 2}
space: {train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}}
"""
PARAMS = {"train.optimizer.lr": 0.01}


@pytest.fixture
def spec() -> SweepSpec:
    return parse_spec(SPEC, "s.yaml")


def _progress(number: int, epoch: int, loss: float, best: float) -> TrialProgress:
    metrics = {
        "val/loss": loss,
        "best/val/loss": best,
        "train/lr": 0.01,
        "train/grad_norm": 1.5,
    }
    return TrialProgress(number, PARAMS, epoch, epoch * 10, metrics)


def _play(view: ProgressTable | PlainLines) -> None:
    with view:
        view.started(TrialStart(0, PARAMS, 1))
        view.reported(_progress(0, 1, 0.5, 0.5))
        view.started(TrialStart(1, PARAMS, 2))
        view.reported(_progress(1, 1, 0.9, 0.9))
        view.warned(1, "checkpoint [1] was set aside")
        view.ended(1, "pruned", 0.9, None)
        view.reported(_progress(0, 2, 0.6, 0.5))
        view.ended(0, "complete", 0.5, None)
        view.started(TrialStart(2, PARAMS, 1))
        view.ended(2, "failed", None, "non_finite: the loss is nan")
        view.started(TrialStart(3, PARAMS, 1))


@pytest.mark.parametrize("kind", [ProgressTable, PlainLines])
def test_metrics_that_a_task_reports_beside_the_searched_one_are_shown(
    spec: SweepSpec, kind: type[ProgressTable] | type[PlainLines]
) -> None:
    for width, is_shown in ((120, True), (60, False)):
        console = Console(file=io.StringIO(), width=width, height=20)
        view = kind(console, SweepProgress(spec))
        view.started(TrialStart(0, PARAMS, 1))
        beside = {"val/mae": 0.125, "memory/process_mb": 412.0, "epoch": 1.0}
        one = _progress(0, 1, 0.5, 0.5)
        view.reported(one._replace(metrics=one.metrics | beside))
        if isinstance(view, ProgressTable):
            console.print(view.render())
            text = console.file.getvalue()  # type: ignore[attr-defined]  # it is in memory
            assert ("0.125" in text) == is_shown
            assert ("no room for val/mae" in text) == (not is_shown)
        else:
            text = console.file.getvalue()  # type: ignore[attr-defined]  # it is in memory
            assert "val/mae 0.125" in text
        assert "process_mb" not in text


@pytest.mark.parametrize("kind", [ProgressTable, PlainLines])
def test_resumed_trial_says_from_which_step(
    spec: SweepSpec, kind: type[ProgressTable | PlainLines]
) -> None:
    output = io.StringIO()
    console = Console(file=output, width=120, force_terminal=True, color_system=None)
    with kind(console, SweepProgress(spec)) as view:
        view.started(TrialStart(1, PARAMS, 2, step=46))
    assert re.search(r"trial 1 .*resumes at step 46", output.getvalue())


def _record(number: int, state: str, value: float, *, order: int = 0) -> TrialRecord:
    return TrialRecord(
        number=number,
        state=state,
        params=PARAMS,
        suggested=PARAMS,
        value=value,
        reports={1: value, 2: value + 1},
        epoch=2,
        finish_order=order,
        seconds=72.0,
    )


def _lines(table: ProgressTable, width: int = 100) -> list[str]:
    plain = Console(file=io.StringIO(), width=width)
    plain.print(table.render())
    return plain.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_running_trials_come_first_then_best_then_newest(spec: SweepSpec) -> None:
    console = Console(
        file=io.StringIO(), force_terminal=True, width=100, height=30, color_system=None
    )
    table = ProgressTable(console, SweepProgress(spec))
    _play(table)
    lines = [line.split() for line in _lines(table)]
    # The rate that is applied is shown where it is not the searched one.
    assert lines[0] == ["trial", "state", "epoch", "val/loss", "best", "lr", "grad_norm", "time"]
    assert [line[:2] for line in lines[1:5]] == [
        ["3", "running"],
        ["0", "complete"],
        ["2", "failed"],
        ["1", "pruned"],
    ]
    assert lines[2][2:7] == ["2/2", "0.6", "0.5", "0.01", "1.5"]
    assert " ".join(lines[5]).startswith("s · 3/4 trials · best val/loss 0.5 (trial 0) · ")
    assert lines[5][-1] == "left"


def test_table_shows_trials_of_earlier_drivers(spec: SweepSpec) -> None:
    before = [
        _record(0, "pruned", 0.9, order=2),
        _record(1, "complete", 0.3, order=1),
        _record(2, "running", 0.7),
    ]
    console = Console(file=io.StringIO(), width=100, height=30)
    table = ProgressTable(console, SweepProgress(spec, before))
    assert "starting workers" in _lines(table)[-1]
    table.started(TrialStart(2, PARAMS, 2))
    lines = [line.split() for line in _lines(table)]
    assert [line[:2] for line in lines[1:4]] == [
        ["2", "running"],
        ["1", "complete"],
        ["0", "pruned"],
    ]
    assert lines[2][2:] == ["2/2", "1.3", "0.3", "0.01", "-", "1m", "12s"]
    assert " ".join(lines[4]).startswith("s · 2/4 trials · best val/loss 0.3 (trial 1) · ")
    table.reported(_progress(2, 2, 0.2, 0.2))
    table.ended(2, "complete", 0.2, None)
    assert "best val/loss 0.2 (trial 2)" in _lines(table)[-1]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("file", "environment", "kind"),
    [
        (_Terminal(), {"TERM": "xterm"}, ProgressTable),
        (_Terminal(), {"TERM": "dumb"}, PlainLines),
        (io.StringIO(), {"TERM": "xterm", "FORCE_COLOR": "1"}, PlainLines),
    ],
)
def test_live_table_needs_a_terminal(
    spec: SweepSpec, file: io.StringIO, environment: dict[str, str], kind: type
) -> None:
    assert isinstance(view_on(Console(file=file, _environ=environment), spec), kind)


WIDE = SPEC.replace(
    "space: {train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}}",
    "space: {train.schedule.warmup: {uniform: [0, 0.3]}, train.clip.max_norm: {uniform: [1, 9]}, "
    "train.batch_size: {choice: [16, 32]}, task.a_long_name_of_an_argument: {uniform: [0, 1]}}",
)


@pytest.mark.parametrize(
    ("width", "columns", "more"),
    [
        (
            80,
            ["warmup", "max_norm", "batch_size"],
            "+ 35 more trials; no room for a_long_name_of_an_argument, lr, grad_norm",
        ),
        (
            160,
            ["warmup", "max_norm", "batch_size", "a_long_name_of_an_argument", "lr", "grad_norm"],
            "+ 35 more trials",
        ),
    ],
)
def test_table_shows_what_fits_and_names_the_rest(
    width: int, columns: list[str], more: str
) -> None:
    spec = parse_spec(WIDE, "s.yaml")
    params = {
        "train.schedule.warmup": 0.1234567,
        "train.clip.max_norm": 1.2345e-7,
        "train.batch_size": 16,
        "task.a_long_name_of_an_argument": 0.5,
    }
    console = Console(file=io.StringIO(), width=width, height=9)
    table = ProgressTable(console, SweepProgress(spec))
    for number in range(40):
        table.started(TrialStart(number, params, 1))
        table.reported(_progress(number, 2, 0.123456 + number, 0.123456 + number))
        table.ended(number, "pruned", None, None)
    console.print(table.render())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) <= 8
    expected = ["trial", "state", "epoch", "val/loss", "best", *columns, "time"]
    assert lines[0].split() == expected
    assert lines[1].split()[:6] == ["0", "pruned", "2/2", "0.1235", "0.1235", "0.1235"]
    assert "…" not in "".join(lines), "nothing is cropped"
    assert lines[-2] == more


def test_plain_output_prints_each_event_once(spec: SweepSpec) -> None:
    console = Console(file=io.StringIO(), width=40)
    earlier = [_record(9, "pruned", 0.9, order=1)]
    _play(PlainLines(console, SweepProgress(spec, earlier, clock=lambda: 5.0)))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.partition(" · ")[0] for line in lines] == [
        "trial 0 started: train.optimizer.lr 0.01",
        "trial 0 epoch 1/2: val/loss 0.5, train/lr 0.01, train/grad_norm 1.5",
        "trial 1 started (attempt 2): train.optimizer.lr 0.01",
        "trial 1 epoch 1/2: val/loss 0.9, train/lr 0.01, train/grad_norm 1.5",
        "trial 1: checkpoint [1] was set aside",
        "trial 1 pruned, best val/loss 0.9 (2/4 trials)",
        "trial 0 epoch 2/2: val/loss 0.6, train/lr 0.01, train/grad_norm 1.5",
        "trial 0 complete, best val/loss 0.5 (3/4 trials)",
        "trial 2 started: train.optimizer.lr 0.01",
        "trial 2 failed: non_finite: the loss is nan (4/4 trials)",
        "trial 3 started: train.optimizer.lr 0.01",
    ]


def test_plain_lines_have_elapsed_and_remaining_time(spec: SweepSpec) -> None:
    now = 0.0
    console = Console(file=io.StringIO(), width=40)
    lines = PlainLines(console, SweepProgress(spec, clock=lambda: now))
    lines.started(TrialStart(0, PARAMS, 1))
    now = 60.0
    lines.reported(_progress(0, 1, 0.5, 0.5))
    now = 61.0
    lines.stopping()
    lines.ended(0, "interrupted", None, None)
    printed = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    ends = [line.split(" · ")[1:] for line in printed]
    # Of 8 epochs, one took a minute.
    assert ends == [["0s"], ["1m 00s", "about 7m 00s left"], ["1m 01s"]]
