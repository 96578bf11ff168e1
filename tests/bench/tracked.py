"""P6: what tracking costs a trial: nothing recorded, recorded here, far away, and nowhere, where
nobody listens or nobody answers.

The trial is a process of its own, as in a sweep; this one plays the driver. What must not live
here: how fast points get into a store (`tracking.py`).
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.bench.table import Goal, Result, paired, size
from tests.chaos.scripted_proxy import Proxy, done_late
from tracking.mlflow_recorder import MlflowRecorder
from tracking.recorder import NullRecorder, Recorder
from tracking.ui import start_server
from trainable.history import Row

_EPOCHS, _SMOKE_EPOCHS = 150, 10
_AWAY_SECONDS = 0.05
_WALL, _STEP = Goal("ratio", 1.01), Goal("ratio", 1.05)


class _Trial(NamedTuple):
    seconds: float
    p99: float


def trial(repeats: int) -> list[Result]:
    """Wall time of a trial, and its slowest steps, with each kind of tracking and with none."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        local = f"sqlite:///{directory}/mlflow.db"
        with (
            start_server(f"sqlite:///{directory}/server.db", directory / "artifacts") as server,
            Proxy(server.url) as away,
            socket.create_server(("127.0.0.1", 0)) as hung,  # the kernel accepts, nobody reads
        ):
            away.otherwise(done_late(_AWAY_SECONDS))
            sides: dict[str, Callable[[], Recorder]] = {
                "off": NullRecorder,
                "here": lambda: _recorder(local, directory),
                "50 ms away": lambda: _recorder(away.url, directory),
                "dead": lambda: _recorder(_at(_closed_port()), directory, 0.0),
                "hung": lambda: _recorder(_at(hung.getsockname()[1]), directory, 0.0),
            }
            taken: dict[str, list[_Trial]] = {side: [] for side in sides}
            names = list(sides)
            for repeat in range(repeats):
                shift = repeat % len(names)
                for side in names[shift:] + names[:shift]:
                    taken[side].append(_run(sides[side](), side not in ("dead", "hung")))
    results = []
    for side in names[1:]:
        both = [[one.seconds for one in taken[kind]] for kind in (side, "off")]
        results.append(paired(f"P6 trial, tracking {side} / off", *both, "s", _WALL))
        both = [[1e3 * one.p99 for one in taken[kind]] for kind in (side, "off")]
        results.append(paired(f"P6 step p99, tracking {side} / off", *both, "ms", _STEP))
    return results


def _recorder(uri: str, directory: Path, patience: float = 120.0) -> MlflowRecorder:
    sweep_id = uuid.uuid4().hex
    recorder = MlflowRecorder(uri, None, "bench", sweep_id, directory / sweep_id, {}, {})
    recorder.wait_ready(patience)  # tables are made once
    return recorder


def _at(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _run(recorder: Recorder, answered: bool) -> _Trial:
    recorder.start(0, {}, {})
    command = [
        sys.executable,
        "-m",
        "tests.bench.tracked_child",
        str(size(_EPOCHS, _SMOKE_EPOCHS)),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            found = json.loads(line)
            if isinstance(found, dict):
                measured = _Trial(**found)
            else:
                recorder.log(0, [Row(*row) for row in found])
    assert child.returncode == 0
    recorder.finish(0, "FINISHED", {})
    if isinstance(recorder, MlflowRecorder):
        left = recorder.close(60.0 if answered else 0.0)
        assert (left == 0) == answered
    return measured


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
