"""Values that a sound file cannot hold are refused with a message by every reader."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.errors import LedgerError
from sweeps.ledger.reader import LedgerReader
from sweeps.sweep_lock import read_holder
from tests.unit.sweeps.sweep_factory import MadeSweep
from tracking.outbox import Outbox
from trainable.store.metrics_file import FILE_NAME, CurveDamaged, Row, read_rows

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


COMMANDS = [
    ["list"],
    ["trials", "small", "--json"],
    ["show", "small", "0"],
    ["best", "small"],
    ["compare", "small"],
]
_LONG = pytest.mark.chaos
VALUES = [
    pytest.param(b"\xff\x00nan", id="bytes"),
    pytest.param("no such thing", id="a text"),
    pytest.param(None, id="NULL", marks=_LONG),
    pytest.param(-7, id="a number", marks=_LONG),
    pytest.param(0.5, id="a fraction", marks=_LONG),
    pytest.param("[[1], {}]", id="a list in JSON", marks=_LONG),
    pytest.param('{"step": [], "name": {}}', id="a mapping in JSON", marks=_LONG),
]


def _columns(file: Path) -> list[tuple[str, str]]:
    """Each column of each table that has rows."""
    with contextlib.closing(sqlite3.connect(file)) as db:
        tables = [
            name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        return [
            (table, column[1])
            for table in tables
            if db.execute(f"SELECT 1 FROM {table}").fetchone()
            for column in db.execute(f"PRAGMA table_info({table})")
        ]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a sweep whose ledger and outbox have rows in each table that they use."""
    root = tmp_path_factory.mktemp("recorded") / "runs"
    made = MadeSweep(root)
    made.add("complete", 0.5, 0.25)
    made.add("failed", 0.75, reason="ValueError: no")
    outbox = Outbox(made.paths.outbox)
    outbox.set_target("http://127.0.0.1:9", gone=False)
    for number in range(2):
        outbox.append(number, "start", {"params": {}, "tags": {}})
        outbox.append_rows(number, [Row(step=1, timestamp_ms=1000, metrics={"val/loss": 0.5})])
        outbox.set_run_id(number, f"run-{number}", None)
    outbox.close()
    return root


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("file", ["ledger.db", "outbox/outbox.db"])
def test_a_value_of_another_type_in_any_column(
    recorded: Path, tmp_path: Path, file: str, value: object
) -> None:
    wrong: list[str] = []
    for table, column in _columns(recorded / "small" / file):
        root = tmp_path / f"{table}-{column}"
        shutil.copytree(recorded, root)
        with contextlib.closing(sqlite3.connect(root / "small" / file)) as db:
            try:
                with db:
                    db.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (value,))
            except sqlite3.IntegrityError:
                continue  # a database does not hold this value here
        for words in COMMANDS:
            done = CliRunner().invoke(app, [*words, "--root", str(root)])
            crashed = done.exception is not None and not isinstance(done.exception, SystemExit)
            silent = done.exit_code != 0 and not done.stderr.strip()
            if crashed or silent or done.exit_code not in (0, 2, 3, 4):
                wrong.append(f"{table}.{column}, {' '.join(words)}: {done.exception!r}")
    assert not wrong, "\n".join(wrong)
