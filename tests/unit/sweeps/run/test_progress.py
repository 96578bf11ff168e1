"""Hang detection: by the workers' heartbeats, on the driver's clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sweeps.paths import SweepPaths
from sweeps.run.worker_watch import ProgressWatch, TrialClock
from sweeps.spec.spec import parse_spec
from sweeps.spec.trial_run import rank_timeout
from tests.integration.commandline import TINY
from tests.time_limits import Deadline
from trainable.watch import heartbeat
from trainable.watch.heartbeat import Heartbeat


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def paths(tmp_path: Path) -> SweepPaths:
    paths = SweepPaths(tmp_path, "small")
    paths.control.mkdir(parents=True)
    return paths


def _wait(watch: ProgressWatch, clock: _Clock, seconds: float, *, step: float = 1.0) -> list[str]:
    """Look every second, or every other; return what hangs at the end."""
    found = []
    for _ in range(int(seconds / step)):
        clock.now += step
        found = [hang.what for hang in watch.look([3])]
    return found


@pytest.mark.parametrize(
    ("timeout", "slowest", "sound", "hung"),
    [
        pytest.param(30.0, 1.0, 29, 3, id="as the spec says"),
        pytest.param(None, 1.0, 598, 4, id="at least ten minutes"),
        pytest.param(None, 60.0, 1198, 4, id="twenty times the slowest step"),
    ],
)
def test_trial_hangs_after_step_timeout_without_progress(
    paths: SweepPaths, timeout: float | None, slowest: float, sound: int, hung: int
) -> None:
    clock = _Clock()
    pulse, watch = Heartbeat(paths.heartbeat(3), clock), ProgressWatch(paths, timeout, clock)
    with pulse.at_work():
        pulse.beat("step")
        clock.now += slowest
        pulse.beat("step")
        assert _wait(watch, clock, sound) == []
        assert _wait(watch, clock, hung) == ["step"]
        pulse.beat("step")
        assert _wait(watch, clock, 2) == []
    assert _wait(watch, clock, 598) == []  # it waits to be told what to do next
    assert _wait(watch, clock, 5) == ["wait for its next step"]


@pytest.mark.parametrize("computes", [0.0, 0.95])
@pytest.mark.parametrize(
    ("timeout", "slowest", "limit", "waits"),
    [
        pytest.param(8.0, 1.0, 8, 8, id="seconds"),
        pytest.param(7200.0, 1.0, 7200, 7200, id="hours"),
        pytest.param(None, 200.0, 4000, 1800, id="null, slow steps"),
        pytest.param(None, None, 6 * 3600, 1800, id="null, first step"),
    ],
)
def test_lost_rank_is_known_before_the_trial_hangs(
    paths: SweepPaths,
    timeout: float | None,
    slowest: float | None,
    limit: int,
    waits: int,
    computes: float,
) -> None:
    """However long the first rank has computed before it waits for the lost one."""
    clock = _Clock()
    pulse, watch = Heartbeat(paths.heartbeat(3), clock), ProgressWatch(paths, timeout, clock)
    watch.begin(3, 2)
    assert rank_timeout(timeout) == waits
    with pulse.at_work():
        kind = "step" if slowest else "save"  # of which none has ended
        pulse.beat(kind)
        clock.now += slowest or 0
        pulse.beat(kind)
        assert _wait(watch, clock, computes * limit + waits, step=2.0) == []
        assert _wait(watch, clock, limit * (1 - computes) + 6, step=2.0) == [kind]
        clock.now += 1
        (hang,) = watch.look([3])
    assert (hang.limit, hang.rank_wait) == (limit, waits)
    assert "to wait for its other ranks" in hang.reason
    watch.begin(3, 1)  # a resume with one process
    with pulse.at_work():
        pulse.beat(kind)
        assert _wait(watch, clock, limit + 6, step=2.0) == [kind]


@pytest.mark.parametrize(("timeout", "waits"), [(8.0, 600), (900.0, 900)])
def test_opening_of_a_trial_outlasts_the_meeting_of_its_ranks(
    paths: SweepPaths, timeout: float, waits: int
) -> None:
    """Also where it goes on with smaller micro-batches, and opens again."""
    clock, opening = _Clock(), max(timeout, 600)
    pulse, watch = Heartbeat(paths.heartbeat(3), clock), ProgressWatch(paths, timeout, clock)
    watch.begin(3, 2)
    with pulse.at_work():
        assert _wait(watch, clock, opening + waits - 2, step=2.0) == []
        pulse.beat("step")
        pulse.beat(heartbeat.OPENING)
        assert _wait(watch, clock, opening + waits - 2, step=2.0) == []
        assert _wait(watch, clock, 6, step=2.0) == [heartbeat.OPENING]


def test_paused_driver_does_not_report_a_hang(paths: SweepPaths) -> None:
    clock = _Clock()
    pulse, watch = Heartbeat(paths.heartbeat(3), clock), ProgressWatch(paths, 30.0, clock)
    with pulse.at_work():
        pulse.beat("step")
        assert _wait(watch, clock, 2) == []
        clock.now += 3600
        assert watch.look([3]) == []


def test_stopped_process_is_no_hang_and_held_gil_is(
    paths: SweepPaths,
) -> None:
    code = (
        "import re, sys\nfrom trainable.watch import heartbeat\n"
        "heartbeat.watch(sys.argv[1], open(sys.argv[2], 'w'))\n"
        "with heartbeat.at_work():\n    heartbeat.beat('step')\n    heartbeat.beat('step')\n"
        "    re.match('(a+)+$', 60 * 'a' + 'b')\n"
    )
    log = paths.control / "trial.log"
    worker = subprocess.Popen([sys.executable, "-c", code, paths.heartbeat(3), log])
    try:
        _until(lambda: getattr(heartbeat.read(paths.heartbeat(3)), "beats", 0) == 2)
        clock = _Clock()
        watch = ProgressWatch(paths, 30.0, clock)
        worker.send_signal(signal.SIGSTOP)
        _until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)
        assert _wait(watch, clock, 200) == []
        worker.send_signal(signal.SIGCONT)
        _until(lambda: psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED)
        assert _wait(watch, clock, 40) == ["step"]
        assert watch.end(3)
        assert worker.wait(30) == -signal.SIGKILL
        assert "most recent call first" in log.read_text()
        assert not watch.end(3)
    finally:
        worker.kill()
        worker.wait()


def test_process_with_a_reused_pid_is_not_killed(
    paths: SweepPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    born = psutil.Process().create_time()
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: born - 3600)
    pulse = Heartbeat(paths.heartbeat(3))
    with pulse.at_work():
        monkeypatch.undo()
    assert not ProgressWatch(paths, 1.0).end(3)  # it would have been this one
    assert heartbeat.read(paths.heartbeat(3)).pid == os.getpid()  # type: ignore[union-attr]


@pytest.mark.parametrize("when", ["later", "earlier", "earlier, and it has worked"])
def test_dropped_worker_leaves_the_heartbeat(paths: SweepPaths, when: str) -> None:
    """Tune may prepare two workers for a trial, and drops either."""
    path, clock = paths.heartbeat(3), _Clock()
    dropped, pulse, watch = Heartbeat(path), Heartbeat(path), ProgressWatch(paths, 30.0, clock)
    if "worked" in when:
        with dropped.at_work():
            pass
    with pulse.at_work():
        pulse.beat("step")
        (dropped if "earlier" in when else Heartbeat(path)).close()
        assert _wait(watch, clock, 40) == ["step"]
    pulse.close()
    assert heartbeat.read(path) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30m", 1800.0), ("5", 5.0), ("1.5", 1.5), ("off", "off"), ("null", None)],
)
def test_step_timeout_is_a_duration(text: str, seconds: object) -> None:
    spec = parse_spec(f"{TINY}\nfailures: {{step_timeout: {text}}}\n", "s.yaml")
    assert spec.failures.step_timeout == seconds


def _until(condition: Callable[[], bool]) -> None:
    deadline = Deadline(60)
    while not condition():
        assert not deadline.passed
        time.sleep(0.02)


def test_time_without_a_worker_does_not_count() -> None:
    now = 100.0
    clock = TrialClock(lambda: now)
    assert clock.seconds(3) is None, "no worker trained it"
    clock.start(3)
    now += 5
    assert clock.seconds(3) == 5
    clock.stop(3)
    now += 60  # it waits at a rung
    clock.stop(3)
    assert clock.seconds(3) == 5
    clock.start(3, before=1.0)
    now += 2
    assert clock.seconds(3) == 7, "what this driver counted is newer than the ledger"


def test_time_of_earlier_drivers_counts() -> None:
    now = 0.0
    clock = TrialClock(lambda: now)
    clock.start(0, before=12.5)
    now += 1
    assert clock.seconds(0) == 13.5
    clock.start(0)  # its worker was lost and replaced
    assert clock.seconds(0) == 13.5
