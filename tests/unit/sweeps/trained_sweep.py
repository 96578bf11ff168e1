"""A finished sweep whose trials were really trained, in this process and without Ray."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.spec.resume_checks import Origin
from sweeps.spec.revisions import write_spec
from sweeps.spec.spec import parse_spec, trial_yaml
from trainable.build import open_trainer
from trainable.user_code.fingerprint import code_digests

MODULE = "arms_of_a_spiral"
TASK = """
from trainable.tasks.spiral import Spiral

class Arms(Spiral):
    def __init__(self):
        super().__init__(samples=20, width=8)

class Untested(Arms):
    def build_data(self):
        data = super().build_data()
        return type(data)(train=data.train, val=data.val)
"""
SPEC = """
name: made
task: {module}:{task}
metric: val/loss
mode: min
trials: {trials}
budget: {{epochs: 3}}
space: {{train.optimizer.lr: {{loguniform: [1.0e-4, 1.0e-1]}}}}
resources: {{gpu: 0}}
train: {{batch_size: 20, layer_norms_every: 2}}
"""
KEY = "train.optimizer.lr"
COMPLETE, PRUNED, RESUMED = 0, 1, 2
"""The trials of the sweep that `template` and `paths` of the commands' tests have."""


def train_sweep(
    here: Path,
    rates: Sequence[float],
    *,
    task: str = "Arms",
    pruned: Sequence[int] = (),
    interrupted: Sequence[int] = (),
) -> SweepPaths:
    """Write the task and a sweep with a trial for each learning rate; the task is importable.

    Args:
        here: The working directory of the commands.
        rates: The learning rates.
        task: The class of the task.
        pruned: Trials that end after their first epoch.
        interrupted: Trials that stop in the middle of an epoch, and are resumed.
    """
    (here / f"{MODULE}.py").write_text(TASK)
    paths = SweepPaths(here / "runs", "made")
    spec = parse_spec(SPEC.format(module=MODULE, task=task, trials=len(rates)), "made.yaml")
    paths.directory.mkdir(parents=True)
    ledger = Ledger.create(paths.ledger, mode="min", sweep_id="id-made", select=spec.select)
    write_spec(paths.spec, spec)
    for rate in rates:
        distribution = spec.space[KEY].to_optuna()
        number = ledger.add(Suggestion({KEY: rate}, {KEY: distribution})).number
        ledger.start(number)
        config, directory = spec.trial_config(number, {KEY: rate}), paths.trial(number)
        directory.mkdir(parents=True)
        (directory / TRIAL_CONFIG).write_text(trial_yaml(config))
        stops = [False, False, False, True] if number in interrupted else []
        while True:
            until = 1 if number in pruned else None
            with open_trainer(
                config,
                directory,
                device="cpu",
                threads=1,
                until=until,
                should_stop=partial(_next, stops),
            ) as trainer:
                for report in trainer.events():
                    value = report.metrics["val/loss"]
                    ledger.report(number, epoch=report.epoch, step=report.step, value=value)
                if trainer.store.saved_epoch() >= (until or 3):
                    break
        ledger.finish(number, "pruned" if number in pruned else "complete")
    ledger.store_origin(Origin(code=code_digests(spec.task.name)))
    return paths


@contextmanager
def trained(here: Path, rates: Sequence[float], **options: Any) -> Iterator[Path]:
    """Train a sweep as `train_sweep` does; its task is forgotten at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", [*sys.path, str(here)])
        train_sweep(here, rates, **options)
    yield here
    sys.modules.pop(MODULE, None)


def copy_of(template: Path, here: Path, patch: pytest.MonkeyPatch) -> SweepPaths:
    """Copy a trained sweep into a new directory, which becomes the working directory."""
    shutil.copytree(template, here)
    patch.chdir(here)
    patch.setattr("sys.path", sys.path.copy())
    return SweepPaths(here / "runs", "made")


def _next(answers: list[bool]) -> bool:
    return bool(answers) and answers.pop(0)
