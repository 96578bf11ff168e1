"""A sweep as a killed driver left it, made without training; its task is nowhere to be found.

Trial 0 is complete, trial 1 was pruned, and trial 2 had just begun. Nothing was delivered.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from optuna.samplers import RandomSampler

from sweeps.ledger.ledger import Ledger
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.spec.revisions import write_spec
from sweeps.spec.spec import parse_spec, trial_yaml
from tests.fake_checkpoints import commit
from tests.make_trials import ask
from tracking.recorder import Recorder
from tracking.tracker import TrackedSweep
from trainable.store.local import LocalFiles
from trainable.store.metrics_file import History, Row

NAME = "chaos"
CHECKPOINT = "trials/0000/checkpoints/step-00000015"
FILES = (
    *("ledger.db", "lock", "outbox/outbox.db", "sweep.yaml"),
    *(f"{CHECKPOINT}/manifest.json", f"{CHECKPOINT}/state.pt"),
    *(f"trials/0000/{name}" for name in ("config.yaml", "metrics.jsonl", "resumed.json")),
    *(f"trials/0001/checkpoints/step-00000005/{name}" for name in ("manifest.json", "state.pt")),
    *(f"trials/0001/{name}" for name in ("config.yaml", "metrics.jsonl")),
    "trials/0002/config.yaml",
)
_SPEC = """
name: chaos
task: probe_task:Probe
metric: val/loss
mode: min
trials: 4
seed: 7
budget: {epochs: 3}
space:
  train.optimizer.lr: {loguniform: [0.001, 0.1]}
  train.clip.max_norm: {loguniform: [0.1, 10.0]}
early_stopping: {scheduler: asha, grace_epochs: 1, reduction: 2, min_trials: 3}
resources: {gpu: 0}
checkpoint: {every: 2 steps, keep: 2}
"""
_STEPS, _EPOCHS = 5, (3, 1, 0)
"""The steps of an epoch, and the epochs of each trial."""


def interrupted(root: Path) -> SweepPaths:
    """Copy the sweep below a root; returns its paths."""
    shutil.copytree(_template(), root / NAME)
    return SweepPaths(root, NAME)


@cache
def _template() -> Path:
    root = Path(tempfile.mkdtemp(prefix="interrupted-"))
    paths = SweepPaths(root, NAME)
    _make(paths)
    found = (path for path in paths.directory.rglob("*") if path.is_file())
    made = {path.relative_to(paths.directory).as_posix() for path in found}
    assert made - {"outbox/drain.lock"} == set(FILES)
    return paths.directory


def _make(paths: SweepPaths) -> None:
    spec = parse_spec(_SPEC, "chaos.yaml")
    paths.directory.mkdir()
    holder = {"host": "elsewhere", "pid": 7758, "started": 1795301987.9, "token": "0" * 32}
    paths.lock.write_text(json.dumps(holder))
    write_spec(paths.spec, spec)
    ledger = Ledger.create(paths.ledger, mode="min", sweep_id="id-chaos", select=spec.select)
    space = {key: one.to_optuna() for key, one in spec.space.items()}
    recorder = Recorder(
        "unused",
        None,
        TrackedSweep(experiment=NAME, sweep_id=ledger.sweep_id, outbox=paths.outbox),
        deliver=None,
    )
    for number, epochs in enumerate(_EPOCHS):
        params = ask(ledger, space, RandomSampler(seed=number)).params
        ledger.start(number)
        directory = paths.trial(number)
        directory.mkdir(parents=True)
        config = spec.trial_config(number, params)
        (directory / TRIAL_CONFIG).write_text(trial_yaml(config))
        recorder.start(number, params, {"gradsweep.attempts": "1"})
        if epochs == 0:
            continue
        rows = [
            Row(step, 1795301967000 + step, {"train/loss": 1 / step, "train/lr": 0.01})
            for step in range(1, epochs * _STEPS + 1)
        ]
        for epoch in range(1, epochs + 1):
            value = {"val/loss": 1 / epoch, "best/val/loss": 1 / epoch, "epoch": float(epoch)}
            rows[epoch * _STEPS - 1].metrics.update(value)
            ledger.report(number, epoch=epoch, step=epoch * _STEPS, value=1 / epoch)
        files = LocalFiles.of(directory)
        files.open()
        history = History(directory, files, step=0)
        history.append(rows)
        history.close()
        commit(directory, epochs, step=epochs * _STEPS)
        recorder.log(number, rows)
        ledger.finish(number, "complete" if number == 0 else "pruned", reason=None)
        recorder.finish(number, "FINISHED", {"best_step": str(epochs * _STEPS)})
    (paths.trial(0) / "resumed.json").write_text("[6]")
    recorder.close(timeout=0)
