"""A pickled sampler state is not read from another user's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sweeps.cli.app import app
from tests.unit.sweeps.sweep_factory import MadeSweep

TWO = "{train.optimizer.lr: {uniform: [0.1, 1]}, train.clip.max_norm: {uniform: [0.1, 1]}}"


@pytest.mark.parametrize("part", ["directory", "ledger"])
@pytest.mark.parametrize("sampler", ["cmaes", "tpe"])
def test_cmaes_is_not_resumed_from_another_users_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, sampler: str
) -> None:
    made = MadeSweep(tmp_path, space=TWO, more=f"search: {{sampler: {sampler}}}")
    made.add("complete", 0.5)
    path = getattr(made.paths, part)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    tried = []
    monkeypatch.setattr(
        "sweeps.operations.run.attempt", lambda *_, **__: tried.append(1) or made.view.outcome()
    )
    done = CliRunner().invoke(app, ["resume", "small", "--root", str(tmp_path), "--offline"])
    words = " ".join(done.stderr.split())
    assert done.exit_code == (2 if sampler == "cmaes" else 0), words
    assert tried == ([] if sampler == "cmaes" else [1])
    assert ("stores its state there as a pickle" in words) is (sampler == "cmaes")
