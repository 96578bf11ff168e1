"""Which tests show which row of the documents that the project grew from.

    python -m tests.seeds          collects, prints the table, exits with 1 if a row has no test
    python -m tests.seeds --run    runs those tests too; a row whose tests fail, or are all
                                   skipped, is not shown

A test names its rows with `@pytest.mark.seeds("S4")`. What must not live here: the tests.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest

ROWS = {
    "S1": "the order of a step, which no configuration can change",
    "S2": "precision: chosen by the hardware, forced by the configuration",
    "S3": "a scaler for fp16 only; a skipped step advances nothing and is counted",
    "S4": "accumulation equals the large batch",
    "S5": "BatchNorm with accumulation warns and says what to do",
    "S6": "clipping by norm and by value; the norm of each step, the share of clipped ones",
    "S6 histogram": "a histogram of gradient norms",
    "S7": "gradient norm per layer, also where a gradient is missing",
    "S8": "optimizers with their documented defaults, fused where available",
    "S9": "no weight decay on biases and norm layers",
    "S10": "learning-rate schedules",
    "S11": "warmup as a fraction or as a count",
    "S12": "evaluation: mode, no autograd, weighted, separate data",
    "S13": "cross entropy and its variants on raw logits",
    "S14": "metrics are floats; no graph is kept, no step waits for the device",
    "S15": "a checkpoint holds everything that resuming needs",
    "S16": "checkpoints every N steps; last, best and a rolling window; atomic",
    "S16 asynchronous": "training goes on while a checkpoint is written",
    "S17": "a crash in the middle of the third epoch leaves one continuous curve",
    "S18": "a checkpoint of one device resumes on another",
    "S19": "data loading: workers, pinning, prefetching, transfers",
    "S20": "seeds for every generator; deterministic or benchmark mode",
    "S21": "compiling, activation checkpointing, channels last",
    "S22": "health in plain sentences",
    "S23": "time on the device against time in all",
    "S24": "the lab on FashionMNIST",
    "S25": "the spiral with its decision boundary",
    "S26": "transformer defaults on a small language model",
    "S27": "the optimizer's memory, known before the run",
}
_PROPERTY = "seeds"
_MARK = re.compile(r"pytest\.mark\.seeds\(([^)]*)\)")
_MOST = 0.8  # of the rows; a session of a few files stays quiet


def find_tests(directory: Path) -> dict[str, list[str]]:
    """Which files of a directory name which row, read from their source."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(directory.rglob("test_*.py")):
        for rows in _MARK.findall(path.read_text(encoding="utf-8")):
            for row in re.findall(r"'[^']+'|\"[^\"]+\"", rows):
                found[row[1:-1]].append(str(path.relative_to(directory)))
    return dict(found)


class SeedTable:
    """A pytest plugin: gathers the rows of tests, and how these tests ended.

    A session that ran tests of most rows ends with its summary.
    """

    def __init__(self) -> None:
        self.tests: dict[str, list[str]] = defaultdict(list)
        self.unknown: list[str] = []
        self.ended: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note which rows each test names."""
        for item in items:
            rows = [row for mark in item.iter_markers("seeds") for row in mark.args]
            self.unknown += [f"{row} in {item.nodeid}" for row in rows if row not in ROWS]
            self._note(item.nodeid, rows)
            if rows:
                item.user_properties.append((_PROPERTY, rows))

    def _note(self, test: str, rows: list[str]) -> None:
        name = test.partition("[")[0]  # a test with parameters is one test
        for row in rows:
            if name not in self.tests[row]:
                self.tests[row].append(name)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember the worst end of a test's phases and parameters: failed, passed, skipped."""
        # With several processes, tests are collected in others than the one with the table.
        self._note(report.nodeid, dict(report.user_properties).get(_PROPERTY, []))  # type: ignore[arg-type]
        name = report.nodeid.partition("[")[0]
        if report.failed:
            self.ended[name] = "failed"
        elif report.when == "call" and report.passed:
            self.ended[name] = "failed" if self.ended.get(name) == "failed" else "passed"
        else:
            self.ended.setdefault(name, "skipped" if report.skipped else "passed")

    def lines(self) -> list[str]:
        """The table, a row's tests below it."""
        table = []
        for row, title in ROWS.items():
            table.append(f"{row:<17} {title}{'' if self.is_shown(row) else '   <-- NOT SHOWN'}")
            table += [f"{'':<17}   {self.ended.get(t, ''):<8}{t}" for t in self.tests.get(row, ())]
        return table

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how many tests of each row were run, in a session that ran some of most rows."""
        if sum(self._num_run(row) > 0 for row in ROWS) >= _MOST * len(ROWS):
            terminalreporter.section("tests of each row of the seed documents")
            terminalreporter.write_line("\n".join(self.summary()))

    def summary(self) -> list[str]:
        """The table in a few lines: tests of each row, and the rows without a good one."""
        counts = [f"{row}:{self._num_run(row)}" for row in ROWS]
        missing = ", ".join(self.missing) or "none"
        return [*textwrap.wrap(", ".join(counts), 90), f"not shown by this session: {missing}"]

    def _num_run(self, row: str) -> int:
        return sum(test in self.ended for test in self.tests.get(row, ()))

    def is_shown(self, row: str) -> bool:
        """Whether a row has a test and, where tests were run, one passed and none failed."""
        ends = {self.ended.get(test) for test in self.tests.get(row, ())}
        if not self.ended:
            return bool(ends)
        return "passed" in ends and "failed" not in ends

    @property
    def missing(self) -> list[str]:
        """Rows that nothing shows."""
        return [row for row in ROWS if not self.is_shown(row)]


def main(arguments: list[str]) -> int:
    """Print the table; return the exit code."""
    table = SeedTable()
    # The last -m wins: rows are shown by tests of the fault matrix too.
    options = ["-q", "-m", "seeds", "--no-header"]
    if "--run" not in arguments:
        options += ["--collect-only", "-qq"]
    code = pytest.main([*options, "tests"], plugins=[table])
    print("\n".join(["", *table.lines(), ""]))
    for name in table.unknown:
        print(f"there is no row {name}")
    if table.missing:
        print(f"rows that no test shows: {', '.join(table.missing)}")
    ran_well = code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return int(bool(table.missing or table.unknown) or not ran_well)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
