"""A sweep of another user is looked at: its code does not run, and its stores are not used."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sweeps.api.sweep import Sweep
from sweeps.cli.app import app
from sweeps.spec.revisions import write_spec
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import MadeSweep
from tracking.trusted_stores import StoreUntrusted

ACTING = [
    "resume", "resume -s trials=4", "resume 1 --finish", "resume --retry", "confirm --top 2",
    "audit --test", "audit --reproduce", "audit --reproduce --from first",
    "audit --reproduce --from best", "train 0",
    "best --register model", "sync", "sync --verify", "ui", "list --remove --mlflow --yes",
]  # fmt: skip
LOOKING = ["status", "trials", "show 0", "best", "compare", "show 0 --log", "audit"]


@pytest.fixture(params=["directory"])
def foreign(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> MadeSweep:
    """A sweep of which another user owns a part; its task leaves a file when it is imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    made = MadeSweep(tmp_path / "runs")
    write_spec(made.paths.spec, with_overrides(made.spec, ["task=planted:Task"]))
    made.add("complete", 0.5)
    made.add("pruned", 0.7)
    if os.geteuid() == 0:
        os.chown(getattr(made.paths, request.param), 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    return made


def _entries(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in root.rglob("*")}


@pytest.mark.parametrize("command", ACTING)
def test_no_command_runs_or_records_it(foreign: MadeSweep, tmp_path: Path, command: str) -> None:
    verb, *options = command.split()
    before = _entries(foreign.paths.root)
    words = [verb, "small", *options, "--root", str(foreign.paths.root)]
    done = CliRunner().invoke(app, words)
    said = " ".join(done.output.split())
    assert done.exit_code == 2, said
    assert "belongs to user" in said
    assert "work on a copy of the root" in said
    assert not (tmp_path / "ran").exists()
    assert "planted" not in sys.modules
    assert _entries(foreign.paths.root) == before


@pytest.mark.parametrize("foreign", ["spec", "ledger"], indirect=True)
@pytest.mark.parametrize("command", ["resume", "sync"])
def test_a_file_of_it_suffices(foreign: MadeSweep, tmp_path: Path, command: str) -> None:
    test_no_command_runs_or_records_it(foreign, tmp_path, command)


@pytest.mark.parametrize("command", LOOKING)
def test_it_can_be_looked_at(foreign: MadeSweep, command: str) -> None:
    verb, *options = command.split()
    words = [verb, "small", *options, "--root", str(foreign.paths.root)]
    assert "belongs to user" not in CliRunner().invoke(app, words).output


def test_new_sweep_is_not_begun_in_it(foreign: MadeSweep, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(foreign.spec.to_yaml())
    for path in (foreign.paths.spec, foreign.paths.ledger):
        path.unlink()
    words = ["run", str(file), "--root", str(foreign.paths.root), "--offline"]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, "belongs to user" in done.output) == (2, True), done.output
    assert not foreign.paths.ledger.exists()


def test_doctor_passes_over_it(foreign: MadeSweep) -> None:
    done = CliRunner().invoke(app, ["doctor", "--root", str(foreign.paths.root)])
    assert "belongs to user" not in done.output


def test_api_does_not_run_it(foreign: MadeSweep, tmp_path: Path) -> None:
    best = Sweep.open("small", root=foreign.paths.root).best
    for load in (best.load_task, best.load_model):
        with pytest.raises(StoreUntrusted, match="belongs to user"):
            load()
    assert not (tmp_path / "ran").exists()
