"""One attempt of a trial: its pointer, its results, its endings, and pausing."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.chaos.killed_runs import differences, without_measured
from trainable.checkpoint import CheckpointStore
from trainable.config import TrialConfig
from trainable.loop_context import Context
from trainable.processes.trial_run import LEFT_NODE, POINTER, TrialRun
from trainable.store.local import LocalFiles
from trainable.task import Data, Task

EPOCHS = 3
ON_THE_CPU = {"device": "cpu", "precision": "fp32"}


class Small(Task):
    """Two classes of three inputs; ten steps of four samples an epoch.

    Args:
        raises_after: Raises in the first window after this many.
    """

    def __init__(self, *, raises_after: int | None = None) -> None:
        self.raises_after, self.calls = raises_after, 0

    def build_model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def build_data(self) -> Data:
        inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
        tensors = (inputs, torch.arange(40) % 2)
        return Data(train=tensors, val=tensors)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.calls += model.training
        if self.raises_after is not None and self.calls > self.raises_after:
            raise RuntimeError("as the test asks for")
        return super().loss(model, batch)


class Talkative(Small):
    """Prints a line in each window."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        print("what a task may say" * 100, flush=True)
        return super().loss(model, batch)


def own_loop(config: TrialConfig, context: Context) -> Iterator[Any]:
    """Sums up its epochs; receives the whole budget in each process."""
    del config
    total = context.restored["total"] if context.restored else 0
    for epoch in context.remaining_epochs():
        total += epoch + 1
        yield {"val/loss": total / context.epochs}, {"total": total}


def talkative_loop(config: Any, context: Any) -> Iterator[Any]:
    """Prints a secret and raises an error with it."""
    del config, context
    secret = os.environ["STORE_PASSWORD"]
    print(f"logging in as ada with {secret}")
    if True:
        raise RuntimeError(f"postgresql://ada:{secret}@host and {secret} were refused")
    yield


def forgetful_loop(config: TrialConfig, context: Context) -> Iterator[Any]:
    """Yields no state with its last report."""
    for epoch, report in enumerate(own_loop(config, context), context.epoch + 1):
        yield report[0] if epoch == context.epochs else report


def untidy_loop(config: TrialConfig, context: Context) -> Iterator[Any]:
    """Calls sys.exit when it is closed."""
    try:
        yield from own_loop(config, context)
    finally:
        sys.exit("as the test asks for")


@pytest.fixture(autouse=True)
def _on_the_cpu_with_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("set_num_threads", "set_num_interop_threads"):
        monkeypatch.setattr(torch, name, lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def _trial(
    directory: Path,
    *,
    pause_at_epoch: int | None = None,
    report_buffer_seconds: float = 0.0,
    task: str = "Small",
    precision: str = "fp32",
    beats_into: Path | None = None,
    **arguments: Any,
) -> TrialRun:
    config = TrialConfig(
        task={"name": f"{__name__}:{task}", **arguments},
        metric="val/loss",
        mode="min",
        budget={"epochs": EPOCHS},
        train={"batch_size": 4, "precision": precision, "loader": {"num_workers": 1}},
        checkpoint={"every": "4 steps"},
    )
    return TrialRun(
        {
            "number": 0,
            "params": {},
            "config": config.model_dump(mode="json"),
            "pause_at_epoch": pause_at_epoch,
            "report_buffer_seconds": report_buffer_seconds,
            "directory": str(directory),
            "drain": str(directory / "drain"),
            "stop": str(directory / "stop"),
            "leaves": [str(directory / "leaves-a"), str(directory / "leaves-b")],
            "threads": 1,
            "halve_batch": False,
            **({} if beats_into is None else {"heartbeat": str(beats_into)}),
        },
        lambda *_: pytest.fail("a trial of one rank has no others"),
    )


def test_result_has_newest_committed_generation(tmp_path: Path) -> None:
    trial, pointer = _trial(tmp_path), None
    for _ in range(EPOCHS):
        new = trial.step().get(POINTER)
        assert new is None or new != pointer
        pointer = new or pointer
        committed = [g.pointer._asdict() for g in CheckpointStore(tmp_path).generations()]
        assert pointer is None or pointer in committed
    newest = CheckpointStore(tmp_path).newest()
    assert newest is not None
    assert pointer == newest.pointer._asdict()
    assert newest.step == 10 * EPOCHS
    trial.cleanup()


@pytest.mark.parametrize(
    ("task", "saved"), [("Small", True), ("own_loop", True), ("forgetful_loop", False)]
)
def test_last_result_says_whether_all_is_saved(tmp_path: Path, task: str, saved: bool) -> None:
    trial = _trial(tmp_path, task=task)
    *_, last = (trial.step() for _ in range(EPOCHS))
    assert (last["ending"], last["saved"]) == ("finished", saved)
    assert (CheckpointStore(tmp_path).saved_epoch() == EPOCHS) == saved
    trial.cleanup()


def test_set_aside_checkpoint_is_reported_once(tmp_path: Path) -> None:
    first = _trial(tmp_path)
    first.step()
    (tmp_path / "drain").touch()
    assert first.step()["ending"] == "interrupted"
    first.cleanup()
    (tmp_path / "drain").unlink()
    *_, sound, newest = CheckpointStore(tmp_path).generations()
    state = newest.path / "state.pt"
    state.write_bytes(state.read_bytes()[:-1] + b"?")

    second = _trial(tmp_path)
    results = [second.step() for _ in range(EPOCHS - 1)]
    second.cleanup()
    assert [result.get("resolved") for result in results] == [ON_THE_CPU, None]
    (told,) = results[0]["set_aside"]
    assert told.startswith(f"checkpoint {newest.path.name} is damaged and was set aside: {state} ")
    assert told.endswith(f"its manifest says {newest.sha256}; {sound.path.name} is used instead")
    assert "set_aside" not in results[1]
    assert (tmp_path / "trial.log").read_text().count(told) == 1


def test_trial_saves_at_the_step_after_a_notice_of_any_of_its_nodes(tmp_path: Path) -> None:
    first = _trial(tmp_path)
    epoch = first.step()["step"]
    (tmp_path / "leaves-b").touch()
    assert first.step()["ending"] == LEFT_NODE
    first.cleanup()
    newest = CheckpointStore(tmp_path).newest()
    assert newest is not None
    assert newest.step == epoch + 1
    (tmp_path / "drain").touch()  # the sweep stops: it is not placed again
    second = _trial(tmp_path)
    assert second.step()["ending"] == "interrupted"
    second.cleanup()


def test_early_failure_reports_its_device(tmp_path: Path) -> None:
    trial = _trial(tmp_path, raises_after=1)
    result = trial.step()
    trial.cleanup()
    assert (result["ending"], result["resolved"]) == ("failed", ON_THE_CPU)


def test_reasons_tracebacks_and_logs_hold_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_PASSWORD", "canary-1234")
    trial = _trial(tmp_path, task="talkative_loop")
    result = trial.step()
    trial.cleanup()
    failure = result["failure"]
    assert failure["reason"] == (
        "RuntimeError: postgresql://[hidden]@host and [hidden] were refused"
    )
    log = (tmp_path / "trial.log").read_text()
    assert "logging in as ada with [hidden]\n" in log
    assert failure["traceback"] in log
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert b"canary" not in b"".join([*written, json.dumps(result, default=repr).encode()])


def _fill(file: Any) -> None:
    """Make each write to an open file fail with ENOSPC."""
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), file.fileno())


def test_full_disk_is_a_storage_failure(tmp_path: Path) -> None:
    trial = _trial(tmp_path, task="Talkative")
    trial.step()
    _fill(trial._trainer._history._file)
    _fill(trial._log)
    result = trial.step()
    trial.cleanup()
    assert (result["ending"], result["failure"]["kind"]) == ("failed", "storage")


@pytest.mark.parametrize("opened", [True, False])
def test_full_disk_of_the_log_ends_no_trial(tmp_path: Path, opened: bool) -> None:
    if not opened:
        (tmp_path / "trial.log").mkdir()
    trial = _trial(tmp_path, task="Talkative")
    results = [trial.step()]
    if opened:
        _fill(trial._log)
    results += [trial.step(), trial.step()]
    trial.cleanup()
    assert [result.get("ending") for result in results] == [None, None, "finished"]


@pytest.mark.parametrize("task", ["Small", "own_loop"])
def test_paused_and_resumed_trial_equals_uninterrupted(tmp_path: Path, task: str) -> None:
    once, paused = _trial(tmp_path / "once", task=task), tmp_path / "paused"
    expected = [once.step() for _ in range(EPOCHS)]
    once.cleanup()
    results = []
    for pause in (1, 2, None):
        trial = _trial(paused, pause_at_epoch=pause, task=task)
        results.append(trial.step())
        files = LocalFiles.of(paused)
        assert not files.has_writer(), "whoever goes on with it need not fence this process"
        newest = CheckpointStore(paused).newest()
        assert newest is not None
        assert newest.epoch == results[-1]["epoch"], "it goes on from where it paused"
        trial.cleanup()
    assert [r["ending"] for r in results] == ["paused", "paused", "finished"]
    assert [_report_of(r) for r in results] == [_report_of(r) for r in expected]
    stores = CheckpointStore(tmp_path / "once"), CheckpointStore(paused)
    first, second = (store.load(store.generations()[-1]) for store in stores)
    assert differences(without_measured(first), without_measured(second)) == []


def test_buffered_reports_equal_single_reports(tmp_path: Path) -> None:
    each = _trial(tmp_path / "each")
    expected = [each.step() for _ in range(EPOCHS)]
    each.cleanup()
    together = _trial(tmp_path / "together", report_buffer_seconds=60.0)
    result = together.step()
    together.cleanup()
    reports = [*result["earlier"], result]
    assert list(map(_report_of, reports)) == list(map(_report_of, expected))
    for one, other in zip(reports, expected, strict=True):
        assert one["signals"] == other["signals"]
    assert (result["ending"], result["resolved"]) == ("finished", ON_THE_CPU)
    assert "earlier" not in expected[0]


def test_last_result_contains_buffered_reports(tmp_path: Path) -> None:
    fails = _trial(tmp_path / "fails", report_buffer_seconds=60.0, raises_after=25)
    result = fails.step()
    fails.cleanup()
    assert result["ending"] == "failed"
    assert "objective" not in result
    assert [report["epoch"] for report in result["earlier"]] == [1, 2]

    pauses = _trial(tmp_path / "pauses", report_buffer_seconds=60.0, pause_at_epoch=2)
    result = pauses.step()
    pauses.cleanup()
    assert (result["ending"], result["epoch"]) == ("paused", 2)
    assert [report["epoch"] for report in result["earlier"]] == [1]


@pytest.mark.parametrize("pause", [1, 2])
def test_trial_at_or_past_its_pause_is_reported_by_the_next_worker(
    tmp_path: Path, pause: int
) -> None:
    ahead = _trial(tmp_path, pause_at_epoch=2)
    before = [ahead.step(), ahead.step()][-1]
    ahead.cleanup()
    again = _trial(tmp_path, pause_at_epoch=pause)
    found = again.step()
    again.cleanup()
    assert (found["ending"], _report_of(found)) == ("paused", _report_of(before))
    assert "signals" not in found, "it has no new rows"


def _report_of(result: dict[str, Any]) -> tuple[Any, ...]:
    return result["epoch"], result["step"], result["objective"]


def test_node_without_the_sweep_directory_fails(tmp_path: Path) -> None:
    trial = _trial(tmp_path / "sweep" / "trials" / "0000")
    failure = trial.step()["failure"]
    trial.cleanup()
    assert failure["kind"] == "storage"
    told = f"{tmp_path}/sweep/trials is not seen on {socket.gethostname()} (No such file or "
    assert told in failure["reason"]
    assert not (tmp_path / "sweep").exists()


def test_failing_clean_up_is_logged_only(tmp_path: Path) -> None:
    trial = _trial(tmp_path, task="untidy_loop")
    results = [trial.step() for _ in range(EPOCHS)]
    trial.cleanup()
    assert [result.get("ending") for result in results] == [None, None, "finished"]
    assert (tmp_path / "trial.log").read_text().count(": as the test asks for\n") == 1


WORKER = """
import time
from trainable.adapters import ray_ranks
ray_ranks._POLL_SECONDS, ray_ranks._GRACE_SECONDS = 0.05, 0.1
ray_ranks.exit_with_raylet()
print("ready", flush=True)
time.sleep(60)
"""


def test_worker_exits_after_its_raylet() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as raylet,
        subprocess.Popen(  # not from its raylet: a worker may be the fork of another process
            [sys.executable, "-c", WORKER],
            env={**os.environ, "RAY_RAYLET_PID": str(raylet.pid)},
            stdout=subprocess.PIPE,
            text=True,
        ) as worker,
    ):
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        time.sleep(0.5)
        assert worker.poll() is None, "it ended beside its raylet"
        raylet.kill()
        assert worker.wait(20) == 1, "it outlived its raylet"


def test_worker_that_never_trains_leaves_heartbeat(tmp_path: Path) -> None:
    """Tune may give the trial to another worker, which then has the file."""
    beats = tmp_path / "beats"
    beats.write_bytes(b"another worker's")
    _trial(tmp_path, beats_into=beats).cleanup()
    assert beats.read_bytes() == b"another worker's"


def test_trial_without_a_heartbeat_does_not_train(tmp_path: Path) -> None:
    """The driver would not see it hang."""
    trial = _trial(tmp_path, beats_into=tmp_path / "missing/beats")
    failure = trial.step()["failure"]
    trial.cleanup()
    assert (failure["kind"], failure["errno"]) == ("storage", errno.ENOENT)
    assert "missing/beats cannot be written" in failure["reason"]


def test_blocked_clean_up_ends_the_worker() -> None:
    """Even if it holds the interpreter lock: nobody else watches a worker that ends."""
    code = (
        "import re\nfrom trainable.processes import trial_run\ntrial_run._PATIENCE_SECONDS = 0.3\n"
        "with trial_run._exit_when_late():\n    re.match('(a+)+$', 60 * 'a' + 'b')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "most recent call first" in done.stderr
