"""What is different between the databases that a ledger may be in, as far as SQL shows it.

What must not live here: the questions themselves (`ledger.view`), and connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sweeps.paths import LedgerError

_SCHEMA = (12, "v3.2.0.a")
"""The tables' version, as Optuna counts it itself and as its migrations do."""


class Rows(Protocol):
    """A connection for reading. Parameters are written `:name`."""

    def execute(self, sql: str, parameters: Mapping[str, Any] = ..., /) -> Any:
        """Ask; the answer is iterable, and has `fetchone` and `fetchall`."""


@dataclass(frozen=True)
class Dialect:
    """How a database wants to be asked."""

    infinity: str
    """The infinite number."""
    minus_infinity: str
    starts: str
    """The condition that the column `key` begins with a text, given as `{text}`."""

    def number(self, value: str, kind: str) -> str:
        """Return SQL for a stored number. Optuna keeps what is not finite beside it; a NaN stays
        NULL.
        """
        return (
            f"CASE {kind} WHEN 'FINITE' THEN {value} WHEN 'INF_POS' THEN {self.infinity} "
            f"WHEN 'INF_NEG' THEN {self.minus_infinity} END"
        )

    def begins(self, text: str) -> str:
        """Return SQL for "`key` begins with this text", which has no characters of a pattern."""
        return self.starts.format(text=text)


def check_tables(db: Rows, place: str) -> None:
    """Make sure that the tables are those that this release reads.

    Args:
        place: What messages call the ledger.

    Raises:
        LedgerError: They are not.
    """
    ((number, library),) = db.execute("SELECT schema_version, library_version FROM version_info")
    ((revision,),) = db.execute("SELECT version_num FROM alembic_version")
    if (number, revision) != _SCHEMA:
        raise LedgerError(
            f"{place} has tables of version {number} ({revision}), by Optuna {library}; "
            f"this release reads version {_SCHEMA[0]} ({_SCHEMA[1]}); "
            "look at it with the release that wrote it"
        )


def typed(
    rows: Iterable[tuple[Any, ...]], *types: type | tuple[type, ...]
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows, each value of its column's type; SQLite stores any value in any column.

    Raises:
        ValueError: A value has another type.
    """
    for row in rows:
        for value, expected in zip(row, types, strict=True):
            if not isinstance(value, expected):
                raise ValueError(f"it holds a {type(value).__name__} where none belongs")
        yield row


def one(rows: Iterable[tuple[Any, ...]]) -> Any:
    """Return the only value of the only row; None without one."""
    return next((row[0] for row in rows), None)
