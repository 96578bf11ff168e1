"""Show a running sweep: a live table on a terminal, plain lines elsewhere.

What must not live here: anything that a sweep needs to run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from redaction.escapes import printable
from sweeps.commands.plain_console import redraws
from sweeps.commands.tables import titles
from sweeps.config.spec import SweepSpec
from sweeps.formatting import (
    format_best,
    format_duration,
    format_number,
    format_parameter,
    joined,
)
from sweeps.ledger.reader import has_result
from sweeps.results.observer import TrialProgress

_STYLES = {
    "running": "cyan",
    "complete": "green",
    "pruned": "dim",
    "failed": "red",
    "interrupted": "yellow",
}


def view_on(
    console: Console,
    spec: SweepSpec,
    *,
    finished: int = 0,
    total: int | None = None,
    best: tuple[int, float] | None = None,
) -> ProgressTable | PlainLines:
    """Return a live table if the console can redraw it in place, else plain lines.

    Args:
        finished: How many trials had ended before this driver started.
        total: The number of trials of the sweep; None: that of the spec.
        best: The best trial that had ended before, and its value.
    """
    if redraws(console):
        return ProgressTable(console, spec, finished=finished, total=total, best=best)
    return PlainLines(console, spec, finished=finished, total=total)


@dataclass
class _Row:
    params: Mapping[str, Any]
    state: str = "running"
    epoch: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    started: float = 0.0
    seconds: float | None = None


class ProgressTable:
    """A table of the running and the best trials, redrawn four times a second.

    Args:
        spec: The sweep.
        finished: How many trials had ended before this driver started.
        total: The number of trials of the sweep; None: that of the spec.
        best: The best trial that had ended before, and its value.
    """

    def __init__(
        self,
        console: Console,
        spec: SweepSpec,
        *,
        finished: int = 0,
        total: int | None = None,
        best: tuple[int, float] | None = None,
    ) -> None:
        self._console = console
        self._spec = spec
        self._finished_before = finished
        self._total = spec.trials if total is None else total
        self._best_before = best
        self._rows: dict[int, _Row] = {}
        self._start = time.monotonic()
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4)

    def __enter__(self) -> ProgressTable:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def started(self, number: int, params: Mapping[str, Any], attempt: int) -> None:
        del attempt
        self._rows[number] = _Row(params, started=time.monotonic())

    def reported(self, progress: TrialProgress) -> None:
        row = self._rows[progress.number]
        row.epoch, row.metrics = progress.epoch, progress.metrics

    def paused(self, number: int, value: float | None) -> None:
        del value
        row = self._rows[number]
        row.state, row.seconds = "waiting", time.monotonic() - row.started

    def promoted(self, number: int) -> None:
        row = self._rows[number]
        row.state, row.started = "running", time.monotonic() - (row.seconds or 0.0)
        row.seconds = None

    def warned(self, number: int, sentence: str) -> None:
        _warn(self._console, number, sentence)  # above the table

    def ended(
        self, number: int, state: str, value: float | list[float] | None, reason: str | None
    ) -> None:
        del value, reason
        # A trial that was only paused in an earlier driver has no row yet.
        row = self._rows.setdefault(number, _Row({}, seconds=0.0))
        seconds = time.monotonic() - row.started if row.seconds is None else row.seconds
        row.state, row.seconds = state, seconds

    def render(self) -> Group:
        """Return the table, the best trial so far, and the remaining time."""
        keys = self._searched()
        rates = [name for name in ("train/lr", "train/grad_norm") if name not in self._omitted]
        first = ["trial", "state"]
        numbers = ["epoch", *self._spec.metrics, "best"]
        last = [*(name.removeprefix("train/") for name in rates), "time"]
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in first:
            table.add_column(column)
        for column in (*numbers, *titles(keys, [*first, *numbers, *last]), *last):
            table.add_column(column, justify="right")
        best, shown = self._best(), self._shown()
        for number in shown:
            row = self._rows[number]
            seconds = row.seconds if row.seconds is not None else time.monotonic() - row.started
            table.add_row(
                str(number),
                Text(row.state, style=_STYLES.get(row.state, "")),
                f"{row.epoch}/{self._spec.budget.epochs}",
                *(
                    format_number(row.metrics.get(name))
                    for name in (*self._spec.metrics, self._best_name)
                ),
                *(format_parameter(row.params, key) for key in keys),
                *(format_number(row.metrics.get(name)) for name in rates),
                format_duration(seconds),
                style="bold" if best is not None and number == best[0] else "",
            )
        hidden = [
            f"{count} more {what}{'s' * (count > 1)}"
            for count, what in (
                (len(self._rows) - len(shown), "trial"),
                (len(self._spec.space) - len(keys), "parameter"),
            )
            if count
        ]
        more = [Text(f"+ {', '.join(hidden)}", style="dim")] * bool(hidden)
        return Group(table, *more, Text(self._summary(), style="bold"))

    @property
    def _omitted(self) -> set[str]:
        """The rate that is applied says little where it is searched."""
        return {"train/lr"} if "train.optimizer.lr" in self._spec.space else set()

    def _searched(self) -> list[str]:
        """The searched parameters for whose columns the terminal is wide enough."""
        # Trial, state, epoch, best and time with four gaps; each other column brings its own gap.
        width = 5 + 8 + 5 + 6 + 5 + 2 * 4 + (9 + 2) * (2 - len(self._omitted))
        width += sum(2 + max(len(name), 8) for name in self._spec.metrics)
        keys: list[str] = []
        for key in self._spec.space:
            title = titles([*keys, key], [])[-1]
            width += 2 + max(len(title), 9)
            if width > self._console.size.width:
                break
            keys.append(key)
        return keys

    @property
    def _best_name(self) -> str:
        return f"best/{self._spec.metrics[0]}"

    @property
    def _value_name(self) -> str:
        """The metric that holds a trial's value."""
        return self._spec.metrics[0] if self._spec.select == "final" else self._best_name

    def _value(self, number: int) -> float:
        value = self._rows[number].metrics.get(self._value_name)
        worst = float("inf")
        return worst if value is None else value if self._spec.modes[0] == "min" else -value

    def _best(self) -> tuple[int, float] | None:
        """The best trial of this and of earlier drivers, and its value."""
        found = [] if self._best_before is None else [self._best_before]
        found += [
            (number, row.metrics[self._value_name])
            for number, row in list(self._rows.items())
            if has_result(row.state, self._spec.select) and self._value_name in row.metrics
        ]
        choose = min if self._spec.modes[0] == "min" else max
        return choose(found, key=lambda one: one[1], default=None)

    def _shown(self) -> list[int]:
        """The running trials, then the best others, as many as fit on the terminal."""
        rows = list(self._rows.items())  # a copy: the drawing thread reads while trials are added
        running = [n for n, row in rows if row.state == "running"]
        others = sorted((n for n, row in rows if row.state != "running"), key=self._value)
        room = max(3, self._console.size.height - 5 - len(running))
        return running + others[:room]

    def _summary(self) -> str:
        if not self._rows:
            waited = format_duration(time.monotonic() - self._start)
            return f"{self._spec.name} · starting workers · {waited}"
        done = [
            n
            for n, row in list(self._rows.items())
            if row.state in ("complete", "pruned", "failed")
        ]
        elapsed = time.monotonic() - self._start
        parts = [self._spec.name, f"{self._finished_before + len(done)}/{self._total} trials"]
        if best := self._best():
            number, value = best
            parts.append(f"best {self._spec.metrics[0]} {format_number(value)} (trial {number})")
        parts.append(format_duration(elapsed))
        left = self._total - self._finished_before - len(done)
        if done and left > 0:
            parts.append(f"about {format_duration(elapsed / len(done) * left)} left")
        return " · ".join(parts)


class PlainLines:
    """One line per event, for logs and pipes."""

    def __init__(
        self, console: Console, spec: SweepSpec, *, finished: int = 0, total: int | None = None
    ) -> None:
        self._console = console
        self._spec = spec
        self._finished = finished
        self._total = spec.trials if total is None else total

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def started(self, number: int, params: Mapping[str, Any], attempt: int) -> None:
        again = f" (attempt {attempt})" if attempt > 1 else ""
        self._print(f"trial {number} started{again}: {joined(params)}")

    def reported(self, progress: TrialProgress) -> None:
        names = (*self._spec.metrics, "train/lr", "train/grad_norm")
        shown = {name: progress.metrics[name] for name in names if name in progress.metrics}
        self._print(
            f"trial {progress.number} epoch {progress.epoch}/{self._spec.budget.epochs}: "
            f"{joined(shown)}"
        )

    def paused(self, number: int, value: float | None) -> None:
        shown = "" if value is None else f", {self._value(value)}"
        self._print(f"trial {number} waits for its promotion{shown}")

    def promoted(self, number: int) -> None:
        self._print(f"trial {number} promoted")

    def warned(self, number: int, sentence: str) -> None:
        _warn(self._console, number, sentence)

    def ended(
        self, number: int, state: str, value: float | list[float] | None, reason: str | None
    ) -> None:
        self._finished += state != "interrupted"
        shown = "" if value is None else f", {self._value(value)}"
        why = f": {reason}" if reason else ""
        self._print(f"trial {number} {state}{shown}{why} ({self._finished}/{self._total} trials)")

    def _value(self, value: float | list[float]) -> str:
        return format_best(self._spec.metrics, value, final=self._spec.select == "final")

    def _print(self, line: str) -> None:
        self._console.print(printable(line), soft_wrap=True)


def _warn(console: Console, number: int, sentence: str) -> None:
    line = printable(f"trial {number}: {sentence}")
    console.print(line, style="yellow", soft_wrap=True)
