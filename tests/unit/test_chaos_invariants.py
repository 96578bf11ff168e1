"""The checks of the fault matrix: each finds its violation and names the place."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.chaos.fault_table import MATRIX, ROWS, FaultTable, find_tests
from tests.chaos.invariants import (
    Ended,
    assert_points,
    assert_prints_resume_command,
    assert_states,
    assert_trials,
)
from tests.chaos.outcome import Outcome
from tests.chaos.tracking_service import Run


def _outcome() -> Outcome:
    trials = [
        {"number": n, "state": s, "params": {"lr": 0.1}, "value": 1.0, "step": 2, "epoch": 1}
        | {"mlflow_run_id": f"run-{n}", "attempts": 1}
        for n, s in enumerate(["complete", "pruned"])
    ]
    points = [("val/loss", 1, 0.5), ("val/loss", 2, float("nan"))]
    tags = {"gradsweep.attempts": "1", "gradsweep.device": "cpu", "gradsweep.precision": "fp32"}
    runs: dict[int | None, list[Run]] = {
        0: [Run("run-0", "FINISHED", {}, dict(tags), Counter(points))],
        1: [Run("run-1", "FINISHED", {}, {**tags, "stopped_by": "asha"}, Counter(points))],
        None: [Run("sweep", "FINISHED")],
    }
    states = {n: {"model": {"weight": torch.tensor([1.0, n])}} for n in range(2)}
    curves = {n: [(1, {"val/loss": 0.5}), (2, {"val/loss": float("nan")})] for n in range(2)}
    return Outcome(trials, {}, states, curves, runs, passes={}, seconds=1.0)


def _assert_u1_to_u3(found: Outcome, reference: Outcome) -> None:
    assert_trials(found, reference)
    assert_states(found, reference)
    assert_points(found, reference)


def _flip_a_bit(found: Outcome) -> None:
    found.states[1]["model"]["weight"].view(torch.int32)[0] ^= 1


def _twice(found: Outcome) -> None:
    found.runs[1][0].points["val/loss", 1, 0.5] += 1


def _twice_with_another_value(found: Outcome) -> None:
    found.runs[1][0].points["val/loss", 1, 0.25] += 1


def _missing(found: Outcome) -> None:
    del found.runs[0][0].points["val/loss", 1, 0.5]


def _row_twice(found: Outcome) -> None:
    found.curves[0].append(found.curves[0][0])


def _lost(found: Outcome) -> None:
    del found.trials[1]


def _second_run(found: Outcome) -> None:
    found.runs[0].append(Run("another", "FINISHED"))


def _untruthful(found: Outcome) -> None:
    found.runs[1][0].status = "KILLED"


def _without_end(found: Outcome) -> None:
    found.trials[0]["state"] = "running"


def _miscounted(found: Outcome) -> None:
    found.runs[1][0].tags["gradsweep.attempts"] = "2"


def _elsewhere(found: Outcome) -> None:
    found.runs[0][0].tags["gradsweep.device"] = "cuda"


def _other_parameters(found: Outcome) -> None:
    found.trials[0]["params"] = {"lr": 0.2}


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (_flip_a_bit, r"U1: .*\ntrial 1 /model/weight"),
        (_twice, r"U2: trial 1 val/loss step 1: 2 times"),
        (_twice_with_another_value, r"U2: trial 1 val/loss step 1: 2 times"),
        (_missing, r"U2: trial 0 val/loss step 1: missing, the reference has 0.5"),
        (_row_twice, r"U2: trial 0 metrics.jsonl: 2 entries are not 3"),
        (_lost, r"U3: trials \[0\] are there, must be \[0, 1\]"),
        (_second_run, r"U3: trial 0 has 2 runs"),
        (_untruthful, r"U3: trial 1 is pruned, its run says KILLED"),
        (_without_end, r"U3: trial 0 has no end: it is running"),
        (_other_parameters, r"U3: trial 0 params: "),
        (_miscounted, r"U3: trial 1 gradsweep.attempts: its run says '2', must be '1'"),
        (_elsewhere, r"U3: trial 0 gradsweep.device: its run says 'cuda', must be 'cpu'"),
    ],
)
def test_each_violation_is_found_and_named(break_it: Callable[[Outcome], None], said: str) -> None:
    reference = _outcome()
    found = copy.deepcopy(reference)
    _assert_u1_to_u3(found, reference)
    break_it(found)
    with pytest.raises(AssertionError, match=said):
        _assert_u1_to_u3(found, reference)


def test_missing_resume_command_is_found() -> None:
    assert_prints_resume_command(Ended(130, "saved\nsweep resume chaos\n", 1.0), 130, "saved")
    for text, code in [("saved\n", 130), ("sweep resume chaos\n", 1)]:
        with pytest.raises(AssertionError, match="U5"):
            assert_prints_resume_command(Ended(code, text, 1.0), 130)


def _report(row: int | None, outcome: str, nodeid: str = "tests/test_x.py::test_x") -> Any:
    return SimpleNamespace(
        nodeid=nodeid,
        user_properties=[("fault", row)] if row else [],
        when="call",
        duration=1.5,
        outcome=outcome,
        failed=outcome == "failed",
        skipped=outcome == "skipped",
    )


def test_table_shows_the_worst_result_of_a_row() -> None:
    table = FaultTable()
    ends = [
        *((6, "passed"), (6, "failed"), (7, "passed"), (None, "failed")),
        *((9, "passed"), (9, "skipped"), (10, "skipped")),
    ]
    for row, outcome in ends:
        table.pytest_runtest_logreport(_report(row, outcome))
    found = [table.result(row) for row in (6, 7, 8, 9, 10)]
    assert found == ["failed", "passed", "not run", "partly", "skipped"]
    (line,) = [line for line in table.lines() if line.startswith("  6 ")]
    assert line.split()[:4] == ["6", "failed", "2", "3.0"]


def test_table_of_few_rows_is_partial_and_of_most_is_whole() -> None:
    table = FaultTable()
    table.ended |= {6: ["passed"], 7: ["failed"]}
    assert [line.split()[0] for line in table.lines()[1:-1]] == ["6", "7"]
    table.ended |= {row: ["passed"] for row in range(1, 30)}
    assert [int(line.split()[0]) for line in table.lines()[1:-1]] == list(ROWS)


def test_promise_that_no_test_kept_is_found() -> None:
    """Every case of every test that a row names has to pass; only for want of a GPU, or of network
    namespaces, may one be skipped.
    """
    table = FaultTable()
    ends = [
        *(("six", "passed"), ("seven", "passed"), ("seven[b::c]", "failed"), ("ten", "passed")),
        *(("nine[a]", "passed"), ("nine[b]", "skipped"), ("gpu", "skipped"), ("no_gpu", "failed")),
    ]
    for test, outcome in ends:
        table.pytest_runtest_logreport(_report(6, outcome, f"tests/test_x.py::test_{test}"))
    rows = {6: ["six"], 7: ["six", "seven"], 8: ["eight"], 9: ["ten", "nine"]}
    rows |= {25: ["gpu", "no_gpu", "other_gpu"]}
    readme = "| 4 | a fault | a promise | not yet |\n" + "".join(
        f"| {row} | a fault | a promise | {', '.join(f'`test_{name}`' for name in names)} |\n"
        for row, names in rows.items()
    )
    assert table.broken_promises(readme) == [
        *("test_seven", "test_eight", "test_nine", "test_no_gpu", "test_other_gpu")
    ]


def test_promises_of_the_page_are_found() -> None:
    promised = MATRIX.read_text(encoding="utf-8")
    broken = FaultTable().broken_promises(promised)
    assert "test_row_06_driver_killed" in broken
    assert [name for name in broken if name.startswith("test_row_33_")] == [
        "test_row_33_power_loss_at_each_persisting_call",
        "test_row_33_power_loss_in_a_sweep",
    ]


def test_every_row_of_the_matrix_has_tests() -> None:
    assert list(ROWS) == list(range(1, 52))
    found = find_tests(Path(__file__).parents[1] / "chaos")
    assert all(
        name.startswith(f"test_row_{row:02d}_") for row, names in found.items() for name in names
    )
    assert "test_row_06_driver_killed" in found[6]
