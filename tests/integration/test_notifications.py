"""Notifications of real sweeps: each event once, whatever happens to driver and webhook."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.commandline import TINY, CommandLine, wait_until
from tests.time_limits import scaled
from tests.webhook_server import SECRET, WebhookServer, webhook_server
from tracking.outbox_status import read_outbox

pytestmark = pytest.mark.usefixtures("store")

NAME = "TEAM_WEBHOOK_URL"
NOTIFY = f"notify:\n  webhook: ${{{NAME}}}\n"
TASK = """
import os, json
from pathlib import Path

def run(config, context):
    Path(os.environ["SEEN"], f"{os.getpid()}.json").write_text(json.dumps(dict(os.environ)))
    yield {"val/loss": config.train.optimizer.lr}
"""
LOOP = re.sub(r"  train\.(schedule|clip).*\n", "", TINY)
LOOP = LOOP.replace("{name: digits, model: mlp, width: 32}", "loops:run")


@pytest.fixture
def webhook(cli: CommandLine) -> Iterator[WebhookServer]:
    with webhook_server() as server:
        cli.environment[NAME] = server.url
        yield server


def _events(bodies: list[dict[str, Any]]) -> list[str]:
    return [body["event"] for body in bodies]


def _assert_unique(bodies: list[dict[str, Any]]) -> None:
    assert max(Counter(body["id"] for body in bodies).values()) == 1


def _holding_secret(directory: Path) -> list[str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert len(files) > 10
    return [str(path) for path in files if SECRET.encode() in path.read_bytes()]


def test_sweep_notifies_and_hides_the_address(cli: CommandLine, webhook: WebhookServer) -> None:
    cli.environment["SEEN"] = str(cli.directory / "seen")
    (cli.directory / "seen").mkdir()
    cli.write("loops.py", TASK)
    cli.write("tiny.yaml", LOOP + NOTIFY)
    run = cli("run", "tiny.yaml")
    assert run.returncode == 0, run.stderr
    trials = cli.json("trials", "small")
    best, *_ = sorted(trials, key=lambda trial: trial["value"])
    bodies = webhook.taken
    _assert_unique(bodies)
    assert set(_events(bodies)) == {"new_best", "finished"}
    bests = [body for body in bodies if body["event"] == "new_best"]
    assert bests[0]["trial"] == 0
    for body in (bests[-1], bodies[-1]):
        assert (body["trial"], body["value"]) == (best["number"], best["value"])
        assert body["params"] == best["params"]
    assert bodies[-1]["event"] == "finished"
    assert bodies[-1]["trials"] == {"complete": 2, "pruned": 0, "failed": 0}

    again = cli("resume", "small")  # nothing is left to do, and nothing is news
    assert _events(webhook.taken).count("finished") == 1
    _assert_unique(webhook.taken)
    shown = [cli(*words.split()) for words in ("status small", "show small 0", "sync small")]
    printed = [each.stdout + each.stderr for each in (run, again, *shown)]
    assert not [text for text in printed if SECRET in text]
    assert _holding_secret(cli.directory) == []
    assert list((cli.directory / "seen").iterdir())
    assert f'webhook: "$${{{NAME}}}"' in (cli.root / "small/sweep.yaml").read_text()


@pytest.mark.chaos
def test_killed_driver_leaves_its_events_to_the_next(
    cli: CommandLine, webhook: WebhookServer
) -> None:
    cli.write("tiny.yaml", TINY.replace("trials: 2", "trials: 3") + NOTIFY)
    driver = cli.popen("run", "tiny.yaml", stdout=-3)

    def kill_the_driver(body: dict[str, Any]) -> int:
        assert body["event"] == "new_best"
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        webhook.answer = lambda _: 204
        return 503  # nobody hears it: the outcome is unknown to the next driver

    webhook.answer = kill_the_driver
    assert driver.wait(scaled(120)) == -signal.SIGKILL
    assert read_outbox(cli.root / "small/outbox").notifications >= 1
    wait_until(lambda: webhook.received)
    cli.ok("resume", "small")
    _assert_unique(webhook.taken)
    lost, *_ = webhook.received
    assert lost.body in webhook.taken
    assert {"new_best", "finished"} == set(_events(webhook.taken))
    assert read_outbox(cli.root / "small/outbox").notifications == 0
