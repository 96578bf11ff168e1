"""Record, collect and compare: `python -m tests.bench.curves --help`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.bench.curves.collect import collect
from tests.bench.curves.tables import DESIGN, DIRECTORY, HOLDOUT, read_table, recorded


def main() -> int:
    """Write the tables of recorded sweeps, or describe those that there are."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.curves", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect", help="write the curves of recorded sweeps")
    collecting.add_argument("--root", type=Path, required=True, help="of the recorded sweeps")
    collecting.add_argument("--into", type=Path, default=DIRECTORY, help="where tables are written")
    collecting.add_argument("names", nargs="*", default=[*DESIGN, *HOLDOUT])
    commands.add_parser("describe", help="print the size and the spread of each table")
    options = parser.parse_args()
    if options.command == "collect":
        for name in options.names:
            file = collect(name, options.root, options.into)
            print(f"{file}: {file.stat().st_size / 1e6:.2f} MB")
        return 0
    for name in recorded():
        table = read_table(name)
        configurations, seeds, epochs = table.loss.shape
        diverged = int((table.last_epochs < epochs).sum())
        print(
            f"{name}: {configurations} configurations, {seeds} seeds, {epochs} epochs; "
            f"{diverged} trainings diverged; best {table.truth.min():.4g}, decile regret "
            f"{table.decile:.3g}, {table.prices.sum():.0f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
