"""What can only be known by building a run: answers in JSON, in a process of its own.

    python -m trainable.preflight < trial-config.json

prints one line: `{"num_parameters": ..., ...}`, or `{"refused": "why"}`. What must not live here:
training.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from trainable.config import TrialConfig
from trainable.errors import TrainingError

if TYPE_CHECKING:
    from trainable.data import Plan
    from trainable.precision import Precision


def examine(config: TrialConfig) -> dict[str, Any]:
    """Build the run that `config` describes, as a trial would, and say what it is in numbers.

    Raises:
        TrainingError: It cannot be built; the message says why.
    """
    from trainable.build import build_parts, find_device
    from trainable.fingerprint import code_digests
    from trainable.task import load_loop

    if load_loop(config.task.name) is not None:
        # only the loop knows, and asking it would train
        return {"own_loop": True, "code": code_digests(config.task.name)}
    parts = build_parts(config, device=find_device(None))
    parts.train.close()
    parts.val.close()
    plans = parts.train.plan, parts.val.plan
    return {
        "code": code_digests(config.task.name),
        "data": parts.task.fingerprint(parts.data),
        "cautions": parts.cautions,
        **measure(config, parts.groups, plans, parts.precision),
    }


def measure(
    config: TrialConfig,
    groups: list[dict[str, Any]],
    plans: tuple[Plan, Plan],
    precision: Precision,
) -> dict[str, Any]:
    """Say in numbers what a run is.

    Args:
        config: Its configuration.
        groups: The optimizer's parameter groups.
        plans: Its training and validation samples.
        precision: How it computes, and where.
    """
    from trainable.optim import state_bytes, trained
    from trainable.precision import device_name

    parameters = trained(groups)
    train, val = plans
    return {
        "num_parameters": sum(p.numel() for p in parameters),
        "weight_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "optimizer_bytes": state_bytes(config.train.optimizer, parameters),
        "num_train": train.samples,
        "num_val": val.samples,
        "steps_per_epoch": train.windows,
        "total_steps": train.windows * config.budget.epochs,
        "device": device_name(precision.device),
        "precision": precision.name,
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
