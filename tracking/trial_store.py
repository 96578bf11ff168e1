"""The tracking store of the plain MLflow API inside a trial: it forwards calls to the trial.

Calls such as `mlflow.log_metric` in a user's code in a worker come here; else they would create a
database of their own. The worker contacts no server. A call that cannot be forwarded is refused.
What must not live here: who receives the calls, and when calls are redirected (`trial_redirect`).
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from mlflow.entities import Experiment, LifecycleStage, Run, RunData, RunInfo, RunStatus
from mlflow.exceptions import MlflowException

from tracking.mlflow_compat import UNSUPPORTED_STORE_METHODS, AbstractStore

_EXPERIMENT_ID = "0"


class Taker(Protocol):
    """Receives what the plain API records."""

    def metrics(self, points: Sequence[tuple[str, float, int, int]]) -> None:
        """Receive points: key, value, step and milliseconds since the Unix epoch."""
        ...

    def params(self, params: Mapping[str, str]) -> None:
        """Receive parameters."""
        ...

    def tags(self, tags: Mapping[str, str]) -> None:
        """Receive tags."""
        ...

    def directory(self) -> Path | None:
        """Return the directory for artifacts; None while no run is open."""
        ...


class TrialStore(AbstractStore):
    """The store of one trial, with a single run: every `start_run` returns it."""

    def __init__(self, taker: Taker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._taker = taker

    def log_batch(self, run_id: str, metrics: Any, params: Any, tags: Any) -> None:
        """Forward a batch; every logging call of the plain API uses this method."""
        del run_id
        self._taker.metrics(
            [(m.key, float(m.value), int(m.step), int(m.timestamp)) for m in metrics]
        )
        self._taker.params({param.key: str(param.value) for param in params})
        own = {tag.key: str(tag.value) for tag in tags if not tag.key.startswith("mlflow.")}
        self._taker.tags(own)

    def log_metric(self, run_id: str, metric: Any) -> None:
        self.log_batch(run_id, [metric], [], [])

    def log_param(self, run_id: str, param: Any) -> None:
        self.log_batch(run_id, [], [param], [])

    def set_tag(self, run_id: str, tag: Any) -> None:
        self.log_batch(run_id, [], [], [tag])

    def create_run(
        self, experiment_id: Any, user_id: Any, start_time: Any, tags: Any, run_name: Any
    ) -> Run:
        """Return the trial's own run."""
        del experiment_id, user_id, start_time, run_name
        self.log_batch(self._run_id(), [], [], tags)
        return self.get_run(self._run_id())

    def get_run(self, run_id: str) -> Run:
        """Return the trial's run without data, which only the driver has."""
        if run_id != self._run_id():
            _refuse(f"to open the run {run_id}")
        info = RunInfo(
            run_id=run_id,
            experiment_id=_EXPERIMENT_ID,
            user_id="",
            status=RunStatus.to_string(RunStatus.RUNNING),
            start_time=0,
            end_time=None,
            lifecycle_stage=LifecycleStage.ACTIVE,
            artifact_uri=self._directory().as_uri(),
        )
        return Run(info, RunData())

    def update_run_info(
        self, run_id: Any, run_status: Any, end_time: Any, run_name: Any
    ) -> RunInfo:
        """Do nothing: the sweep ends the run."""
        del run_id, run_status, end_time, run_name
        return self.get_run(self._run_id()).info

    def get_experiment(self, experiment_id: str) -> Experiment:
        return Experiment(experiment_id, "trial", "", LifecycleStage.ACTIVE)

    def get_experiment_by_name(self, experiment_name: str) -> Experiment:
        """Return the same experiment for any name: a trial has only one."""
        return Experiment(_EXPERIMENT_ID, experiment_name, "", LifecycleStage.ACTIVE)

    def _directory(self) -> Path:
        return self._taker.directory() or _refuse("for something while no run was open")

    def _run_id(self) -> str:
        # One id per trial: MLflow caches data by run id, and a worker runs several trials.
        return hashlib.sha256(str(self._directory()).encode()).hexdigest()[:32]


def _refuse(what: str) -> NoReturn:
    raise MlflowException(
        f"this trial asked MLflow {what}; inside a trial the plain MLflow API records metrics, "
        "params, tags and files in the trial's own run and nothing else; remove the call, or "
        "choose another server with mlflow.set_tracking_uri(...) before it"
    )


def _refused(name: str) -> Any:
    def method(self: Any, *args: Any, **options: Any) -> NoReturn:
        del self, args, options
        _refuse(f"for {name}")

    return method


for _name in UNSUPPORTED_STORE_METHODS:
    setattr(TrialStore, _name, _refused(_name.strip("_")))
abc.update_abstractmethods(TrialStore)  # type: ignore[type-abstract]
