"""What can only be known by building a run: answers in JSON, in a process of its own.

    python -m trainable.preflight < trial-config.json

prints one line: `{"num_parameters": ..., ...}`, or `{"refused": "why"}`. What must not live here:
training.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from trainable.config import TrialConfig
from trainable.errors import TrainingError


def examine(config: TrialConfig) -> dict[str, Any]:
    """Build the run that `config` describes, as a trial would, and say what it is in numbers.

    Raises:
        TrainingError: It cannot be built; the message says why.
    """
    from trainable.build import build_parts, find_device
    from trainable.fingerprint import code_digests
    from trainable.optim import bytes_per_parameter
    from trainable.precision import device_name
    from trainable.task import load_loop

    if load_loop(config.task.name) is not None:
        # only the loop knows, and asking it would train
        return {"own_loop": True, "code": code_digests(config.task.name)}
    parts = build_parts(config, device=find_device(None))
    parts.train.close()
    parts.val.close()
    optimizer = config.train.optimizer
    num_parameters = sum(p.numel() for p in parts.model.parameters() if p.requires_grad)
    return {
        "code": code_digests(config.task.name),
        "data": parts.task.fingerprint(parts.data),
        "num_parameters": num_parameters,
        "num_train": parts.train.plan.samples,
        "num_val": parts.val.plan.samples,
        "steps_per_epoch": parts.train.plan.windows,
        "total_steps": parts.train.plan.windows * config.budget.epochs,
        "device": device_name(parts.precision.device),
        "precision": parts.precision.name,
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
