"""The address of a webhook stays in the environment: specs, files and messages have its name."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sweeps import stores
from sweeps.cli.app import app
from sweeps.errors import SpecError
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.stores import deliver_waiting, withheld_variables
from tests.golden.messages import compare_messages
from tests.time_limits import scaled
from tests.unit.sweeps.spec_errors import HEAD, refusal
from tests.unit.sweeps.sweep_factory import MadeSweep
from tests.webhook_server import webhook_server
from tracking.notifications import NotificationQueue
from tracking.outbox import Outbox
from tracking.trusted_stores import StoreUntrusted

NAME = "TEAM_WEBHOOK_URL"
REFERENCE = f"${{{NAME}}}"
CANARY = "canary-T0pS3cret"


@pytest.fixture(autouse=True)
def _no_webhook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)


def _parse(more: str = "", *overrides: str, **environ: str) -> SweepSpec:
    return parse_spec(HEAD + more, "s.yaml", overrides, environ=environ)


@pytest.mark.parametrize(
    ("more", "overrides"),
    [
        (f"notify:\n  webhook: {REFERENCE}\n", []),
        (f"notify: {{webhook: '{REFERENCE}'}}\n", []),
        (f"notify: {{webhook: '${REFERENCE}'}}\n", []),  # as `sweep.yaml` has it
        ("", [f"notify.webhook={REFERENCE}"]),
        ("", [f"notify={{webhook: '{REFERENCE}'}}"]),
    ],
)
def test_spec_keeps_only_the_variables_name(more: str, overrides: list[str]) -> None:
    spec = _parse(more, *overrides, **{NAME: f"https://hooks.example/{CANARY}"})
    assert spec.notify.webhook == REFERENCE
    assert spec.notify.variable == NAME
    text = spec.to_yaml()
    assert CANARY not in text
    assert parse_spec(text, "again").to_yaml() == text


@pytest.mark.parametrize(
    "override",
    [
        f"notify.webhook=https://hooks.example/{CANARY}",
        f"notify=https://hooks.example/{CANARY}",
        f"notify={{webhook: [https://hooks.example/{CANARY}]}}",
        f"notify.webhok=https://hooks.example/{CANARY}",
        f"notify.webhook={{a: {CANARY}}}",
    ],
)
def test_no_message_repeats_an_address(override: str) -> None:
    lines = refusal(HEAD, override)
    assert CANARY not in "\n".join(lines)
    assert "notify" in lines[0]


def test_other_keys_take_no_webhook_from_the_environment() -> None:
    with pytest.raises(SpecError, match="looks like a secret"):
        _parse("", f"tracking.uri={REFERENCE}", **{NAME: f"https://hooks.example/{CANARY}"})


def test_trials_do_not_receive_the_webhook() -> None:
    assert NAME in withheld_variables(_parse(f"notify:\n  webhook: {REFERENCE}\n"))
    assert NAME not in withheld_variables(_parse())


@pytest.mark.parametrize(
    "value",
    [
        None,
        f"hooks.example/{CANARY}",
        f"http://hooks.example/{CANARY}",
        f"https://ada:{CANARY}@hooks.example/x",
        f"ftp://hooks.example/{CANARY}",
    ],
    ids=["not set", "no address", "http elsewhere", "with password", "another scheme"],
)
def test_value_is_refused_before_a_run(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    value: str | None,
) -> None:
    if value is not None:
        monkeypatch.setenv(NAME, value)
    told = set()
    with contextlib.chdir(tmp_path):
        Path("s.yaml").write_text(f"{HEAD}notify:\n  webhook: {REFERENCE}\n")
        for command in ("check", "run"):
            done = CliRunner().invoke(app, [command, "s.yaml"])
            assert (done.exit_code, done.stdout) == (2, "")
            told.add(done.stderr)
        assert os.listdir() == ["s.yaml"]
    [message] = told
    assert CANARY not in message
    compare_messages(request, message.splitlines())


def test_resume_refuses_a_missing_variable(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, more=f"notify:\n  webhook: {REFERENCE}\n")
    made.add("complete", 0.5)
    before = made.paths.spec.read_bytes()
    done = CliRunner().invoke(app, ["resume", "small", "--root", str(tmp_path)])
    assert done.exit_code == 2
    assert NAME in done.stderr
    assert "-s notify.webhook=null" in done.stderr
    assert made.paths.spec.read_bytes() == before
    assert len(made.ledger.attempts) == 0


def test_sync_posts_for_no_other_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = MadeSweep(tmp_path, more=f"notify:\n  webhook: {REFERENCE}\n")
    Outbox(made.paths.outbox).close()
    queue = NotificationQueue(made.paths.outbox)
    queue.add("a", {})
    queue.close()
    with webhook_server() as webhook:
        monkeypatch.setenv(NAME, webhook.url)
        monkeypatch.setattr(stores, "is_ours", lambda _: False)
        with pytest.raises(StoreUntrusted):
            deliver_waiting(made.paths, made.spec, seconds=1.0)
        assert webhook.received == []
        monkeypatch.undo()
        monkeypatch.setenv(NAME, webhook.url)
        assert deliver_waiting(made.paths, made.spec, seconds=scaled(20)) == (0, None)
        assert len(webhook.taken) == 1
