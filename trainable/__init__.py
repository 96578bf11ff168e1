"""One training run in PyTorch: tasks, the loop, checkpoints, and the adapter to Ray.

A name is imported at its first use, so `import trainable` loads neither torch nor ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainable.base_run import RunReport as RunReport
    from trainable.build import open_trainer as open_trainer
    from trainable.check.testing import check_task as check_task
    from trainable.checkpoint import CheckpointStore as CheckpointStore
    from trainable.config import TrialConfig as TrialConfig
    from trainable.custom_loop import CustomLoop as CustomLoop
    from trainable.find_task import load_task as load_task
    from trainable.loop import Trainer as Trainer
    from trainable.loop_context import Context as Context
    from trainable.losses import binary_cross_entropy as binary_cross_entropy
    from trainable.losses import cross_entropy as cross_entropy
    from trainable.store.manifest import Generation as Generation
    from trainable.store.manifest import Pointer as Pointer
    from trainable.store.metrics_file import Row as Row
    from trainable.store.metrics_file import read_rows as read_rows
    from trainable.task import Data as Data
    from trainable.task import Task as Task
    from trainable.task import decay_groups as decay_groups

_MODULES = {
    "CheckpointStore": "checkpoint",
    "Context": "loop_context",
    "Data": "task",
    "Generation": "store.manifest",
    "CustomLoop": "custom_loop",
    "Pointer": "store.manifest",
    "RunReport": "base_run",
    "Row": "store.metrics_file",
    "Task": "task",
    "Trainer": "loop",
    "TrialConfig": "config",
    "binary_cross_entropy": "losses",
    "check_task": "check.testing",
    "cross_entropy": "losses",
    "decay_groups": "task",
    "load_task": "find_task",
    "open_trainer": "build",
    "read_rows": "store.metrics_file",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
