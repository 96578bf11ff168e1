"""When a Ray counts as lost, and who learns of it."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Event
from typing import NoReturn

import pytest

from sweeps.engine import local_ray, ray_watch
from sweeps.engine.local_ray import _Node
from sweeps.engine.ray_watch import Loss, watched
from tests.integration.commandline import wait_until


class Left(BaseException):
    """Stands for the end of the process."""


class Watched:
    """A Ray whose loss is set by a test."""

    def __init__(self) -> None:
        self.loss: Loss | None = None
        self.causes: list[str] = []
        self.left, self.disconnected = Event(), Event()

    def lost(self, cause: str) -> NoReturn:
        self.causes.append(cause)
        self.left.set()
        raise Left


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(ray_watch, "_POLL_SECONDS", 0.01)
    return Watched()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("loss", "cause"),
    [(Loss("gone"), "gone"), (Loss("silent", 0.1), "silent, for 0.1 s")],
)
def test_loss_is_reported_once_its_patience_is_over(ray: Watched, loss: Loss, cause: str) -> None:
    with watched(lambda: ray.loss, ray.lost, ray.disconnected.set):
        ray.loss = loss
        assert ray.left.wait(30)
    assert ray.causes == [cause]


def test_loss_that_passes_is_none(ray: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    # Between two checks an hour has passed, as in a driver that was suspended.
    clock = iter(range(0, 10**9, 3600))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    seen = Event()
    answers = iter([Loss("silent", 20.0)] * 3 + [None])

    def find_loss() -> Loss | None:
        if (answer := next(answers, None)) is None:
            seen.set()
        return answer

    with watched(find_loss, ray.lost, ray.disconnected.set):
        assert seen.wait(30)
    assert ray.causes == []
    assert ray.disconnected.is_set()


def test_error_of_a_lost_ray_is_its_loss(ray: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_watch, "_POLL_SECONDS", 60.0)
    with pytest.raises(ValueError, match="own"), watched(lambda: None, ray.lost, lambda: None):
        raise ValueError("own")
    with pytest.raises(Left), watched(lambda: Loss("gone"), ray.lost, lambda: None):
        raise ValueError("a consequence")
    assert ray.causes == ["gone"]


@pytest.fixture
def processes() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    with ExitStack() as stack:
        started = {
            kind: stack.enter_context(subprocess.Popen(["sleep", "600"]))
            for kind in ("gcs_server", "raylet")
        }
        yield started
        for process in started.values():
            process.kill()


def _cause(node: _Node) -> str:
    loss = node.find_loss()
    return "" if loss is None else loss.cause


@pytest.mark.parametrize("kind", ["gcs_server", "raylet"])
@pytest.mark.parametrize(
    ("number", "how", "patience"),
    [
        (signal.SIGKILL, r"ended by signal 9 (SIGKILL)", 0.0),
        (signal.SIGSTOP, "was stopped (SIGSTOP)", ray_watch.PATIENCE_SECONDS),
    ],
)
def test_process_of_a_local_ray_that_does_not_run_is_its_loss(
    processes: dict[str, subprocess.Popen[bytes]],
    kind: str,
    number: int,
    how: str,
    patience: float,
) -> None:
    node = _Node()
    for each, process in processes.items():
        node.started(each, process)
    assert node.find_loss() is None
    processes[kind].send_signal(number)
    wait_until(lambda: node.find_loss() is not None)
    assert _cause(node).startswith(f"Ray is lost: its process {kind}, ")
    assert _cause(node).endswith(how)
    assert (node.find_loss() or Loss("")).patience == patience
    node.ends = True
    assert _cause(node) == "Ray is lost: its processes did not end"


def test_gcs_server_that_closed_its_port_is_a_loss(
    processes: dict[str, subprocess.Popen[bytes]],
) -> None:
    node = _Node()
    node.started("gcs_server", processes["gcs_server"])
    node.address = "127.0.0.1:1"
    assert "gcs_server, " in _cause(node)
    assert "does not answer (Connection refused)" in _cause(node)


def test_loss_while_ray_starts_names_what_the_machine_lacks(
    processes: dict[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ray, "shortages", lambda: ["/tmp is full", "ulimit -n is 64"])
    node = _Node()
    node.started("raylet", processes["raylet"])
    assert node.find_loss() is None
    processes["raylet"].kill()
    wait_until(lambda: node.find_loss() is not None)
    assert _cause(node).endswith("signal 9 (SIGKILL); /tmp is full; ulimit -n is 64")
    node.address = "127.0.0.1:1"
    assert _cause(node).endswith("signal 9 (SIGKILL)")
