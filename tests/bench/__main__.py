"""Measure, and print one table: `python -m tests.bench [--list] [--only ROW]... [--smoke]`.

Never part of the tests: a loaded machine measures itself. Each row runs alone, with one thread.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import time
from collections.abc import Callable

from tests.bench import table
from tests.bench.table import REPEATS, Result, render

ROWS = {
    "help": ("tests.bench.commands:help_page", "P11: sweep --help"),
    "status": ("tests.bench.commands:looking", "P10, P11: sweep status, trials, compare"),
    "search": ("tests.bench.commands:against_mlflow", "P10: trials, compare / mlflow.search_runs"),
    "refusals": ("tests.bench.commands:refusals", "bad inputs that need the task / 5 s"),
    "first": ("tests.bench.first:first", "P1: sweep run digits, first epoch and end"),
    "sweep": ("tests.bench.sweeping:against_stock", "P1: stock Ray Tune, whole sweeps"),
    "plain": ("tests.bench.sweeping:against_plain", "P2: plain Optuna, whole sweeps"),
    "minute": ("tests.bench.minute:minute", "P2: trials of a minute / the same by a bare loop"),
    "plane": ("tests.bench.control:plane", "P8: cost of a trial at 10,000 / at 1,000"),
    "sleepers": ("tests.bench.control:sleepers", "P8: 10,000 trials of 1 s / the ideal"),
    "suggest": ("tests.bench.suggestions:costs", "P9: a suggestion of TPE at 10,000 trials"),
    "fronts": ("tests.bench.suggestions:fronts", "choice among a front of trials / Optuna's"),
    "trial-memory": ("tests.bench.memory:trial_process", "a trial's process / a bare script"),
    "sweep-memory": ("tests.bench.memory:sweep_processes", "the processes of a real sweep"),
    "step": ("tests.bench.steps:steps", "P3: a step / a bare loop, MLP, CNN, transformer"),
    "ranks": ("tests.bench.ranks:ranks", "P13: a step on two ranks / torchrun with DDP"),
    "rank-start": (
        "tests.bench.ranks_start:starts",
        "P13: start of a trial of two ranks / of one",
    ),
    "compile": ("tests.bench.compiled:compiled", "train.compile: first step, and those after it"),
    "recovery": ("tests.bench.recovery:recovery", "P7: steps executed under ten kills / useful"),
    "append": ("tests.bench.tracking:append", "P5: queueing a point / raw SQLite"),
    "deliver": ("tests.bench.tracking:deliver", "P5: a point in MLflow / log_batch, log_metric"),
    "tracked": ("tests.bench.tracked:trial", "P6: a trial with tracking / without"),
    "load": ("tests.bench.load:load", "five million points into a served PostgreSQL"),
    "field": (
        "tests.bench.field.row:field",
        "P9: epochs to a target / searches of other libraries",
    ),
    "priors": ("tests.bench.priors:priors", "epochs with a prior / without, right and wrong"),
    "hard": ("tests.bench.hard:hard", "flat, failing, noisy, crossing, mixed / random search"),
    "trust": ("tests.bench.trust:trust", "the confirmed winner's true rank; audit's false alarms"),
    "checkpoint": ("tests.bench.saving:checkpoints", "P4: a checkpoint each second / none"),
    "packing": ("tests.bench.packing:packing", "P12: trials that share a GPU / one at a time"),
}
_ON_REQUEST = {"sweep", "plain", "minute", "plane", "sleepers", "load", "field"}
"""Whole sweeps, many times over, and a large load: hours. They run where `--only` names them."""


def main(arguments: list[str]) -> int:
    """Measure what is asked for; returns 1 when a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the rows and measure nothing")
    parser.add_argument("--only", action="append", choices=ROWS, metavar="ROW", help="this row")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of each ratio, at least 5")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="small sizes and one repeat, where a row has them: that it runs, and nothing more",
    )
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name:<14}{title}" for name, (_, title) in ROWS.items()))
        return 0
    if options.smoke:
        table.smoke, options.repeats = True, 1
    elif options.repeats < 5:
        parser.error(f"--repeats is {options.repeats}; fewer than 5 say nothing about the spread")
    # Read by torch and NumPy when they are imported, here and in every process started from here.
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = "1"
    results: list[Result] = []
    for name in options.only or [row for row in ROWS if row not in _ON_REQUEST]:
        started = time.perf_counter()
        results += _find(name)(options.repeats)
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    load = os.getloadavg()[0]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, load {load:.1f}")
    from tests.bench.device import device_name  # imports torch: after the variables above

    print(f"rows that train: on {device_name()}")
    print(f"medians of {options.repeats} interleaved repeats, one thread\n")
    print(render(results))
    return int(not options.smoke and any(result.met is False for result in results))


def _find(name: str) -> Callable[[int], list[Result]]:
    module, _, function = ROWS[name][0].partition(":")
    measure: Callable[[int], list[Result]] = getattr(importlib.import_module(module), function)
    return measure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
