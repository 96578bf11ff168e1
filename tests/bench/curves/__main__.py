"""Curves of real trainings: `python -m tests.bench.curves collect|describe`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.bench.curves.collect import collect
from tests.bench.curves.tables import DESIGN, DIRECTORY, HOLDOUT, read_table, recorded


def main() -> int:
    """Write the tables of recorded sweeps, or describe them."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.curves", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect", help="write the curves of recorded sweeps")
    collecting.add_argument("--root", type=Path, required=True, help="of the recorded sweeps")
    collecting.add_argument("--into", type=Path, default=DIRECTORY, help="where files go")
    collecting.add_argument("names", nargs="*", default=[*DESIGN, *HOLDOUT])
    commands.add_parser("describe", help="print the size and the spread of each table")
    options = parser.parse_args()
    if options.command == "collect":
        for name in options.names:
            file = collect(name, options.root, options.into)
            print(f"{file}: {file.stat().st_size / 1e6:.2f} MB")
    else:
        for name in recorded():
            _describe(name)
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
