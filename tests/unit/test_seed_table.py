"""The table of rows and tests: what is missing is said, and makes the exit code."""

from __future__ import annotations

from types import SimpleNamespace

from tests.seeds import ROWS, SeedTable


def _table(ended: dict[str, str], **rows: str) -> SeedTable:
    table = SeedTable()
    for row, names in rows.items():
        table.tests[row] = names.split()
    table.ended = ended
    return table


def _report(name: str, when: str, outcome: str) -> SimpleNamespace:
    return SimpleNamespace(
        nodeid=name,
        when=when,
        failed=outcome == "failed",
        passed=outcome == "passed",
        skipped=outcome == "skipped",
    )


def test_every_row_of_the_documents_is_known() -> None:
    assert {row.split()[0] for row in ROWS} == {f"S{number}" for number in range(1, 28)}


def test_collected_rows_are_shown_and_the_others_are_missing() -> None:
    table = _table({}, S1="a", S4="a b")
    assert table.missing == [row for row in ROWS if row not in ("S1", "S4")]
    assert any(line.startswith("S2 ") and line.endswith("NOT SHOWN") for line in table.lines())


def test_rows_whose_tests_fail_or_only_skip_are_not_shown() -> None:
    table = _table(
        {"a": "passed", "b": "failed", "c": "skipped"}, S1="a c", S2="a b", S3="c", S4="a"
    )
    assert [row for row in ("S1", "S2", "S3", "S4") if row in table.missing] == ["S2", "S3"]


def test_worst_end_of_a_tests_parameters_counts() -> None:
    table = SeedTable()
    for name, when, outcome in [
        ("t[1]", "call", "passed"),
        ("t[2]", "setup", "skipped"),
        ("u[1]", "call", "failed"),
        ("u[2]", "call", "passed"),
        ("v", "setup", "skipped"),
    ]:
        table.pytest_runtest_logreport(_report(name, when, outcome))  # type: ignore[arg-type]
    assert table.ended == {"t": "passed", "u": "failed", "v": "skipped"}
