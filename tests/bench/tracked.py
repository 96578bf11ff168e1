"""P6: what tracking costs a trial: recorded here, far away, and nowhere, where nobody listens or
nobody answers.

The trial is a process of its own, as in a sweep; this one plays the driver. What must not live
here: how fast points get into a store (`tracking.py`).
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import psutil

from tests.bench.table import Goal, Result, paired, size
from tests.chaos.scripted_proxy import Proxy, done_late
from tests.tracking_server import start_tracking_server
from tracking.recorder import Recorder, process_with
from tracking.tracker import TrackedSweep
from trainable.store.metrics_file import Row

_EPOCHS, _SMOKE_EPOCHS = 60, 3
_BLOCKS_OF_A_REPEAT = 3
_AWAY_SECONDS = 0.05
_WALL, _STEP = Goal("ratio", 1.01), Goal("ratio", 1.05)


class _Block(NamedTuple):
    seconds: float
    p99: float
    waited: float


def trial(repeats: int) -> list[Result]:
    """Wall time of a stretch of a trial, and its slowest steps, with each kind of tracking.

    One trial trains from the beginning to the end. Its epochs are recorded for a stretch, which
    is measured against the mean of the stretches before and after it, that nobody records: two
    processes next to each other differ by a tenth on a machine that others share.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        local = f"sqlite:///{directory}/mlflow.db"
        with (
            start_tracking_server(
                f"sqlite:///{directory}/server.db", directory / "artifacts"
            ) as server,
            Proxy(server.url) as away,
            socket.create_server(("127.0.0.1", 0)) as hung,  # the kernel accepts, nobody reads
        ):
            away.otherwise(done_late(_AWAY_SECONDS))
            _take_elsewhere(server.pid)
            sides = {
                "here": _recorder(local, directory),
                "50 ms away": _recorder(away.url, directory),
                "dead": _recorder(_at(_closed_port()), directory, answered=False),
                "hung": _recorder(_at(hung.getsockname()[1]), directory, answered=False),
            }
            order = list(sides) * size(_BLOCKS_OF_A_REPEAT * repeats, 1)
            with _Trial() as trained:
                trained.block()  # imports, first allocations
                without = [trained.block()]
                taken: dict[str, list[tuple[_Block, _Block]]] = {side: [] for side in sides}
                for number, side in enumerate(order):
                    measured = trained.block(sides[side], number)
                    answered = side not in ("dead", "hung")
                    assert (sides[side].flush(60.0 if answered else 0.0) == 0) == answered
                    without.append(trained.block())
                    taken[side].append((measured, _mean(without[-2:])))
            for recorder in sides.values():
                recorder.close(0.0)
    results = []
    for side, pairs in taken.items():
        on, off = zip(*pairs, strict=True)
        results += [
            paired(f"P6 trial, tracking {side} / off", _seconds(on), _seconds(off), "s", _WALL),
            paired(f"P6 step p99, tracking {side} / off", _slow(on), _slow(off), "ms", _STEP),
            Result(f"P6 waiting for a CPU, tracking {side}, off", _waited(on), _waited(off), "%"),
        ]
    row = "P6 trial, off / off, the next stretch"
    results.append(paired(row, _seconds(without[:-1]), _seconds(without[1:]), "s"))
    return results


class _Trial:
    """The trial's process, which trains a stretch whenever it is told to."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.bench.tracked_child"]
        self._child = subprocess.Popen(
            [*command, str(size(_EPOCHS, _SMOKE_EPOCHS))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._child.communicate()  # the end of its input ends it
        assert self._child.returncode == 0

    def block(self, recorder: Recorder | None = None, number: int = 0) -> _Block:
        """Train a stretch, and record each epoch when it is reported, as a trial of its own."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        if recorder is not None:
            recorder.start(number, {}, {})
        self._child.stdin.write("go\n")
        self._child.stdin.flush()
        for line in self._child.stdout:
            found = json.loads(line)
            if isinstance(found, dict):
                if recorder is not None:
                    recorder.finish(number, "FINISHED", {})
                return _Block(**found)
            if recorder is not None:
                recorder.log(number, [Row(*row) for row in found])
        raise AssertionError("the trial ended before it was told to")


def _seconds(blocks: Sequence[_Block]) -> list[float]:
    return [block.seconds for block in blocks]


def _slow(blocks: Sequence[_Block]) -> list[float]:
    """Of each stretch the milliseconds that one step in a hundred exceeds."""
    return [1e3 * block.p99 for block in blocks]


def _waited(blocks: Sequence[_Block]) -> float:
    """The median of the shares of the time, in percent, for which a CPU was missing."""
    return 100 * statistics.median([block.waited for block in blocks])


def _mean(blocks: list[_Block]) -> _Block:
    return _Block(*(sum(values) / len(blocks) for values in zip(*blocks, strict=True)))


def _recorder(uri: str, directory: Path, *, answered: bool = True) -> Recorder:
    """A recorder that has got as far as it gets, with mlflow imported and tables made."""
    sweep_id = uuid.uuid4().hex
    recorder = Recorder(
        uri,
        None,
        TrackedSweep(experiment="bench", sweep_id=sweep_id, outbox=directory / sweep_id),
        deliver=process_with(os.environ),
    )
    while recorder.flush(0.1) and not recorder.seconds_unresponsive:
        pass
    assert (recorder.seconds_unresponsive == 0) == answered
    return recorder


def _take_elsewhere(pid: int) -> None:
    """Let a server run only where nobody else wants the processor: with one on another machine a
    trial does not compete.
    """
    server = psutil.Process(pid)
    for process in (server, *server.children(recursive=True)):
        for thread in process.threads():
            os.sched_setscheduler(thread.id, os.SCHED_IDLE, os.sched_param(0))


def _at(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
