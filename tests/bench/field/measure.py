"""Run each search on each problem to its end, and keep what it showed when.

    python -m tests.bench.field measure --rows FILE [--minutes 10] [--seeds 20] ...

What is in FILE is not measured again. Seeds come one after the other, so that all searches have
equally many. What must not live here: searches, problems, and statistics (`measures.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna

from tests.bench.field.grounds import Ground, ground
from tests.bench.field.played import PlayedSide
from tests.bench.field.process import PeerError, PeerProcess
from tests.bench.field.searches import IN_PROCESS, PROGRAMS, problem
from tests.bench.quality_sweeps import Side, drive, own_seed
from tests.bench.rows_file import Row, add_missing

KEYS = ("problem", "search", "workers", "seed", "configurations", "horizon")
"""What a row is known by."""
_LONGEST = 1800.0
"""Seconds after which one search is given up."""


class Programs:
    """The processes of peers: each starts when it is first needed, and again after it failed."""

    def __init__(self) -> None:
        self._running: dict[str, PeerProcess] = {}

    def begin(self, search: str, about: dict[str, Any]) -> PeerProcess:
        """Return the process of a peer, which begins another problem."""
        if search not in self._running:
            self._running[search] = PROGRAMS[search].start()
        self._running[search].begin(about)
        return self._running[search]

    def end(self, search: str) -> None:
        """End the process of a peer."""
        if process := self._running.pop(search, None):
            process.close()

    def close(self) -> None:
        """End all."""
        for search in list(self._running):
            self.end(search)


class _Timed:
    """A searcher whose suggestions are timed."""

    def __init__(self, searcher: Any) -> None:
        self._suggest = searcher.suggest
        self.on_trial_result = searcher.on_trial_result
        self.on_trial_complete = searcher.on_trial_complete
        self.cpu, self.count = 0.0, 0

    def suggest(self, trial_id: str) -> Any:
        started = time.process_time()
        found = self._suggest(trial_id)
        self.cpu += time.process_time() - started
        self.count += isinstance(found, dict)
        return found


class _TimedSide:
    """A side whose suggestions are timed."""

    def __init__(self, side: Side) -> None:
        self.scheduler, self.fails_at_nan = side.scheduler, side.fails_at_nan
        self.trial, self.reported, self.ended = side.trial, side.reported, side.ended
        self.searcher: Any = _Timed(side.searcher)


def measure(name: str, search: str, workers: int, seed: int, programs: Programs) -> Row:
    """Run one search to its end; returns the path of the regret of what it shows.

    A peer that fails keeps what it showed until then; the row says why.
    """
    where = ground(name)
    meets = where.start(seed)
    drawn = own_seed(search, seed)
    process: PeerProcess | None = None
    row: Row = {"path": [], "spent": 0, "failed": None}
    timed: _TimedSide | None = None
    try:
        if search in PROGRAMS:
            about = problem(where, workers, drawn, PROGRAMS[search].options)
            process = programs.begin(search, about)
            side: Side = PlayedSide(process, where, meets)
        else:
            side = IN_PROCESS[search](where, meets, workers, drawn)
        timed = _TimedSide(side)
        _play(row, timed, where, meets, workers)
    except (PeerError, subprocess.CalledProcessError) as error:
        row["failed"] = str(error).strip().splitlines()[-1][:300]
        programs.end(search)
    asked = timed.searcher.count if timed is not None else 0
    cpu = timed.searcher.cpu if timed is not None else 0.0
    row["asked"] = asked
    row["ask_seconds"] = (cpu + (process.cpu if process else 0.0)) / max(asked, 1)
    return row


def _play(row: Row, side: Any, where: Ground, meets: Any, workers: int) -> None:
    lowest, deadline = float("inf"), time.monotonic() + _LONGEST
    reports = drive(side, meets.train, epochs=where.epochs, at_once=workers, seconds=meets.seconds)
    for spent, report in enumerate(reports, 1):
        row["spent"] = spent
        if report.loss < lowest:
            lowest = report.loss
            regret = min(meets.regret(report.params), 1e9)
            row["path"].append((spent, round(report.clock, 4), regret))
        if spent >= where.horizon:
            return
        if time.monotonic() > deadline:
            raise PeerError(f"given up after {_LONGEST:.0f} s")


def fill(
    rows: Path,
    problems: Sequence[str],
    searches: Sequence[str],
    workers: Sequence[int],
    seeds: int,
    *,
    seconds: float = float("inf"),
) -> None:
    """Measure what is missing in a file of rows, seed by seed, for so many seconds."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    keys = [
        (name, search, num, seed, ground(name).size, ground(name).horizon)
        for seed, num, name, search in itertools.product(range(seeds), workers, problems, searches)
    ]
    with contextlib.closing(Programs()) as programs:

        def measured(name: str, search: str, num: int, seed: int, *_known: Any) -> Row:
            started = time.perf_counter()
            row = measure(name, search, num, seed, programs)
            row["seconds"] = round(time.perf_counter() - started, 1)
            if row["failed"]:
                print(f"{search}, {name}, seed {seed}: {row['failed']}", file=sys.stderr)
            return row

        add_missing(rows, KEYS, keys, measured, seconds=seconds)
