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
    from sweeps.api.light import Asked as Asked
    from sweeps.api.sweep import Comparison as Comparison
    from sweeps.api.sweep import Figures as Figures
    from sweeps.api.sweep import Sweep as Sweep
    from sweeps.api.sweep import compare as compare
    from sweeps.api.trial import Trial as Trial
    from sweeps.errors import SpecError as SpecError
    from sweeps.errors import UserError as UserError
    from sweeps.report.data import NotEnough as NotEnough
    from sweeps.view.compare import Incomparable as Incomparable
    from sweeps.view.sweep_view import NoBest as NoBest
    from sweeps.view.sweep_view import NoChoice as NoChoice
    from sweeps.view.sweep_view import UnknownSweep as UnknownSweep
    from sweeps.view.sweep_view import UnknownTrial as UnknownTrial

_MODULES = {
    "Asked": "api.light",
    "Comparison": "api.sweep",
    "Figures": "api.sweep",
    "Incomparable": "view.compare",
    "NoBest": "view.sweep_view",
    "NoChoice": "view.sweep_view",
    "NotEnough": "report.data",
    "SpecError": "errors",
    "Sweep": "api.sweep",
    "SweepCommandError": "api.command",
    "Trial": "api.trial",
    "UnknownSweep": "view.sweep_view",
    "UnknownTrial": "view.sweep_view",
    "UserError": "errors",
    "compare": "api.sweep",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'sweeps' has no attribute {name!r}")
    from trainable.process_start import without_collection

    with without_collection():
        module = importlib.import_module(f"sweeps.{_MODULES[name]}")
    return getattr(module, name)
