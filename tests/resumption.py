"""A run that is killed within its process, and whether it ends as one that never was.

What must not live here: what is trained, or kills of processes (`tests/chaos`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainable.base_run import RunReport
from trainable.check.compare_states import state_differences
from trainable.loop import Trainer
from trainable.store.metrics_file import read_rows
from trainable.watch.diagnostics import MEASURED


class Crash(BaseException):
    """Stands for a kill: nothing is saved, nothing is closed properly."""


def crash_at(call: int) -> Callable[[], bool]:
    """Return a `should_stop` that raises `Crash` when it is called for the so-manieth time."""
    counter = itertools.count(1)

    def should_stop() -> bool:
        if next(counter) == call:
            raise Crash
        return False

    return should_stop


def to_end(trainer: Trainer) -> list[RunReport]:
    """Train to the end or to the crash; what is being written then still gets there."""
    try:
        return list(trainer.events())
    finally:
        trainer.store.wait()


def equal(first: Any, second: Any) -> bool:
    """Bitwise equality of states, but for what was measured, or depends on loader processes."""
    of_state = isinstance(first, dict) and "progress" in first
    states = [
        {**one, "progress": {**one["progress"], "drawing": {}}} if of_state else {"": one}
        for one in (first, second)
    ]
    return not list(state_differences(*states, ignored=MEASURED))


def curve(directory: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the rows of a run without what was measured."""
    return [
        (row.step, {key: value for key, value in row.metrics.items() if key not in MEASURED})
        for row in read_rows(directory)
    ]
