"""Real trainings for `quality_sweeps.drive`: an MLP on the handwritten digits, in this process.

What must not live here: searching.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from sweeps.spec.spec import SweepSpec
from sweeps.spec.trial_run import TrialSeed
from tests.bench.quality_sweeps import Params
from trainable.build import open_trainer
from trainable.errors import TrainingError

EPOCHS = 9
SPEC = {
    "task": {"name": "digits", "model": "mlp"},
    "metric": "val/loss",
    "budget": {"epochs": EPOCHS},
    # Wider than anybody's guess would be, or the first trial would do.
    "space": {
        "train.optimizer.lr": {"loguniform": [1e-5, 1.0]},
        "train.optimizer.weight_decay": {"loguniform": [1e-4, 1.0]},
        "train.schedule.warmup": {"uniform": [0.0, 0.5]},
        "train.clip.max_norm": {"loguniform": [0.01, 10]},
        "train.batch_size": {"logint": [16, 256]},
    },
    "train": {"schedule": {"name": "cosine"}},
    "checkpoint": {"every": f"{EPOCHS} epochs"},
}


def train(spec: SweepSpec, number: int | TrialSeed, params: Params) -> Iterator[float]:
    """Yield the validation loss after each epoch; ends early where the training diverges."""
    config = spec.trial_config(number, params)
    with tempfile.TemporaryDirectory() as directory:
        try:
            with open_trainer(config, Path(directory), device="cpu", threads=1) as trainer:
                for report in trainer.events():
                    yield report.metrics[spec.metrics[0]]
        except TrainingError:
            return
