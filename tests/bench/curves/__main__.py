"""Curves of real trainings: `python -m tests.bench.curves collect|describe|compare`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.bench.curves import compare
from tests.bench.curves.collect import collect
from tests.bench.curves.tables import DESIGN, DIRECTORY, HOLDOUT, read_table, recorded
from tests.bench.rows_file import read


def main() -> int:
    """Write the tables of recorded sweeps, describe them, or compare searches on them."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.curves", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect", help="write the curves of recorded sweeps")
    collecting.add_argument("--root", type=Path, required=True, help="of the recorded sweeps")
    collecting.add_argument("--into", type=Path, default=DIRECTORY, help="where files go")
    collecting.add_argument("names", nargs="*", default=[*DESIGN, *HOLDOUT])
    commands.add_parser("describe", help="print the size and the spread of each table")
    comparing = commands.add_parser("compare", help="compare searches, in portions")
    comparing.add_argument("--rows", type=Path, required=True, help="one search to a line")
    comparing.add_argument("--minutes", type=float, default=float("inf"), help="0: only show")
    comparing.add_argument("--seeds", type=int, default=compare.REPLICATIONS)
    comparing.add_argument("--workers", type=int, nargs="+", default=compare.WORKERS)
    comparing.add_argument("--tables", nargs="+", choices=recorded(), default=recorded())
    comparing.add_argument(
        "--searches", nargs="+", choices=compare.SEARCHES, default=list(compare.SEARCHES)
    )
    options = parser.parse_args()
    if options.command == "collect":
        for name in options.names:
            file = collect(name, options.root, options.into)
            print(f"{file}: {file.stat().st_size / 1e6:.2f} MB")
    elif options.command == "describe":
        for name in recorded():
            _describe(name)
    else:
        kinds = options.tables, tuple(options.searches), tuple(options.workers)
        compare.fill(options.rows, *kinds, options.seeds, seconds=60 * options.minutes)
        compare.show_all(read(options.rows))
    return 0


def _describe(name: str) -> None:
    table = read_table(name)
    configurations, seeds, epochs = table.loss.shape
    diverged = int((table.last_epochs < epochs).sum())
    print(
        f"{name}: {configurations} configurations, {seeds} seeds, {epochs} epochs; "
        f"{diverged} trainings diverged; best {table.truth.min():.4g}, regret of the best tenth "
        f"{table.decile:.3g}, {table.prices.sum():.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
