"""`sweep list --sizes`: each byte counts once, under its kind; links are not followed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sweeps.cli.app import app
from sweeps.view.usage import directory_usage
from tests.unit.sweeps.sweep_factory import MadeSweep

FILES = {
    "trials/0000/checkpoints/step-00000010/state.pt": ("checkpoints", 1000),
    "trials/0000/checkpoints/quarantine/step-00000005/state.pt": ("checkpoints", 20),
    "trials/0001/inherited/state.pt": ("checkpoints", 300),
    "trials/0000/trial.log": ("logs", 40),
    "trials/0000/artifacts/checkpoints/a": ("logs", 5),
    "trials/0001/metrics.jsonl": ("logs", 60),
    "trials/0000/figures/loss.png": ("report", 70),
    "report.html": ("report", 800),
    "ledger.db-journal": ("ledger", 9),
    "outbox/outbox.db": ("outbox", 11),
    "ray/attempt-001/checkpoints/x": ("other", 12),
    "trials/stray": ("other", 13),
}


def _du(root: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["list", "--sizes", *words, "--root", str(root)])


@pytest.fixture
def sweep(tmp_path: Path) -> MadeSweep:
    made = MadeSweep(tmp_path / "runs")
    for name, (_, size) in FILES.items():
        path = made.paths.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    return made


def test_each_byte_counts_once_under_its_kind(sweep: MadeSweep) -> None:
    found = json.loads(_du(sweep.paths.root, "small", "--json").stdout)
    for kind in ("checkpoints", "logs", "report", "outbox"):
        assert found[kind] == sum(size for one, size in FILES.values() if one == kind), kind
    assert found["ledger"] == 9 + sweep.paths.ledger.stat().st_size
    files = [path for path in sweep.paths.directory.rglob("*") if path.is_file()]
    assert found["total"] == sum(path.stat().st_size for path in files)
    assert found["object_store"] is None


def test_links_count_once_or_not_at_all(sweep: MadeSweep, tmp_path: Path) -> None:
    before = directory_usage(sweep.paths.directory)
    (tmp_path / "large").write_bytes(bytes(5000))
    (sweep.paths.trial(0) / "link").symlink_to(tmp_path / "large")
    (sweep.paths.trial(0) / "loop").symlink_to(sweep.paths.root)
    state = sweep.paths.directory / "trials/0000/checkpoints/step-00000010/state.pt"
    os.link(state, sweep.paths.trial(1) / "inherited/linked.pt")
    after = directory_usage(sweep.paths.directory)
    assert after.sizes == before.sizes
    assert sorted(path.name for path in after.links) == ["link", "loop"]


def test_all_sweeps_and_the_rest_of_the_root_are_shown(sweep: MadeSweep) -> None:
    root = sweep.paths.root
    MadeSweep(root, "empty")
    (root / "mlartifacts/1").mkdir(parents=True)
    (root / "mlartifacts/1/model").write_bytes(bytes(100))
    (root / "mlflow.db").write_bytes(bytes(23))
    (root / ".removed/old").mkdir(parents=True)
    (root / ".removed/old/state.pt").write_bytes(bytes(45))
    found = json.loads(_du(root, "--json").stdout)
    assert [one["name"] for one in found["sweeps"]] == ["small", "empty"]  # the largest first
    assert (found["tracking"], found["removed"]) == (123, 45)
    files = [path for path in root.rglob("*") if path.is_file()]
    assert found["total"] == sum(path.stat().st_size for path in files)
    shown = _du(root).stdout
    assert "MLflow's store: 123 B" in shown
    assert "half-removed sweeps: 45 B" in shown


def test_sweep_with_a_damaged_spec_is_still_measured(sweep: MadeSweep) -> None:
    sweep.paths.spec.write_text("damaged")
    alone = _du(sweep.paths.root, "small")
    assert (alone.exit_code, alone.stdout) == (2, "")
    done = _du(sweep.paths.root, "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["sweeps"][0]["checkpoints"] == 1320
    assert str(sweep.paths.spec) in done.stderr
