"""Text of a user's code controls no terminal and imitates no line of ours."""

from __future__ import annotations

import io
from collections import defaultdict
from typing import Any

import pytest

from sweeps.cli import console as commands_console
from sweeps.cli import render
from sweeps.cli.plain_console import PlainConsole, TextTable
from sweeps.cli.run_console import PlainLines
from sweeps.formatting import format_value, joined
from sweeps.ledger.attributes import trial_fields
from sweeps.report.page import table
from sweeps.spec.spec import parse_spec
from sweeps.view.observer import TrialStart
from sweeps.view.sweep_progress import SweepProgress
from trainable.errors import TaskError

HOSTILE = "bad\ntrial 7 complete, best 0.0\r\x1b[2J\x1b]0;title\x07\x9b2J\u202e\u2066"
SHOWN = r"bad\ntrial 7 complete, best 0.0\r\x1b[2J\x1b]0;title\x07\x9b2J\u202e\u2066"
SPEC = """
name: s
task: digits
metric: val/loss
mode: min
trials: 2
budget: {epochs: 1}
space: {train.optimizer.lr: {uniform: [0.1, 0.2]}}
"""


def _console() -> PlainConsole:
    return PlainConsole(file=io.StringIO(), width=10_000)


def _shown(console: PlainConsole) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_one_event_of_a_sweep_is_one_line() -> None:
    console = _console()
    progress = SweepProgress(parse_spec(SPEC, "s.yaml"), clock=lambda: 0.0)
    lines = PlainLines(console, progress)
    lines.started(TrialStart(3, {"task.x": HOSTILE}, 1))
    lines.warned(3, HOSTILE)
    lines.ended(3, "failed", None, HOSTILE)
    assert _shown(console).splitlines() == [
        f"trial 3 started: task.x {SHOWN} · 0s",
        f"trial 3: {SHOWN}",
        f"trial 3 failed: {SHOWN} (1/2 trials) · 0s",
    ]


def test_one_row_is_one_line() -> None:
    console = _console()
    grid = TextTable(["trial", "reason"], right=())
    grid.rows.append(("3", HOSTILE))
    console.print(grid)
    [_, row] = _shown(console).splitlines()
    assert row.startswith("3      bad trial 7 complete")
    assert row.isprintable()


def test_values_are_one_line() -> None:
    assert format_value(HOSTILE) == SHOWN
    assert joined({"task.x": HOSTILE}) == f"task.x {SHOWN}"


def test_text_of_an_earlier_release_is_escaped() -> None:
    fields = trial_fields({}, {"reason": HOSTILE, "traceback": f"Traceback\n{HOSTILE}"})
    assert fields["reason"] == SHOWN
    assert "\x1b" not in fields["traceback"]
    assert fields["traceback"].startswith("Traceback\nbad\n")
    assert trial_fields({}, {})["reason"] is None


def test_lines_of_a_traceback_do_not_begin_as_ours() -> None:
    console = _console()
    found: dict[str, Any] = defaultdict(
        lambda: None,
        params={},
        lineage=[],
        reports={},
        failed_attempts=[],
        health=[],
        lost_workers=[],
    )
    found["traceback"] = "Traceback\nValueError: bad\nbest: trial 9"
    console.print(render.trial(found, parse_spec(SPEC, "s.yaml")))
    assert "\n  best: trial 9\n" in _shown(console)


def test_a_page_shows_escapes() -> None:
    shown = table(["reason"], [["<b>\x1b[2J\x9b\u202e"]])
    assert r"&lt;b&gt;\x1b[2J\x9b\u202e" in shown


def test_the_traceback_of_a_task_drives_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    console = _console()
    monkeypatch.setattr(commands_console, "err", console)
    with pytest.raises(BaseException, match="3"), commands_console.input_errors():
        raise TaskError("of the task") from ValueError(f"{HOSTILE} hub_token=canary")
    assert r"\x1b[2J\x1b]0;title\x07" in _shown(console)
    assert not any(mark in _shown(console) for mark in "\x1b\x9b\r\x07\u202e")
    assert "canary" not in _shown(console)
