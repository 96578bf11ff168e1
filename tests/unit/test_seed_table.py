"""The table of rows and tests: what is missing is said, and makes the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from tests.seeds import ROWS, SeedTable, find_tests


def _table(ended: dict[str, str], **rows: str) -> SeedTable:
    table = SeedTable()
    for row, names in rows.items():
        table.tests[row] = names.split()
    table.ended = ended
    return table


def _report(name: str, when: str, outcome: str, rows: Sequence[str] = ()) -> SimpleNamespace:
    return SimpleNamespace(
        nodeid=name,
        user_properties=[("seeds", list(rows))] if rows else [],
        when=when,
        failed=outcome == "failed",
        passed=outcome == "passed",
        skipped=outcome == "skipped",
    )


def test_every_row_of_the_documents_is_known() -> None:
    assert {row.split()[0] for row in ROWS} == {f"S{number}" for number in range(1, 28)}


def test_collected_rows_are_shown_and_others_missing() -> None:
    table = _table({}, S1="a", S4="a b")
    assert table.missing == [row for row in ROWS if row not in ("S1", "S4")]
    assert any(line.startswith("S2 ") and line.endswith("NOT SHOWN") for line in table.lines())


def test_failing_or_skipped_rows_are_not_shown() -> None:
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


def test_every_row_has_a_test_that_needs_no_gpu() -> None:
    """Read from the sources: a mark that gets lost shows here, whatever a session runs."""
    found = find_tests(Path(__file__).parents[1])
    elsewhere = {
        row for row, files in found.items() if any(not file.startswith("gpu/") for file in files)
    }
    assert set(found) - set(ROWS) == set()
    assert set(ROWS) - elsewhere == set()


def test_marks_are_read_from_sources(tmp_path: Path) -> None:
    marks = '@pytest.mark.seeds("S4", "S6 histogram")\n@pytest.mark.seeds(\n    "S4",\n)\n'
    (tmp_path / "test_some.py").write_text(marks)
    (tmp_path / "others.py").write_text('@pytest.mark.seeds("S9")\n')
    assert find_tests(tmp_path) == {"S4": ["test_some.py"] * 2, "S6 histogram": ["test_some.py"]}


def test_summary_appears_after_most_rows_only() -> None:
    """Rows are known from the reports alone: other processes may have collected the tests."""
    table, written = SeedTable(), []
    terminal = SimpleNamespace(section=written.append, write_line=written.append)
    for row in list(ROWS)[:4]:
        table.pytest_runtest_logreport(_report(f"t{row}", "call", "passed", [row]))  # type: ignore[arg-type]
    table.pytest_terminal_summary(terminal)  # type: ignore[arg-type]
    assert written == []
    for row in list(ROWS)[3:-1]:
        table.pytest_runtest_logreport(_report(f"u{row}", "call", "passed", [row]))  # type: ignore[arg-type]
    table.pytest_terminal_summary(terminal)  # type: ignore[arg-type]
    assert "S3:1, S4:2, S5:1," in written[1]
    assert written[1].endswith("not shown by this session: S27")
