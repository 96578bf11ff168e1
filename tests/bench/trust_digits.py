"""Our own table of trainings: the digits under common seeds, trained in this process.

The configurations are drawn at random; those whose training diverges under a seed are left out.
What must not live here: what is done with the table.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import optuna

from sweeps.spec.spec import SweepSpec
from sweeps.spec.trial_run import TrialSeed
from tests.bench.quality_sweeps import Params
from tests.bench.trust_tables import Table
from trainable.build import open_trainer
from trainable.errors import TrainingError

_EPOCHS = 9
_DIGITS = {
    "task": {"name": "digits", "model": "mlp"},
    "metric": "val/loss",
    "budget": {"epochs": _EPOCHS},
    # Wider than anybody's guess would be, or the first trial would do.
    "space": {
        "train.optimizer.lr": {"loguniform": [1e-5, 1.0]},
        "train.optimizer.weight_decay": {"loguniform": [1e-4, 1.0]},
        "train.schedule.warmup": {"uniform": [0.0, 0.5]},
        "train.clip.max_norm": {"loguniform": [0.01, 10]},
        "train.batch_size": {"logint": [16, 256]},
    },
    "train": {"schedule": {"name": "cosine"}},
    "checkpoint": {"every": f"{_EPOCHS} epochs"},
}
_SPEC = {"name": "trust", "mode": "min", "trials": 1, "seed": 37, "resources": {"gpu": 0}}


def digits_table(num_configurations: int, num_seeds: int) -> Table:
    """Train configurations to the end; returns their losses after the last epoch."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spec = SweepSpec.model_validate({**_SPEC, **_DIGITS})
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=spec.seed))
    distributions = {key: one.to_optuna() for key, one in spec.space.items()}
    rows = []
    for _ in range(num_configurations):
        params = study.ask(distributions).params
        row = []
        for seed in range(num_seeds):
            curve = list(_train(spec, TrialSeed("confirm", seed), params))
            if len(curve) < _EPOCHS or not math.isfinite(curve[-1]):
                break
            row.append(curve[-1])
        else:
            rows.append(row)
    return Table("digits", np.array(rows))


def _train(spec: SweepSpec, number: int | TrialSeed, params: Params) -> Iterator[float]:
    """Yield the validation loss after each epoch; ends early where the training diverges."""
    config = spec.trial_config(number, params)
    with tempfile.TemporaryDirectory() as directory:
        try:
            with open_trainer(config, Path(directory), device="cpu", threads=1) as trainer:
                for report in trainer.events():
                    yield report.metrics[spec.metrics[0]]
        except TrainingError:
            return
