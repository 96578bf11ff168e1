"""The progress display of a running sweep, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from sweeps.commands.progress_display import PlainLines, ProgressTable, view_on
from sweeps.config.spec import SweepSpec, parse_spec
from sweeps.results.observer import TrialProgress

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
        view.started(0, PARAMS, 1)
        view.reported(_progress(0, 1, 0.5, 0.5))
        view.started(1, PARAMS, 2)
        view.reported(_progress(1, 1, 0.9, 0.9))
        view.warned(1, "checkpoint [1] was set aside")
        view.ended(1, "pruned", 0.9, None)
        view.reported(_progress(0, 2, 0.6, 0.5))
        view.ended(0, "complete", 0.5, None)
        view.started(2, PARAMS, 1)
        view.ended(2, "failed", None, "non_finite: the loss is nan")
        view.started(3, PARAMS, 1)


def test_terminal_table_shows_running_first_then_leaders(spec: SweepSpec) -> None:
    console = Console(
        file=io.StringIO(), force_terminal=True, width=100, height=30, color_system=None
    )
    table = ProgressTable(console, spec)
    _play(table)
    plain = Console(file=io.StringIO(), width=100)
    plain.print(table.render())
    lines = [line.split() for line in plain.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    # The rate that is applied is shown where it is not the searched one.
    assert lines[0] == ["trial", "state", "epoch", "val/loss", "best", "lr", "grad_norm", "time"]
    assert [line[:2] for line in lines[1:5]] == [
        ["3", "running"],
        ["0", "complete"],
        ["1", "pruned"],
        ["2", "failed"],
    ]
    assert lines[2][2:7] == ["2/2", "0.6", "0.5", "0.01", "1.5"]
    assert " ".join(lines[5]).startswith("s · 3/4 trials · best val/loss 0.5 (trial 0) · ")
    assert lines[5][-1] == "left"


def test_best_of_an_earlier_driver_stays_until_beaten(spec: SweepSpec) -> None:
    table = ProgressTable(Console(file=io.StringIO()), spec, finished=2, best=(7, 0.3))
    for number, value, best in ((0, 0.5, "0.3 (trial 7)"), (1, 0.2, "0.2 (trial 1)")):
        table.started(number, PARAMS, 1)
        table.reported(_progress(number, 2, value, value))
        table.ended(number, "complete", value, None)
        assert f"{3 + number}/4 trials · best val/loss {best} · " in table._summary()


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


def test_table_before_the_first_trial(spec: SweepSpec) -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(ProgressTable(console, spec).render())
    assert "starting workers" in console.file.getvalue()  # type: ignore[attr-defined]


def test_table_never_outgrows_the_terminal(spec: SweepSpec) -> None:
    console = Console(file=io.StringIO(), width=100, height=12)
    table = ProgressTable(console, spec)
    for number in range(40):
        table.started(number, PARAMS, 1)
        table.ended(number, "pruned", None, None)
    console.print(table.render())
    assert len(console.file.getvalue().splitlines()) <= 12  # type: ignore[attr-defined]


WIDE = SPEC.replace(
    "space: {train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}}",
    "space: {train.schedule.warmup: {uniform: [0, 0.3]}, train.clip.max_norm: {uniform: [1, 9]}, "
    "train.batch_size: {choice: [16, 32]}, task.a_long_name_of_an_argument: {uniform: [0, 1]}}",
)


@pytest.mark.parametrize(
    ("width", "columns", "more"),
    [
        (80, ["warmup"], "+ 36 more trials, 3 more parameters"),
        (120, ["warmup", "max_norm", "batch_size"], "+ 36 more trials, 1 more parameter"),
        (
            160,
            ["warmup", "max_norm", "batch_size", "a_long_name_of_an_argument"],
            "+ 36 more trials",
        ),
    ],
)
def test_table_shows_what_fits_and_counts_the_rest(
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
    table = ProgressTable(console, spec)
    for number in range(40):
        table.started(number, params, 1)
        table.reported(_progress(number, 2, 0.123456 + number, 0.123456 + number))
        table.ended(number, "pruned", None, None)
    console.print(table.render())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) <= 9
    expected = ["trial", "state", "epoch", "val/loss", "best", *columns, "lr", "grad_norm", "time"]
    assert lines[0].split() == expected
    assert lines[1].split()[:6] == ["0", "pruned", "2/2", "0.1235", "0.1235", "0.1235"]
    assert "…" not in "".join(lines), "nothing is cropped"
    assert lines[-2] == more


def test_plain_output_prints_each_event_once(spec: SweepSpec) -> None:
    console = Console(file=io.StringIO(), width=40)
    _play(PlainLines(console, spec, finished=1))
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
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


def test_trials_beyond_the_limit_are_counted(spec: SweepSpec) -> None:
    for file, said in ((_Terminal(), "6/6 trials · best"), (io.StringIO(), "(6/6 trials)")):
        console = Console(file=file, width=100, _environ={"TERM": "xterm"})
        view = view_on(console, spec, finished=5, total=6)
        with view:
            view.started(5, PARAMS, 2)
            view.reported(_progress(5, 2, 0.5, 0.5))
            view.ended(5, "complete", 0.5, None)
        assert said in file.getvalue()


def test_several_metrics_stand_side_by_side() -> None:
    two = parse_spec(
        SPEC.replace("val/loss", "[val/loss, speed]").replace("min", "[min, max]"), ""
    )
    metrics = {"val/loss": 0.5, "speed": 20.0, "best/val/loss": 0.4, "best/speed": 10.0}
    console = Console(file=io.StringIO(), width=100)
    table, lines = ProgressTable(console, two), PlainLines(console, two)
    for view in (table, lines):
        view.started(0, PARAMS, 1)
        view.reported(TrialProgress(0, PARAMS, 2, 20, metrics))
        view.ended(0, "complete", [0.4, 10.0], None)
    console.print(table.render())
    printed = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert printed[1:3] == [
        "trial 0 epoch 2/2: val/loss 0.5, speed 20",
        "trial 0 complete, val/loss 0.4, speed 10 (1/4 trials)",
    ]
    assert printed[3].split()[2:6] == ["epoch", "val/loss", "speed", "best"]
    assert printed[4].split()[2:6] == ["2/2", "0.5", "20", "0.4"]
    assert " · best val/loss 0.4 (trial 0) · " in printed[5]
