"""The field: `python -m tests.bench.field measure|show --rows FILE`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.bench.field import grounds, report
from tests.bench.field.measure import fill
from tests.bench.field.searches import SEARCHES
from tests.bench.rows_file import read

SEEDS, WORKERS = 20, (1, 4, 16)


def main() -> int:
    """Measure what is missing in a file of rows, or print its tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.field", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="measure what is missing, in portions")
    measuring.add_argument("--rows", type=Path, required=True, help="one search to a line")
    measuring.add_argument("--minutes", type=float, default=float("inf"))
    measuring.add_argument("--seeds", type=int, default=SEEDS)
    measuring.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    measuring.add_argument(
        "--problems", nargs="+", choices=grounds.names(), default=grounds.names()
    )
    measuring.add_argument("--searches", nargs="+", choices=SEARCHES, default=SEARCHES)
    showing = commands.add_parser("show", help="print the tables of a file of rows")
    showing.add_argument("--rows", type=Path, required=True)
    showing.add_argument("--searches", nargs="+", choices=SEARCHES, default=SEARCHES)
    options = parser.parse_args()
    if options.command == "measure":
        fill(
            options.rows,
            options.problems,
            options.searches,
            options.workers,
            options.seeds,
            seconds=60 * options.minutes,
        )
    else:
        rows = read(options.rows)
        report.show_all([row for row in rows if row["search"] in options.searches])
    return 0


if __name__ == "__main__":
    sys.exit(main())
