"""Load: a thousand trials of a thousand steps and five metrics into MLflow on PostgreSQL, with the
tracking server and the database restarted in the middle, and the looking commands meanwhile.

Each of five million points must be there once; a row whose points are not is an error, not a
figure. What must not live here: small loads (`tracking.py`), and faults one by one
(`tests/chaos`).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.bench.commands import write_large_sweep
from tests.bench.table import Goal, Result, alone, not_measured, size
from tests.chaos.postgres import INSTALL, Cluster, find_binaries
from tests.chaos.tracking_service import Service
from tracking.recorder import Recorder
from tracking.tracker import TrackedSweep

_SWEEP = Path(sys.executable).with_name("sweep")
_KEYS = ("train/loss", "train/grad_norm", "train/lr", "train/clip_fraction", "val/loss")
_STEPS, _ROWS_A_REPORT = 1000, 100
_COMMANDS = ("status", "trials", "compare")
_PATIENCE = 3600.0
_LOOK_EVERY, _SMOKE_LOOK_EVERY = 60.0, 2.0


class _Row(NamedTuple):
    step: int
    timestamp_ms: int
    metrics: dict[str, float]


def load(repeats: int) -> list[Result]:
    """Points a second into a served PostgreSQL, once, whatever `repeats` says: it takes long."""
    del repeats
    binaries = find_binaries()
    if binaries is None:
        return [not_measured("load", f"PostgreSQL is missing: {INSTALL}")]
    with tempfile.TemporaryDirectory() as name, Cluster(binaries) as cluster:
        directory = Path(name)
        with Service(cluster.uri, directory) as service:
            return _measure(directory, cluster, service)


def _measure(directory: Path, cluster: Cluster, service: Service) -> list[Result]:
    trials = write_large_sweep(directory)
    outbox = directory / "large" / "outbox"
    recorder = Recorder(
        service.url, None, TrackedSweep(experiment="large", sweep_id="bench", outbox=outbox)
    )
    looked: dict[str, list[float]] = {command: [] for command in _COMMANDS}
    started = time.perf_counter()
    appended = _append(recorder, trials)
    helper = ThreadPoolExecutor(1)
    restarts = helper.submit(_restart_both, recorder, cluster, service)
    helper.shutdown(wait=False)
    every = size(int(_LOOK_EVERY), int(_SMOKE_LOOK_EVERY))
    while recorder.flush(float(every)) > 0:
        if restarts.done():
            restarts.result()  # without a server nothing will ever be delivered
        for command in _COMMANDS:
            looked[command].append(_wall(command, directory))
        assert time.perf_counter() - started < _PATIENCE, "the points were not delivered"
    restarts.result()
    seconds = time.perf_counter() - started
    recorder.close(_PATIENCE)
    expected = trials * _STEPS * len(_KEYS)
    ((there, different),) = cluster.query(
        "SELECT count(*), count(DISTINCT (run_uuid, key, step)) FROM metrics"
    )
    assert (there, different) == (expected, expected), "each point once"
    ((runs,),) = cluster.query("SELECT count(*) FROM runs WHERE status = 'FINISHED'")
    assert runs == trials, "each trial has one run, and it is finished"
    row = f"load, {expected:,} points, both servers restarted"
    return [
        alone(f"{row}: queued", [1e6 * appended / expected], "us/point"),
        alone(f"{row}: delivered", [1e6 * seconds / expected], "us/point"),
        *(
            alone(f"load, sweep {command} meanwhile", taken, "s", Goal("ours", 1.0))
            for command, taken in looked.items()
            if taken
        ),
    ]


def _append(recorder: Recorder, trials: int) -> float:
    """Queue everything, all trials in turn; returns the seconds that it took."""
    began = time.perf_counter()
    clock = int(time.time() * 1000)
    for trial in range(trials):
        recorder.start(trial, {"train.optimizer.lr": 0.1 / (trial + 1)}, {})
    for first in range(1, _STEPS + 1, _ROWS_A_REPORT):
        for trial in range(trials):
            steps = range(first, first + _ROWS_A_REPORT)
            recorder.log(
                trial, [_Row(s, clock + s, dict.fromkeys(_KEYS, (trial + 1) / s)) for s in steps]
            )
    for trial in range(trials):
        recorder.finish(trial, "FINISHED", {})
    return time.perf_counter() - began


def _restart_both(recorder: Recorder, cluster: Cluster, service: Service) -> None:
    """Kill the tracking server when a third is delivered, and the database at two thirds."""
    total = recorder.pending()
    while recorder.pending() > total * 2 / 3:
        time.sleep(0.05)
    service.kill()
    service.start()
    while recorder.pending() > total / 3:
        time.sleep(0.05)
    cluster.restart_while_writing("metrics")


def _wall(command: str, root: Path) -> float:
    started = time.perf_counter()
    line = [str(_SWEEP), command, "large", "--root", str(root)]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started
