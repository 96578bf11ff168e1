"""What can only be known by building a run: answers in JSON, in a process of its own.

    python -m trainable.preflight < trial-config.json

prints one line: `{"num_parameters": ..., ...}`, or `{"refused": "why"}`. What must not live here:
training.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainable.config import TrialConfig
from trainable.errors import TrainingError


def examine(config: TrialConfig) -> dict[str, Any]:
    """Build the run that `config` describes, as a trial would, and say what it is in numbers.

    Raises:
        TrainingError: It cannot be built; the message says why.
    """
    from trainable.build import open_trainer
    from trainable.loop import Trainer
    from trainable.optim import bytes_per_parameter
    from trainable.precision import device_name

    with (
        tempfile.TemporaryDirectory(prefix="sweep-preflight-") as directory,
        open_trainer(config, Path(directory)) as trainer,
    ):
        if not isinstance(trainer, Trainer):
            return {"own_loop": True}  # only the loop knows, and asking it would train
        train, val = trainer.plans
        optimizer = config.train.optimizer
        num_parameters = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        return {
            "num_parameters": num_parameters,
            "num_train": train.samples,
            "num_val": val.samples,
            "steps_per_epoch": train.windows,
            "total_steps": train.windows * config.budget.epochs,
            "device": device_name(trainer.precision.device),
            "precision": trainer.precision.name,
            "optimizer_bytes": int(
                num_parameters * bytes_per_parameter(optimizer.name, optimizer.momentum)
            ),
        }


def _main() -> None:
    answer: dict[str, Any]
    # What a user's module prints while it is imported must not end up in the answer.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer = examine(TrialConfig.model_validate_json(sys.stdin.read()))
        except TrainingError as error:
            answer = {"refused": str(error)}
        # a user's task may raise anything while it builds its model or data
        except Exception as error:
            answer = {"refused": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
