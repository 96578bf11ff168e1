"""Which fields of the spec may be searched, and the values that the file gives them without that.

Whatever may be searched has a value here where it is not, for constraints and for the first trial.
What must not live here: whether a distribution fits its field (`cross_checks`).
"""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo

from sweeps.spec.error_messages import leaves
from sweeps.spec.searched_workers import WORKERS
from sweeps.spec.sections import ResourcesConfig
from sweeps.spec.trial_run import flatten
from trainable.config import TaskConfig, TrainConfig


def searchable_fields() -> dict[str, FieldInfo]:
    """Return the fields that may be searched, by dotted key.

    Arguments of the task, the optimizer and the schedule may be searched, too.
    """
    fields = {f"train.{name}": info for name, info in leaves(TrainConfig).items()}
    return fields | {WORKERS: leaves(ResourcesConfig)["workers"]}


def fixed_values(
    train: TrainConfig,
    task: TaskConfig,
    resources: ResourcesConfig,
    *,
    own_optimizer: bool = False,
) -> dict[str, Any]:
    """Return the value of everything that may be searched, by dotted key."""
    data = train.model_dump(mode="json")
    if own_optimizer:
        data["optimizer"] = train.optimizer.model_dump(mode="json", exclude_unset=True)
    # A written section lacks these keys at their default.
    left_out = {key: info.default for key, info in searchable_fields().items() if info.exclude_if}
    arguments = {f"task.{key}": value for key, value in task.model_dump(mode="json").items()}
    written = dict(flatten(data, "train."))
    return {**left_out, **written, **arguments, WORKERS: resources.workers}
