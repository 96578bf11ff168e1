"""Redirect the plain MLflow API inside a trial to the trial's own run.

MLflow takes seconds to import, and most tasks do not use it. So the redirection is prepared, and
takes effect when a task imports MLflow. What must not live here: an import of MLflow before that,
and the store to which calls lead (`trial_store`).
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from tracking import mlflow_compat

_SCHEME = "gradsweep-trial"
_ADDRESS = f"{_SCHEME}://run"
"""The address by which the plain API finds the trial's own run."""


def redirect(taker: Any) -> None:
    """Make the plain MLflow API send its calls to a taker, from the import of MLflow on.

    A run that an earlier trial of this process left open is ended. MLflow keeps the store, and
    with it the first taker, until the process ends.
    """
    os.environ["MLFLOW_TRACKING_URI"] = _ADDRESS
    if "mlflow" in sys.modules:
        import mlflow

        _register(taker)
        while mlflow.active_run() is not None:
            mlflow.end_run()
        mlflow.set_tracking_uri(_ADDRESS)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(taker))


def _register(taker: Any) -> None:
    def build(**_: Any) -> Any:
        from tracking.trial_store import TrialStore

        return TrialStore(taker)  # type: ignore[abstract]

    mlflow_compat.register_store(_SCHEME, build)


class _Finder(MetaPathFinder):
    """Find mlflow as usual, and register the store once it is imported."""

    def __init__(self, taker: Any) -> None:
        self._taker = taker

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "mlflow":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._taker)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Any, taker: Any) -> None:
        self._loader, self._taker = loader, taker

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        _register(self._taker)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
