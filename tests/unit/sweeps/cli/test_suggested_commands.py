"""Each command that the end of a sweep suggests works where it is pasted."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from sweeps.cli import messages
from sweeps.cli.app import app
from sweeps.ledger.attributes import LACKS_MODEL
from sweeps.paths import TRIAL_CONFIG
from sweeps.spec.spec import trial_yaml
from sweeps.spec.trial_run import TrialSeed
from tests.unit.sweeps.sweep_factory import MadeSweep
from trainable.checkpoint import CheckpointStore
from trainable.config import CheckpointConfig

MODEL = {"model": {"weight": torch.ones(2)}}
TWO = {"metric": "[val/loss, val/error]", "mode": "[min, min]"}
_NOT_RUN = {"ui", "report", "resume"}
"""They serve, draw or train: only their arguments are read."""


@pytest.mark.parametrize(
    ("state", "metrics"),
    [
        pytest.param(MODEL, {}, id="task"),
        pytest.param({"loop": MODEL}, TWO, id="custom loop, two metrics"),
        pytest.param({"loop": {"epoch": 1}}, {}, id="no model"),
        pytest.param({"loop": {"epoch": 1}}, TWO, id="no model, two metrics"),
        pytest.param(None, {}, id="no checkpoint"),
        pytest.param(None, TWO, id="no checkpoint, two metrics"),
    ],
)
def test_suggested_commands_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: dict[str, Any] | None,
    metrics: dict[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = MadeSweep(tmp_path / "a b", **metrics)
    for values in ([0.5, 0.1], [0.4, 0.2]):
        number = sweep.add(None, values if metrics else values[0])
        directory = sweep.paths.trial(number)
        directory.mkdir(parents=True)
        config = sweep.spec.trial_config(TrialSeed("trial", number), {})
        (directory / TRIAL_CONFIG).write_text(trial_yaml(config))
        if state is not None:
            _save(directory, state, value=values[0])
        if state == {"loop": {"epoch": 1}}:
            sweep.ledger.set_attr(number, LACKS_MODEL, True)
        sweep.ledger.finish(number, "complete")
    commands = _suggested(sweep)
    exports = [words for words in commands if "--export" in words]
    has_model = state is not None and "model" in state.get("loop", state)
    assert bool(exports) is has_model
    for words in [*commands, *([["best", "small", "--root", str(tmp_path / "a b")]] * 2)]:
        chosen = {"TRIAL": "1", "DIR": str(tmp_path / "exported")}
        given = [chosen.get(word, word) for word in words]
        help_only = ["--help"] * (words[0] in _NOT_RUN)
        done = CliRunner().invoke(app, [*given, *help_only])
        assert done.exit_code == 0, f"{given}: {done.output}"
        assert ("--export" in done.output) <= (has_model or bool(help_only))
    assert (tmp_path / "exported/model.safetensors").exists() is has_model
    best = CliRunner().invoke(app, ["best", "small", "--root", str(tmp_path / "a b"), "--json"])
    found = json.loads(best.stdout)
    for one in found if metrics else [found]:
        assert (one["best_checkpoint"] is not None) is (state is not None)


def _save(directory: Path, state: dict[str, Any], *, value: float) -> None:
    config = CheckpointConfig.model_validate({"every": "1 epoch"})
    store = CheckpointStore(directory, config, metric="val/loss")
    store.save(lambda: state, step=10, reports=1, value=value)
    store.close()


def _suggested(sweep: MadeSweep) -> list[list[str]]:
    """Return the words of each command in the last lines of a sweep, without the program."""
    said = io.StringIO()
    console = Console(file=said, width=500)
    messages.outcome(console, console, sweep.view.outcome(), sweep.paths)
    lines = [line.partition(": sweep ")[2] for line in said.getvalue().splitlines()]
    return [shlex.split(line) for line in lines if line]
