"""The example of the README: the quality of its best trial, and the memory of its driver."""

from __future__ import annotations

import psutil
import pytest

from sweeps.spec.spec import load_with_positions
from tests.integration.commandline import CommandLine, wait_until
from trainable.store.metrics_file import read_rows

EXAMPLE = "sweeps/examples/digits.yaml"


@pytest.mark.chaos
def test_best_of_example_and_driver_memory(cli: CommandLine) -> None:
    spec = load_with_positions(cli.project / EXAMPLE)[0]
    driver = cli.start("run", str(cli.project / EXAMPLE))
    process, peak = psutil.Process(driver.pid), 0

    def over() -> bool:
        nonlocal peak
        if driver.poll() is None and process.status() != psutil.STATUS_ZOMBIE:
            peak = max(peak, process.memory_info().rss)
        return driver.poll() is not None

    wait_until(over, seconds=240)
    assert driver.returncode == 0
    assert peak < 700 * 2**20
    status = cli.json("status", "digits")
    assert status["state"] == "finished"
    assert sum(status["trials"].values()) == spec.trials == 24
    rows = read_rows(cli.root / f"digits/trials/{status['best']['number']:04d}")
    metrics_at_best = min(
        (r.metrics for r in rows if "val/loss" in r.metrics), key=lambda m: m["val/loss"]
    )
    assert metrics_at_best["val/loss"] == status["best"]["value"]
    assert metrics_at_best["val/accuracy"] >= 0.97


def test_starter_files_run_unchanged(cli: CommandLine) -> None:
    printed = cli.ok("init", "mine")
    assert printed.splitlines()[-1] == "run it with: cd mine && sweep run sweep.yaml"
    inside = CommandLine(cli.directory / "mine")
    assert "is valid" in inside.ok("check", "sweep.yaml")
    inside.ok("run", "sweep.yaml", "-s", "trials=1", "-s", "budget.epochs=2")
    assert inside.json("status", "my_sweep")["state"] == "finished"
    assert [sweep["name"] for sweep in inside.json("list")] == ["my_sweep"]
    again = cli("init", "mine")
    assert again.returncode == 2
    assert "nothing is overwritten" in again.stderr
