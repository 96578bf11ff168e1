"""Show a running sweep: a live table on a terminal, plain lines elsewhere.

What must not live here: anything that a sweep needs to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from redaction.escapes import printable
from sweeps.commands.plain_console import redraws
from sweeps.commands.trial_table import trial_table
from sweeps.config.spec import SweepSpec
from sweeps.formatting import format_best, format_duration, format_number, joined
from sweeps.results.observer import TrialProgress
from sweeps.results.remaining_time import DeliveryEstimate
from sweeps.results.sweep_progress import SweepProgress, best_with_value

if TYPE_CHECKING:
    from sweeps.ledger.attributes import Role
    from sweeps.ledger.trials import TrialSummary


def view_on(
    console: Console,
    spec: SweepSpec,
    before: Sequence[TrialSummary] = (),
    *,
    total: int | None = None,
    delivery: DeliveryEstimate | None = None,
) -> ProgressTable | PlainLines:
    """Return a live table if the console can redraw it in place, else plain lines.

    Args:
        console: Where to show it.
        spec: The sweep.
        before: The trials that earlier drivers have started.
        total: The number of trials of the sweep; None: that of the spec.
        delivery: Estimates how long the delivery takes after the training.
    """
    progress = SweepProgress(spec, before, total=total, delivery=delivery)
    return ProgressTable(console, progress) if redraws(console) else PlainLines(console, progress)


class ProgressTable:
    """A table of the running, the best and the newest trials, redrawn four times a second."""

    def __init__(self, console: Console, progress: SweepProgress) -> None:
        self._console = console
        self._progress = progress
        self._spec = progress.spec
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4)

    def __enter__(self) -> ProgressTable:
        self._live.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._progress.is_stopping |= error is not None
        self._live.stop()

    def started(
        self,
        number: int,
        params: Mapping[str, Any],
        attempt: int,
        role: Role = "search",
        origin: int | None = None,
        step: int | None = None,
    ) -> None:
        del attempt
        self._progress.started(number, params, role, origin)
        if step:  # above the table
            self._console.print(f"trial {number} resumes at step {step}", soft_wrap=True)

    def reported(self, progress: TrialProgress) -> None:
        self._progress.reported(progress)

    def paused(self, number: int, value: float | None) -> None:
        del value
        self._progress.ended(number, "waiting")

    def promoted(self, number: int) -> None:
        self._progress.promoted(number)

    def warned(self, number: int, sentence: str) -> None:
        _warn(self._console, number, sentence)  # above the table

    def ended(
        self, number: int, state: str, value: float | list[float] | None, reason: str | None
    ) -> None:
        del value, reason
        self._progress.ended(number, state)

    def stopping(self) -> None:
        self._progress.is_stopping = True

    def render(self) -> Group:
        """Return the table, the best trial so far, and the remaining time."""
        summary = Text(self._summary(), style="bold")
        rows, size = self._progress.rows, self._console.size
        if not rows:
            return Group(summary)
        taken = len(summary.wrap(self._console, size.width)) + 1  # Rich keeps the last line free
        table = trial_table(
            rows,
            self._spec,
            self._progress.durations(),
            width=size.width,
            height=size.height - taken,
            live=True,
        )
        return Group(*table, summary)

    def _summary(self) -> str:
        progress = self._progress
        elapsed = format_duration(progress.elapsed)
        parts = [self._spec.name]
        if progress.rows:
            parts.append(f"{progress.num_finished}/{progress.total} trials")
        if found := best_with_value(progress.rows, self._spec):
            best, value = found
            shown = f"{format_number(value)} (trial {best.number})"
            parts.append(f"best {self._spec.metrics[0]} {shown}")
        if progress.is_stopping:
            parts.append("stopping")
        elif progress.is_starting:
            parts.append("starting workers")
        return " · ".join([*parts, elapsed, *_left(progress)])


def _left(progress: SweepProgress) -> list[str]:
    left = progress.seconds_left()
    return [] if left is None else [f"about {format_duration(left)} left"]


class PlainLines:
    """One line per event, for logs and pipes, with the time since the start."""

    def __init__(self, console: Console, progress: SweepProgress) -> None:
        self._console = console
        self._progress = progress
        self._spec = progress.spec

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def started(
        self,
        number: int,
        params: Mapping[str, Any],
        attempt: int,
        role: Role = "search",
        origin: int | None = None,
        step: int | None = None,
    ) -> None:
        self._progress.started(number, params, role, origin)
        again = f" (attempt {attempt})" if attempt > 1 else ""
        if step is not None:
            again += f", resumes at step {step}" if step else ", from the beginning"
        seed = f", a further seed of trial {origin}" if role == "repeat" else ""
        self._print(f"trial {number} started{again}{seed}: {joined(params)}")

    def reported(self, progress: TrialProgress) -> None:
        self._progress.reported(progress)
        names = (*self._spec.metrics, "train/lr", "train/grad_norm")
        shown = {name: progress.metrics[name] for name in names if name in progress.metrics}
        budget = self._spec.budget
        self._print(
            f"trial {progress.number} {budget.report_word} {progress.epoch}/{budget.reports}: "
            f"{joined(shown)}"
        )

    def paused(self, number: int, value: float | None) -> None:
        self._progress.ended(number, "waiting")
        shown = "" if value is None else f", {self._value(value)}"
        self._print(f"trial {number} waits for its promotion{shown}")

    def promoted(self, number: int) -> None:
        self._progress.promoted(number)
        self._print(f"trial {number} promoted")

    def warned(self, number: int, sentence: str) -> None:
        _warn(self._console, number, sentence)

    def ended(
        self, number: int, state: str, value: float | list[float] | None, reason: str | None
    ) -> None:
        self._progress.ended(number, state)
        shown = "" if value is None else f", {self._value(value)}"
        why = f": {reason}" if reason else ""
        count = f"{self._progress.num_finished}/{self._progress.total} trials"
        self._print(f"trial {number} {state}{shown}{why} ({count})")

    def stopping(self) -> None:
        self._progress.is_stopping = True

    def _value(self, value: float | list[float]) -> str:
        return format_best(self._spec.metrics, value, final=self._spec.select == "final")

    def _print(self, line: str) -> None:
        elapsed = format_duration(self._progress.elapsed)
        parts = [printable(line), elapsed, *_left(self._progress)]
        self._console.print(" · ".join(parts), soft_wrap=True)


def _warn(console: Console, number: int, sentence: str) -> None:
    line = printable(f"trial {number}: {sentence}")
    console.print(line, style="yellow", soft_wrap=True)
