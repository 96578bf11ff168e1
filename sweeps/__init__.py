"""Hyperparameter sweeps: spec, search, ledger, early stopping, driver, results, command line.

`Sweep` and its companions are imported at their first use, so `import sweeps` loads neither torch
nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sweeps.account import complete_account
from sweeps.engine.ray_compat.environment import set_import_env

set_import_env()  # Ray reads these variables when it is imported
complete_account()

if TYPE_CHECKING:
    from sweeps.api.command import SweepCommandError as SweepCommandError
    from sweeps.api.figures import Figures as Figures
    from sweeps.api.sweep import Sweep as Sweep
    from sweeps.api.trial import Trial as Trial

_MODULES = {
    "Figures": "figures",
    "Sweep": "sweep",
    "SweepCommandError": "command",
    "Trial": "trial",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'sweeps' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sweeps.api.{_MODULES[name]}"), name)
