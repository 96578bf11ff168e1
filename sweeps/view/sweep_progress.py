"""Follow a running sweep: its trials, what they print, and how long it still takes.

What must not live here: printing, a table's layout (`cli`), and writing a trial's log
(`trainable.processes.trial_log`).
"""

from __future__ import annotations

import codecs
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from redaction.escapes import visible
from sweeps.formatting import format_best
from sweeps.ledger.attributes import COUNTED, Role
from sweeps.ledger.over_seeds import alone, missing_seeds, state_of
from sweeps.ledger.trials import ENDINGS, TrialRecord, TrialSummary, has_result, of_search
from sweeps.spec.space import configured
from sweeps.spec.spec import SweepSpec
from sweeps.stopping.halving import SuccessiveHalving
from sweeps.stopping.rule import make_pausing_rule
from sweeps.view.observer import TrialProgress, TrialStart
from sweeps.view.sweep_view import SweepView
from trainable.processes.trial_log import RANK_LOGS, TRIAL_LOG
from trainable.store.regular_files import LARGEST_TEXT, open_regular


@dataclass
class TrialRow:
    """One trial in a table of a running sweep."""

    number: int
    params: Mapping[str, Any]
    state: str = "running"
    epoch: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last values that are known; `best/<metric>` is the best value of the first metric."""
    seconds: float | None = 0.0
    """For how long workers trained it, without the current one; None: unknown."""
    since: float | None = None
    """When the current worker began, in monotonic seconds; None: no worker trains it."""
    role: Role = "search"
    """Why it exists."""
    origin: int | None = None
    """The trial whose point it trains; None for a trial of the search."""
    changed: int = 0
    """Orders the trials by their last start, pause or end."""

    @property
    def is_extra(self) -> bool:
        """Whether it trains the point of another trial."""
        return self.role != "search"

    def duration(self, now: float) -> float | None:
        """Return for how long workers have trained it."""
        return self.seconds if self.since is None else (self.seconds or 0.0) + now - self.since


def row_of(record: TrialSummary, spec: SweepSpec, state: str) -> TrialRow:
    """Return the row of a trial as the ledger has it."""
    own = alone(record)
    metrics = dict(zip(spec.reported, record.judged, strict=False))
    metrics |= zip(_names(spec), own.judged, strict=False)
    if isinstance(record, TrialRecord) and record.reports:
        metrics[spec.metrics[0]] = record.reports[max(record.reports)]
    params = configured(spec.space, record.best_params)
    return TrialRow(
        record.number,
        params,
        state,
        record.epoch,
        metrics,
        record.seconds,
        role=record.role,
        origin=record.origin,
        changed=record.number,
    )


def best_name(spec: SweepSpec) -> str:
    """Return the name under which a trial reports its value of the first metric."""
    return spec.metrics[0] if spec.select == "final" else f"best/{spec.metrics[0]}"


def _names(spec: SweepSpec) -> list[str]:
    """Return the names under which a trial reports its values of the reported metrics."""
    return [metric if spec.select == "final" else f"best/{metric}" for metric in spec.reported]


def is_feasible(rows: Sequence[TrialRow], spec: SweepSpec) -> bool | None:
    """Return whether the seeds of a configuration, or a trial alone, satisfy all limits so far.

    None without limits, or without a report.
    """
    names, limits = _names(spec), spec.limits
    having = [row.metrics for row in rows if row.metrics.keys() >= {*names}]
    if not limits or not having:
        return None
    each = (spec.repeats.combine([metrics[name] for metrics in having]) for name in names)
    return not limits.violation([*each])


_OF_THE_LOOP = ("best/", "grad_norm/", "memory/", "num_", "param/", "train/")


def metrics_beside(metrics: Iterable[str], spec: SweepSpec) -> list[str]:
    """Return the metrics that a task reports beside those that the sweep compares."""
    known = {*spec.metrics, "epoch", spec.budget.report_word}
    return [one for one in metrics if one not in known and not one.startswith(_OF_THE_LOOP)]


def ended_line(spec: SweepSpec, number: int, state: str, value: Any, reason: str | None) -> str:
    """Return in one line how a trial ended, with its value and why."""
    shown = ""
    if value is not None:
        shown = f", {format_best(spec.metrics, value, final=spec.select == 'final')}"
    return f"trial {number} {state}{shown}{f': {reason}' if reason else ''}"


def best_of(rows: Sequence[TrialRow], spec: SweepSpec) -> TrialRow | None:
    """Return the trial with the best value so far of the first metric; see `ledger.ranking`."""
    found = best_with_value(rows, spec)
    return found and found[0]


def best_with_value(rows: Sequence[TrialRow], spec: SweepSpec) -> tuple[TrialRow, float] | None:
    """Return the best trial and its value; with `repeats`, the first seed of a configuration."""
    name, sign = best_name(spec), 1 if spec.modes[0] == "min" else -1
    if spec.repeats.seeds > 1:
        groups = [
            (mine[0], [row.metrics[name] for row in mine if name in row.metrics])
            for mine in _seeds(rows).values()
            if state_of([row.state for row in mine], spec.repeats.seeds) == "complete"
            and is_feasible(mine, spec) is not False
        ]
        values = [(row, spec.repeats.combine(each)) for row, each in groups if each]
    else:
        values = [
            (row, row.metrics[name])
            for row in rows
            if row.role in COUNTED
            and _counts(row, spec)
            and name in row.metrics
            and is_feasible([row], spec) is not False
        ]
    finite = [one for one in values if math.isfinite(one[1])]
    return min(finite, key=lambda one: (sign * one[1], one[0].state != "complete"), default=None)


def _counts(row: TrialRow, spec: SweepSpec) -> bool:
    """Return whether a trial counts among the best so far; see `Trial.has_result_so_far`."""
    unended = row.state not in ENDINGS and spec.select == "checkpoint"
    return unended or has_result(row.state, spec.select)


def _seeds(rows: Sequence[TrialRow]) -> dict[int, list[TrialRow]]:
    """Return the seeds of each configuration, the first one first."""
    found: dict[int, list[TrialRow]] = {}
    for row in sorted(rows, key=lambda row: row.number):
        if row.role == "repeat" and row.origin is not None:
            found.setdefault(row.origin, []).append(row)
        elif row.role == "search":
            found[row.number] = [row]
    return found


def in_order(rows: Sequence[TrialRow], best: TrialRow | None) -> list[TrialRow]:
    """Return the running trials, then the best one if it is none of these, then the newest."""
    running = sorted((r for r in rows if r.state == "running"), key=lambda row: row.number)
    others = [row for row in rows if row.state != "running" and row is not best]
    apart = [best] if best and best.state != "running" else []
    return [*running, *apart, *sorted(others, key=lambda row: -row.changed)]


class SweepProgress:
    """The trials of a sweep, by the events of its driver.

    It counts with each event: a line of progress costs the same however many trials there are.
    """

    def __init__(
        self,
        spec: SweepSpec,
        before: Sequence[TrialSummary] = (),
        *,
        total: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self._num_configurations = spec.num_trials
        self._total = spec.max_runs if total is None else total
        self._clock = clock
        self._start = clock()
        self._first_start: float | None = None
        self._rows = {
            one.number: row_of(one, spec, one.state if one.finished else "waiting")
            for one in sorted(before, key=lambda one: one.finish_order)
        }
        for changed, row in enumerate(self._rows.values()):
            row.changed = changed
        self._num_others = sum(row.role not in ("search", "repeat") for row in self._rows.values())
        if total is not None:
            self._num_others = total - self._num_of_search()
        self.num_finished = 0
        """How many trials have ended."""
        self._epochs = 0
        self._ended: Counter[int] = Counter()  # of the search, by the epochs that they trained
        self._open: dict[int, TrialRow] = {}
        for row in self._rows.values():
            self._count(row)
        self._epochs_before = self._epochs
        self._changes = len(self._rows)
        self.is_starting = True
        """Whether no trial has started under this driver."""
        self.is_stopping = False
        """Whether the sweep ends without its remaining trials."""

    @property
    def total(self) -> int:
        """How many trials the sweep has when it is complete; see `count_trials`."""
        if self.spec.repeats.seeds == 1:
            return self._total
        return self._num_others + self._num_of_search()  # which become fewer: see `count_trials`

    def _num_of_search(self) -> int:
        """Return how many trials the search has when it is complete, with all seeds."""
        seeds, groups = self.spec.repeats.seeds, _seeds(self.rows).values()
        missing = sum(missing_seeds([row.state for row in mine], seeds) for mine in groups)
        known = sum(map(len, groups))
        return known + missing + seeds * max(0, self._num_configurations - len(groups))

    @property
    def rows(self) -> list[TrialRow]:
        """All trials that have started; a copy, because another thread may add some."""
        return list(self._rows.values())

    @property
    def elapsed(self) -> float:
        """Seconds since this driver began."""
        return self._clock() - self._start

    def row(self, number: int) -> TrialRow:
        """Return the row of a trial."""
        return self._rows[number]

    def durations(self) -> dict[int, float | None]:
        """Return for how long workers have trained each trial."""
        now = self._clock()
        return {row.number: row.duration(now) for row in self.rows}

    def started(self, start: TrialStart) -> None:
        """A worker starts a trial, or starts it again."""
        row = self._row_of(start.number)
        row.params = start.params
        with self._changing(start.number):
            row.role, row.origin = start.role, start.origin
        self._run(start.number)

    def reported(self, progress: TrialProgress) -> None:
        """A trial reported metrics."""
        with self._changing(progress.number) as row:
            row.epoch, row.metrics = progress.epoch, progress.metrics

    def promoted(self, number: int) -> None:
        """A paused trial resumes."""
        self._run(number)

    def ended(self, number: int, state: str) -> None:
        """A trial has no worker any more: it ended, waits, or was interrupted."""
        self._row_of(number)
        self._change(number, state)

    def seconds_left(self) -> float | None:
        """Return how long the sweep probably still trains.

        None before the first epoch, after the last trial, and when the sweep stops early.
        """
        done = self._epochs - self._epochs_before
        rows, ended = list(self._open.values()), self._ended.copy()  # another thread may add some
        unfinished = [row.epoch for row in rows if not row.is_extra]
        finishing = [row.epoch for row in rows if row.is_extra]
        num_unstarted = max(self.total - len(self._rows), 0)
        if self.is_stopping or done <= 0 or not (unfinished or finishing or num_unstarted):
            return None
        left = epochs_left(self.spec, ended, unfinished, num_unstarted, finishing)
        since = self._start if self._first_start is None else self._first_start
        return left * (self._clock() - since) / done

    def _run(self, number: int) -> None:
        self._change(number, "running")
        self.is_starting = False
        if self._first_start is None:  # before, Ray started its workers
            self._first_start = self._clock()

    def _change(self, number: int, state: str) -> None:
        now = self._clock()
        with self._changing(number) as row:
            row.seconds = row.duration(now)
            row.state, row.since = state, now if state == "running" else None
        self._changes += 1
        row.changed = self._changes

    def _row_of(self, number: int) -> TrialRow:
        if number not in self._rows:
            self._rows[number] = TrialRow(number, {})
            self._count(self._rows[number])
        return self._rows[number]

    @contextmanager
    def _changing(self, number: int) -> Iterator[TrialRow]:
        """Count a trial anew after its epochs or its state have changed."""
        row = self._rows[number]
        self._count(row, -1)
        yield row
        self._count(row)

    def _count(self, row: TrialRow, sign: int = 1) -> None:
        self._epochs += sign * row.epoch
        if row.state not in ENDINGS:
            self._open[row.number] = row
            return
        self._open.pop(row.number, None)
        self.num_finished += sign
        if not row.is_extra:
            self._ended[row.epoch] += sign


def epochs_left(
    spec: SweepSpec,
    ended: Mapping[int, int],
    unfinished: Sequence[int],
    num_unstarted: int,
    finishing: Sequence[int] = (),
) -> float:
    """Return how many epochs the sweep probably still trains."""
    budget = spec.budget.reports
    whole_trials = sum(budget - epoch for epoch in finishing)
    pausing = make_pausing_rule(spec)
    if isinstance(pausing, SuccessiveHalving):  # the trials that end first are the longest
        whole = _epochs_of_halving(pausing, budget)
        num_ended, done = _total(ended)
        most = (num_ended + len(unfinished) + num_unstarted) * whole
        return max(most - done - sum(unfinished), 0.0) + whole_trials
    if pausing is not None:
        ended = {}  # a population trains to the end
    started = sum(_expected(epoch, ended, budget) - epoch for epoch in unfinished)
    return whole_trials + started + num_unstarted * _expected(0, ended, budget)


def _expected(epoch: int, ended: Mapping[int, int], budget: int) -> float:
    """Return how many epochs a trial trains that has trained some already."""
    number, epochs = _total({one: count for one, count in ended.items() if one > epoch})
    return epochs / number if number else float(max(budget, epoch))


def _total(ended: Mapping[int, int]) -> tuple[int, int]:
    """Return how many trials have ended, and how many epochs they trained."""
    return sum(ended.values()), sum(epochs * count for epochs, count in ended.items())


def _epochs_of_halving(rule: SuccessiveHalving, budget: int) -> float:
    """Return how many epochs a trial trains on average."""
    bounds = [0, *rule.rungs, budget]
    lengths = (end - start for start, end in pairwise(bounds))
    shares = (float(rule.reduction) ** -index for index in range(len(bounds)))
    return sum(length * share for length, share in zip(lengths, shares, strict=False))


def seconds_left(view: SweepView) -> float | None:
    """Return how long a sweep that another process runs probably still trains.

    None before its first epochs, and if all of its trials have ended.
    """
    searched = of_search(view.records)
    ended = Counter(record.epoch for record in searched if record.finished)
    unfinished = [record.epoch for record in searched if not record.finished]
    finishing = [r.epoch for r in view.records if r.role != "search" and not r.finished]
    done = _total(ended)[1] + sum(unfinished)
    num_unstarted = view.num_left - len(unfinished) - len(finishing)
    if not (done and view.ledger.seconds and view.num_left):
        return None
    left = epochs_left(view.spec, ended, unfinished, num_unstarted, finishing)
    return left * view.ledger.seconds / done


_POLL_SECONDS = 0.5


def trial_output(view: SweepView, number: int, *, follow: bool) -> Iterator[str]:
    """Yield what a trial printed, rank by rank: prints, warnings, how its process ended."""
    view.record(number)

    def is_open() -> bool:
        now = SweepView(view.paths)
        return now.state == "running" and not now.record(number).finished

    directory = view.paths.trial(number)
    return _of_ranks(directory, _texts(directory / TRIAL_LOG, lambda: follow and is_open()))


def _of_ranks(directory: Path, first: Iterator[str]) -> Iterator[str]:
    """Yield the output of the first rank, then that of each further one below its number."""
    yield from first
    logs = {int(path.name.split(".")[1][4:]): path for path in directory.glob(RANK_LOGS)}
    for rank, path in sorted(logs.items()):
        if path.stat().st_size:
            yield f"[rank {rank}]\n"
            yield from _texts(path, lambda: False)


def _texts(path: Path, goes_on: Callable[[], bool]) -> Iterator[str]:
    """Yield the content of a growing file, with control characters made visible."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    position = 0
    while True:
        is_last = not goes_on()  # asked first, so that the last lines are read after the end
        if path.exists():
            with os.fdopen(open_regular(path, limit=LARGEST_TEXT), "rb") as file:
                if os.fstat(file.fileno()).st_size < position:
                    position = 0
                    yield "[the log was shortened; it begins again]\n"
                file.seek(position)
                content = file.read()
            position += len(content)
            yield visible(decoder.decode(content))
        if is_last:
            return
        time.sleep(_POLL_SECONDS)
