"""Programs that each persist one kind of data and print what must survive.

    python -m tests.chaos.fsync_model

For each line `NAME DIRECTORY ACKNOWLEDGED` on standard input it imports what that program needs,
once, runs it in a forked process and prints how that one ended. A program writes a line into
the file `ACKNOWLEDGED` whenever a caller has been told that something is done; each begins with
the number of persisting calls made by then.
What must not live here: faults, or what must hold after one (`test_crash_points.py`).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.faults import Faults

Acknowledge = Callable[..., None]
Program = Callable[[Path, Acknowledge], None]

SPEC = """
name: small
task: digits
metric: val/loss
mode: min
trials: 2
budget: {epochs: 2}
space:
  train.optimizer.lr: {loguniform: [1.0e-3, 1.0e-1]}
"""


def open_store(directory: Path) -> Any:
    """Open a run's store for writing; two generations and the best are kept."""
    from trainable.checkpoint import CheckpointStore
    from trainable.config import CheckpointConfig

    return CheckpointStore(directory, CheckpointConfig(keep=2), metric="val/loss")


def save(store: Any, step: int, value: float) -> None:
    """Save a generation and wait for its commit."""
    import torch

    state = {"step": step, "weights": torch.arange(3000.0) + step}
    store.save(lambda: state, step=step, reports=step, value=value)
    store.wait()


def saves(directory: Path, acknowledge: Acknowledge) -> None:
    """Go on with a run, or begin one, and save twice; the older ones go, but not the best."""
    store = open_store(directory)
    state = store.resume()
    first = state["step"] if state else 0
    for step in (first + 1, first + 2):
        save(store, step, 0.5 + step)
        acknowledge("saved", step)
    store.close()


def curve(directory: Path, acknowledge: Acknowledge) -> None:
    """Go on with a curve at step 2, and log three more rows."""
    from trainable.store.local import LocalFiles
    from trainable.store.metrics_file import History, Row

    files = LocalFiles.of(directory)
    files.open()
    history = History(directory, files, step=2)
    for step in (3, 4, 5):
        history.append([Row(step, 0, {"train/loss": 1 / step})])
        acknowledge("appended", step)
        history.sync()
        acknowledge("synced", step)
    history.close()
    files.close()


def ledger(directory: Path, acknowledge: Acknowledge) -> None:
    """Ask for two trials; the first reports and is complete, the other one is left running."""
    from optuna.samplers import RandomSampler

    from sweeps.ledger.ledger import Ledger
    from tests.chaos.spaces import SPACE
    from tests.make_trials import ask

    opened = Ledger.open(directory / "ledger.db")
    for number in (0, 1):
        trial = ask(opened, SPACE, RandomSampler(seed=number))
        acknowledge("asked", trial.number, trial.params)
        opened.start(number)
        acknowledge("started", number)
        opened.report(number, epoch=1, step=10, value=0.5)
        acknowledge("reported", number, 1)
        if number == 0:
            opened.finish(number, "complete")
            acknowledge("finished", number)


def outbox(directory: Path, acknowledge: Acknowledge) -> None:
    """Queue rows, deliver some of them, queue more and an artifact."""
    from tracking.outbox import Outbox
    from trainable.store.metrics_file import Row

    opened = Outbox(directory)
    opened.append(0, "start", {"params": {}})
    for steps in ((1, 2, 3), (4, 5, 6)):
        opened.append_rows(0, [Row(step, 0, {"loss": 1 / step}) for step in steps])
        acknowledge("queued", *steps)
    batch = opened.next_batch(0)
    assert batch is not None
    acknowledge("claimed", *(point.step for point in batch.points))
    opened.delivered(batch)
    acknowledge("delivered", *(point.step for point in batch.points))
    opened.append_rows(0, [Row(7, 0, {"loss": 1 / 7})])
    acknowledge("queued", 7)
    opened.append_artifact(0, Path(__file__), "sources/this.py")
    acknowledge("artifact")
    opened.close()


def creation(directory: Path, acknowledge: Acknowledge) -> None:
    """Create a sweep: take its lock, make its ledger, commit by its spec."""
    from sweeps.paths import SweepPaths
    from sweeps.run.session import open_ledger
    from sweeps.spec.spec import parse_spec
    from sweeps.sweep_lock import SweepLock
    from tests.unit.sweeps.sweep_factory import prepared

    paths = SweepPaths(directory, "small")
    lock = SweepLock(paths.lock)
    lock.acquire()
    new = not paths.exists()
    open_ledger(prepared(paths, parse_spec(SPEC, "small.yaml"), new=new), print)
    acknowledge("created" if new else "opened")
    lock.release()


PROGRAMS: dict[str, Program] = {
    "saves": saves,
    "curve": curve,
    "ledger": ledger,
    "outbox": outbox,
    "creation": creation,
}
_IMPORTS = {
    "saves": ["trainable.checkpoint", "trainable.store.snapshot"],
    "curve": ["trainable.store.metrics_file"],
    "ledger": ["sweeps.ledger.ledger", "tests.chaos.spaces"],
    "outbox": ["tracking.outbox", "trainable.store.metrics_file"],
    "creation": ["sweeps.run.session", "sweeps.spec.spec", "tests.unit.sweeps.sweep_factory"],
}


def _run(program: Program, directory: Path, file: Path) -> None:
    with file.open("ab", buffering=0) as acknowledged:

        def acknowledge(*what: Any) -> None:
            acknowledged.write(json.dumps([Faults.count_here(), *what]).encode() + b"\n")

        program(directory, acknowledge)


def main() -> None:
    """Serve the requests on standard input."""
    for line in sys.stdin:
        name, directory, file = line.split()
        for module in _IMPORTS[name]:
            importlib.import_module(module)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _run(PROGRAMS[name], Path(directory), Path(file))
                code = 0
            except BaseException:  # this process has nobody else to tell
                traceback.print_exc()
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
