"""A driver that ends with an error notifies of it; one that is offline only queues."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sweeps.errors import LedgerError, LockLost
from sweeps.run import driver as run
from sweeps.run import session
from tests.unit.sweeps.sweep_factory import MadeSweep, RunsNoTrial, prepared
from tests.webhook_server import SECRET, WebhookServer, webhook_server
from tracking.outbox_status import read_outbox
from tracking.recorder import Recorder

NAME = "TEAM_WEBHOOK_URL"


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebhookServer]:
    with webhook_server() as server:
        monkeypatch.setenv(NAME, server.url)
        yield server


@pytest.fixture(autouse=True)
def _start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither Ray nor what delivers to MLflow."""
    opened = session.open_recorder

    def without_delivery(*arguments: Any, **options: Any) -> Recorder:
        return opened(*arguments, **{**options, "environment": None})

    monkeypatch.setattr(session, "open_recorder", without_delivery)
    monkeypatch.setattr(session, "_find_lost_runs", lambda *_: None)
    monkeypatch.setattr(run.local_ray, "configure", lambda _: None)


@pytest.fixture
def made(tmp_path: Path) -> MadeSweep:
    made = MadeSweep(tmp_path, more=f"notify:\n  webhook: ${{{NAME}}}\n")
    for value in (0.5, 0.4, 0.6):
        made.add("complete", value)
    return made


def _resume(made: MadeSweep, *, offline: bool = False) -> None:
    ready = prepared(made.paths, made.spec, offline=offline)
    run.run_sweep(ready, RunsNoTrial(), lambda _: None)


def _raise(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run_and_finalize(self: object, tell: Any) -> None:
        del self, tell
        raise error

    monkeypatch.setattr(run._Driver, "run_and_finalize", run_and_finalize)


@pytest.mark.parametrize("error", [LedgerError("the disk is full"), OSError("the disk is full")])
def test_error_of_driver_is_notified(
    made: MadeSweep, webhook: WebhookServer, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    _raise(monkeypatch, error)
    with pytest.raises(type(error)):
        _resume(made)
    body = webhook.taken[-1]
    assert (body["event"], body["reason"]) == ("failed", "the disk is full")
    assert read_outbox(made.paths.outbox).notifications == 0


def test_driver_that_lost_its_lock_notifies_of_nothing(
    made: MadeSweep, webhook: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _raise(monkeypatch, LockLost("another driver has it"))
    with pytest.raises(LockLost):
        _resume(made)
    assert "failed" not in [body["event"] for body in webhook.taken]


def test_offline_driver_contacts_no_webhook(made: MadeSweep, webhook: WebhookServer) -> None:
    _resume(made, offline=True)
    assert webhook.received == []
    assert read_outbox(made.paths.outbox).notifications >= 1
    for file in made.paths.directory.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()
