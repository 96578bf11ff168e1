"""Notifications leave the queue once the webhook took them, and nothing waits for a webhook."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.time_limits import Deadline, scaled
from tests.webhook_server import WebhookServer, webhook_server
from tracking import notifications
from tracking.notifications import NotificationDelivery, NotificationQueue
from tracking.outbox import Outbox
from tracking.outbox_file import OutboxError
from tracking.outbox_status import read_outbox


@pytest.fixture
def outbox(tmp_path: Path) -> Path:
    Outbox(tmp_path / "outbox").close()
    return tmp_path / "outbox"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "_FIRST_DELAY_SECONDS", 0.02)


def _queue(outbox: Path, *keys: str) -> NotificationQueue:
    queue = NotificationQueue(outbox)
    for key in keys:
        queue.add(key, {"id": key})
    return queue


def _deliver(outbox: Path, webhook: WebhookServer, *keys: str) -> tuple[int, str | None]:
    """Queue notifications, deliver, and return what waits and why."""
    return NotificationDelivery(_queue(outbox, *keys), webhook.url).close(scaled(20))


def _until(condition: Callable[[], object]) -> None:
    deadline = Deadline(30)
    while not condition():
        assert not deadline.passed
        time.sleep(0.01)


def _ids(webhook: WebhookServer) -> list[str]:
    return [body["id"] for body in webhook.taken]


def test_each_id_is_delivered_once(outbox: Path) -> None:
    with webhook_server() as webhook:
        assert _deliver(outbox, webhook, "a", "b", "a") == (0, None)
        assert _deliver(outbox, webhook, "b", "c") == (0, None)
    assert _ids(webhook) == ["a", "b", "c"]
    assert read_outbox(outbox).notifications == 0
    with sqlite3.connect(outbox / "outbox.db") as db:
        assert db.execute("SELECT DISTINCT body FROM notifications").fetchall() == [("",)]


def test_notifications_do_not_count_as_records(outbox: Path) -> None:
    _queue(outbox, "a").close()
    queue = Outbox(outbox)
    assert queue.pending == 0
    assert queue.trials() == []
    queue.set_target("elsewhere", gone=True)
    queue.close()
    assert (read_outbox(outbox).pending, read_outbox(outbox).notifications) == (0, 1)


def test_webhook_that_was_down_gets_all_later(outbox: Path) -> None:
    with webhook_server() as webhook:
        port = webhook.port
    delivery = NotificationDelivery(_queue(outbox, "a"), webhook.url)
    _until(lambda: delivery._reason)
    delivery.add("b", {"id": "b"})
    with webhook_server(port) as webhook:
        _until(lambda: len(webhook.taken) == 2)
        assert delivery.close(scaled(20)).waiting == 0
    assert _ids(webhook) == ["a", "b"]


def test_refused_notification_holds_up_no_other(outbox: Path) -> None:
    with webhook_server() as webhook:
        webhook.answer = lambda body: 400 if body["id"] == "a" else 204
        waiting, reason = _deliver(outbox, webhook, "a", "b")
        assert (waiting, _ids(webhook)) == (1, ["b"])
        assert "400" in str(reason)
        assert len(webhook.received) == 2
        webhook.answer = lambda _: 204
        assert _deliver(outbox, webhook) == (0, None)  # the next command tries again
    assert _ids(webhook) == ["b", "a"]


@pytest.mark.parametrize("status", [302, 404, 500])
def test_close_gives_up_soon(outbox: Path, status: int) -> None:
    with webhook_server() as webhook:
        webhook.answer = lambda _: status
        started = time.monotonic()
        waiting, reason = _deliver(outbox, webhook, "a")
        assert time.monotonic() - started < scaled(10)
    assert waiting == 1
    assert str(status) in str(reason)
    assert len(webhook.received) <= 3
    assert read_outbox(outbox).notifications == 1


def test_hanging_webhook_blocks_nothing(outbox: Path) -> None:
    answers = threading.Event()

    def wait(_: object) -> int:
        answers.wait(120)
        return 204

    with webhook_server() as webhook:
        webhook.answer = wait
        try:
            delivery = NotificationDelivery(_queue(outbox, "a"), webhook.url)
            started = time.monotonic()
            for number in range(100):
                delivery.add(str(number), {})
            assert delivery.close(0.5).waiting == 101
            assert time.monotonic() - started < scaled(5)
        finally:
            answers.set()


def test_planted_notification_is_an_error(outbox: Path) -> None:
    queue = _queue(outbox)
    with sqlite3.connect(outbox / "outbox.db") as db:
        db.execute("INSERT INTO notifications VALUES ('a', 0, x'00ff')")
    with pytest.raises(OutboxError, match="no text"):
        queue.waiting()
    queue.close()
