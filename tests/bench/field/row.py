"""The row `field` of the benchmarks: ours against each peer, with four workers."""

from __future__ import annotations

from tests.bench.field import grounds
from tests.bench.field.measure import fill
from tests.bench.field.report import against, show_all
from tests.bench.field.searches import DEFAULT, SEARCHES
from tests.bench.rows_file import named_file, read
from tests.bench.table import Goal, Result, size


def field(repeats: int) -> list[Result]:
    """Compare all searches on all problems; the replications are the repeats.

    `FIELD_ROWS` names a file of rows that are there, so that it can be measured in portions.
    """
    del repeats
    rows = named_file("FIELD_ROWS")
    problems = grounds.names()[: size(len(grounds.names()), 2)]
    fill(rows, problems, SEARCHES, (4,), size(20, 1))
    found = read(rows)
    show_all(found)
    return [
        Result(
            f"field: epochs to the target (95 %) / {peer}",
            1.0,
            one.target.middle,
            "times",
            (1 / one.target.high, 1 / one.target.middle, 1 / one.target.low),
            Goal("ratio", 1 / 1.5),
        )
        for peer, one in against(found, 4, DEFAULT).items()
    ]
