"""Values that a sound file cannot hold are refused in a sentence by whoever reads them."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from sweeps.ledger.reader import LedgerReader
from sweeps.paths import LedgerError
from sweeps.sweep_lock import read_holder
from tests.unit.sweeps.sweep_factory import MadeSweep
from trainable.metrics_file import FILE_NAME, CurveDamaged, read_rows

NESTED = "[" * 100_000


def test_a_row_that_is_nested_without_end(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(NESTED + "\n")
    with pytest.raises(CurveDamaged, match=r"is damaged \(RecursionError"):
        read_rows(tmp_path)


def test_a_lock_that_is_nested_without_end(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(NESTED)
    assert read_holder(tmp_path / "lock") is None


@pytest.mark.parametrize(
    ("table", "column"),
    [("trial_values", "value"), ("trial_intermediate_values", "intermediate_value")],
)
def test_a_text_in_the_place_of_a_number(tmp_path: Path, table: str, column: str) -> None:
    made = MadeSweep(tmp_path)
    made.add("complete", 0.5)
    with contextlib.closing(sqlite3.connect(made.paths.ledger)) as database, database:
        database.execute(f"UPDATE {table} SET {column} = 'nan and more'")
    with pytest.raises(LedgerError):
        LedgerReader(made.paths.ledger).records()
