"""Row 35: the tracking store loses records between two attempts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.chaos.invariants import SERIAL, References, Sandbox, assert_all, assert_ended


@pytest.mark.chaos
@pytest.mark.fault(35, "the store is rolled back or emptied between an interruption and a resume")
@pytest.mark.parametrize("how", ["rolled back", "emptied"])
def test_row_35_store_lost_before_a_resume(
    tmp_path: Path, references: References, how: str
) -> None:
    sandbox = Sandbox(tmp_path / "sweep", SERIAL)
    try:
        store, older = sandbox.paths.root / "mlflow.db", tmp_path / "older.db"
        driver, _ = sandbox.run_to("forward", 10)
        driver.until(lambda: sandbox.cli.json("status", "chaos")["outbox_pending"] == 0)
        shutil.copy(store, older)
        later = sandbox.probe.hold("forward", 40)
        sandbox.probe.release("forward-10")
        driver.until_held(later)
        driver.until(lambda: sandbox.cli.json("status", "chaos")["outbox_pending"] == 0)
        driver.power_off()
        sandbox.probe.release(later)
        if how == "rolled back":
            shutil.copy(older, store)
        else:
            store.unlink()
        ended = sandbox.resume_to_end()
        verified = sandbox.start("sync", "chaos", "--verify").wait()
        assert_ended(verified, 0)
        assert_all(sandbox, references.of(SERIAL), ended)
        again = sandbox.start("sync", "chaos", "--verify").wait()
        assert_ended(again, 0, "nothing is missing in the tracking store")
    finally:
        sandbox.close()


@pytest.mark.chaos
@pytest.mark.fault(35, "the store of a finished sweep is rolled back")
def test_row_35_store_of_a_finished_sweep(tmp_path: Path, references: References) -> None:
    sandbox = Sandbox(tmp_path / "sweep", SERIAL)
    try:
        store, older = sandbox.paths.root / "mlflow.db", tmp_path / "older.db"
        driver, _ = sandbox.run_to("forward", 30)
        driver.until(lambda: sandbox.cli.json("status", "chaos")["outbox_pending"] == 0)
        shutil.copy(store, older)
        sandbox.probe.release("forward-30")
        ended = driver.wait()
        shutil.copy(older, store)
        verified = sandbox.start("sync", "chaos", "--verify").wait()
        assert_ended(verified, 0, "missing in the tracking store, and sent again")
        assert_all(sandbox, references.of(SERIAL), ended)
    finally:
        sandbox.close()
