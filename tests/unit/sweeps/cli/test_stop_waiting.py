"""`sweep stop --trial` on a sweep without a driver."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.ledger.ledger import Ledger
from sweeps.sweep_lock import SweepLock
from tests.unit.sweeps.sweep_factory import MadeSweep
from tracking.outbox_status import read_outbox


def _stop(root: Path, number: int, *more: str) -> tuple[int, str]:
    words = ["stop", "small", "--trial", str(number), "--root", str(root), *more]
    done = CliRunner().invoke(app, words)
    return done.exit_code, done.output


@pytest.mark.parametrize("values", [(), (0.5, 0.25)])
def test_trial_of_a_stopped_sweep_ends(tmp_path: Path, values: tuple[float, ...]) -> None:
    sweep = MadeSweep(tmp_path)
    number, other = sweep.add(None, *values), sweep.add(None)
    code, output = _stop(tmp_path, number, "--json")
    assert code == 0, output
    assert json.loads(output)["state"] == "pruned"
    record = Ledger.open(sweep.paths.ledger).trial(number)
    assert (record.state, record.reason) == ("pruned", "stopped by the user")
    assert record.value == (min(values) if values else None)
    assert not Ledger.open(sweep.paths.ledger).trial(other).finished
    assert read_outbox(sweep.paths.outbox).tracked_statuses[number] == "KILLED"
    code, output = _stop(tmp_path, number)
    assert (code, "is pruned already" in output) == (2, True)


def test_trial_is_not_stopped_while_another_holds_the_lock(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path)
    number = sweep.add(None)
    lock = SweepLock(sweep.paths.lock)
    lock.acquire()
    try:  # no driver of that token looks at what is asked
        code, _ = _stop(tmp_path, number, "--timeout", "0s")
    finally:
        lock.release()
    assert code != 0
    assert not Ledger.open(sweep.paths.ledger).trial(number).finished
