"""The fault matrix as a table: every kind of fault, and how its tests ended.

A test names its kind with `@pytest.mark.fault(6, "kill -9 of the driver")` and is called
`test_row_06_...`. What must not live here: the tests.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.chaos.kill_cases import SEED

REPORT = "CHAOS_REPORT"
"""The environment variable that names a file for the table."""

ROWS = {
    1: "kill -9 of a trial's process in a step, between two micro-batches, in an evaluation",
    2: "kill -9 at each write, sync and rename of a save",
    3: "kill -9 between commit and report, report and outbox, send and acknowledgement",
    4: "kill -9 of a node's raylet",
    5: "Ray's head dies",
    6: "kill -9 of the driver",
    7: "Ctrl-C once",
    8: "Ctrl-C twice",
    9: "SIGTERM",
    10: "SIGTERM with a grace period shorter than a save",
    11: "a full disk",
    12: "read-only storage",
    13: "a checkpoint truncated, bit-flipped, with a zeroed page",
    14: "every checkpoint of a trial damaged",
    15: "the spec's file empty, truncated, flipped",
    16: "the ledger locked or damaged",
    17: "the tracking server down for a minute",
    18: "the tracking server answers 500 or 429, late, or drops the connection after its commit",
    19: "the tracking server down all the time",
    20: "PostgreSQL restarts in the middle of a write",
    21: "the object store down; an upload left unfinished",
    22: "a loss that is NaN or infinite",
    23: "infinite gradients in fp16",
    24: "out of memory",
    25: "a neighbour uses more than its share of a GPU",
    26: "the data set missing or changed",
    27: "a second driver on the same sweep",
    28: "SIGSTOP, then SIGCONT",
    29: "the clock jumps by an hour",
    30: "code or configuration changed before a resume",
    31: "retries spent; all trials fail",
    32: "a network partition, or 200 ms of delay",
    33: "power loss: writes that were not synced are gone",
    34: "three faults, one after the other",
    35: "the tracking store loses what it was told: rolled back, emptied",
    36: "buffers that a model registers or resizes in training",
    37: "a worker lost between two trials, or left in a directory that is gone",
    38: "kill -9 of a worker with a child that lives on",
    39: "a trial that hangs",
    40: "a rank of a trial is killed in forward, in the exchange, in an evaluation, in a save",
    41: "the first rank of a trial is killed",
    42: "a rank of a trial is stopped for longer than a step may take",
    43: "the node of one rank of a trial is lost",
    44: "a rank that starts slowly; what is left of a trial's ranks",
    45: "a bit flipped in a file of a checkpoint in shards",
    46: "a rank of a trial is killed between its shard and the manifest of the checkpoint",
    47: "a process of the local Ray killed or stopped: raylet, gcs_server, an agent",
    48: "the root is copied or moved, and its sweep resumed there",
    49: "globals, class attributes and caches that trials change, in a sweep that is killed",
    50: "another user, who may only read, locks a database of the sweep",
    51: "a node, or the driver's machine, is about to be taken away, and says so",
}
_PROPERTY = "fault"
_PROMISE = re.compile(r"^\| (\d+) \|.*\| (`test_\w+`(?:, `test_\w+`)*) \|$", re.MULTILINE)
_MAY_BE_SKIPPED = {25, 32}
"""Rows whose tests may be skipped: no GPU is there, or no network namespace can be made."""
MATRIX = Path(__file__).parents[2] / "docs" / "fault-matrix.md"
"""The page whose table names the tests of each row."""
_WHOLE = "chaos or fault"
"""The mark expression with which all of the matrix runs."""
_MARK = re.compile(r"@pytest\.mark\.fault\(\s*(\d+),.*?\ndef (test_\w+)\(", re.DOTALL)


def find_tests(directory: Path) -> dict[int, list[str]]:
    """Which tests of a directory are of which row, read from their source."""
    found: dict[int, list[str]] = defaultdict(list)
    for path in sorted(directory.rglob("test_*.py")):
        for row, name in _MARK.findall(path.read_text(encoding="utf-8")):
            found[int(row)].append(name)
    return dict(found)


def promised_tests(page: str) -> dict[int, list[str]]:
    """Return the tests that each row of the page's table names; none: the row is left out."""
    return {int(row): re.findall(r"`(\w+)`", cell) for row, cell in _PROMISE.findall(page)}


class FaultTable:
    """A pytest plugin: gathers how the tests of each row ended, and prints the table."""

    def __init__(self) -> None:
        self.ended: dict[int, list[str]] = defaultdict(list)
        self.cases: dict[str, list[str]] = defaultdict(list)
        self.seconds: dict[int, float] = defaultdict(float)
        self._broken: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note the row of each test.

        Raises:
            pytest.UsageError: There is no such row, or the test's name has another number.
        """
        for item in items:
            for mark in item.iter_markers("fault"):
                row = mark.args[0]
                name = getattr(item, "originalname", item.name)
                if row not in ROWS or not name.startswith(f"test_row_{row:02d}_"):
                    raise pytest.UsageError(
                        f"{item.nodeid} is marked as fault {row}; rows are 1 to {len(ROWS)} and "
                        f"its name must begin with test_row_{row:02d}_"
                    )
                item.user_properties.append((_PROPERTY, row))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember how a test ended; a failed set-up or teardown is a failed test."""
        # With several processes, tests are collected in others than the one with the table.
        row = dict(report.user_properties).get(_PROPERTY)
        if not isinstance(row, int):
            return
        self.seconds[row] += report.duration
        if report.failed or report.skipped or report.when == "call":
            self.ended[row].append(report.outcome)
            self.cases[_name(report.nodeid)].append(report.outcome)

    def result(self, row: int) -> str:
        """`passed`, `failed`, `partly` (some passed, the others were skipped), `skipped` or `not
        run`; the worst end of a row's tests counts.
        """
        ends = self.ended.get(row, [])
        if "failed" in ends:
            return "failed"
        if "passed" in ends:
            return "partly" if "skipped" in ends else "passed"
        return "skipped" if ends else "not run"

    def broken_promises(self, page: str) -> list[str]:
        """Return the tests that the page's table names and of which not every case has passed."""
        return [
            name
            for row, names in promised_tests(page).items()
            for name in names
            if not self._kept(name, {"passed", *(["skipped"] if row in _MAY_BE_SKIPPED else [])})
        ]

    def _kept(self, name: str, ends: set[str]) -> bool:
        cases = self.cases.get(name, [])
        return bool(cases) and ends.issuperset(cases)

    def lines(self) -> list[str]:
        """The table; of a session that ran a few rows only, these."""
        lines = ["row  result    tests  seconds  what happens"]
        whole = len(self.ended) > len(ROWS) / 2
        for row, what in ROWS.items():
            if not (whole or row in self.ended):
                continue
            count, seconds = len(self.ended.get(row, [])), self.seconds.get(row, 0.0)
            lines.append(f"{row:3}  {self.result(row):8}  {count:5}  {seconds:7.1f}  {what}")
        if self._broken:
            lines.append(f"{MATRIX.name} names tests that did not pass: {self._broken}")
        return [*lines, f"CHAOS_SEED={SEED}"]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run of the whole matrix if a test that the page names has not passed."""
        options = session.config.option
        if options.markexpr == _WHOLE and not (options.keyword or options.collectonly):
            self._broken = self.broken_promises(MATRIX.read_text(encoding="utf-8"))
            if self._broken and not hasattr(session.config, "workerinput"):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table, and write it where `CHAOS_REPORT` says."""
        if not self.ended:
            return
        terminalreporter.section("what survives what")
        terminalreporter.write_line("\n".join(self.lines()))
        if report := os.environ.get(REPORT):
            Path(report).write_text("\n".join(self.lines()) + "\n", encoding="utf-8")


def _name(nodeid: str) -> str:
    """The name of a test, without its file and its case."""
    return nodeid.partition("[")[0].rpartition("::")[2]
