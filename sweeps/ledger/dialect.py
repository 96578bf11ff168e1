"""Define the SQL that differs between SQLite and PostgreSQL, and check a ledger's tables.

What must not live here: the queries themselves (`ledger.reader`), and connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sweeps.errors import LedgerError
from sweeps.optuna_compat import tables


class ReadConnection(Protocol):
    """A connection for reading. Parameters are written `:name`."""

    def execute(self, sql: str, parameters: Mapping[str, Any] = ..., /) -> Any:
        """Run a statement; the result is iterable, and has `fetchone` and `fetchall`."""


@dataclass(frozen=True)
class Dialect:
    """The SQL expressions that differ between databases."""

    infinity: str
    """The literal for infinity."""
    minus_infinity: str
    """The literal for minus infinity."""
    starts: str
    """The condition that the column `key` begins with `{text}`."""

    def number(self, value: str, kind: str) -> str:
        """Return SQL for a stored number.

        Args:
            value: The column of the number.
            kind: The column of its kind.
        """
        return tables.number_sql(
            value, kind, infinity=self.infinity, minus_infinity=self.minus_infinity
        )

    def begins(self, text: str) -> str:
        """Return SQL for "`key` begins with `text`". `text` must have no pattern characters."""
        return self.starts.format(text=text)


def check_tables(db: ReadConnection, location: str) -> None:
    """Check that the tables have the version that this release reads.

    Args:
        db: A connection to the ledger.
        location: The ledger's name in messages.

    Raises:
        LedgerError: They have another version.
    """
    ((number, library),) = db.execute(tables.VERSION_QUERY)
    ((revision,),) = db.execute(tables.REVISION_QUERY)
    if (number, revision) != tables.SCHEMA:
        raise LedgerError(
            f"{location} has tables of version {number} ({revision}), by Optuna {library}; "
            f"this release reads version {tables.SCHEMA[0]} ({tables.SCHEMA[1]}); "
            "look at it with the release that wrote it"
        )


def typed(
    rows: Iterable[tuple[Any, ...]], *types: type | tuple[type, ...]
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows and check the type of each value: SQLite stores any type in any column.

    Args:
        rows: A query's result.
        types: The expected type of each column.

    Raises:
        ValueError: A value has another type.
    """
    for row in rows:
        for value, expected in zip(row, types, strict=True):
            if not isinstance(value, expected):
                raise ValueError(f"it holds a {type(value).__name__} where none belongs")
        yield row


def one(rows: Iterable[tuple[Any, ...]]) -> Any:
    """Return the only value of the only row; None without a row."""
    return next((row[0] for row in rows), None)
