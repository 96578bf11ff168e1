"""The plain MLflow API inside a trial: a tracking store that hands on what it is given.

`mlflow.log_metric` and its like, called by a user's code in a worker, end here instead of in a
database of their own. The worker asks no server: it only hands on. What cannot be handed on is
refused. What must not live here: who takes it, and when calls are redirected (`trial_redirect`).
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
    """Who takes what the plain API is given."""

    def metrics(self, points: Sequence[tuple[str, float, int, int]]) -> None:
        """Take values: key, value, step and milliseconds since the Unix epoch."""
        ...

    def params(self, params: Mapping[str, str]) -> None:
        """Take parameters."""
        ...

    def tags(self, tags: Mapping[str, str]) -> None:
        """Take tags."""
        ...

    def directory(self) -> Path | None:
        """Return where files are put; None while no run is open."""
        ...


class TrialStore(AbstractStore):
    """The store of one trial, which has one run: whichever is started, it is that one."""

    def __init__(self, taker: Taker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._taker = taker

    def log_batch(self, run_id: str, metrics: Any, params: Any, tags: Any) -> None:
        """Hand on a batch; every call of the plain API that logs comes to this."""
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
        """Return the trial's run; what it has is the driver's to know."""
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
        """Leave the run as it is: the sweep ends it."""
        del run_id, run_status, end_time, run_name
        return self.get_run(self._run_id()).info

    def get_experiment(self, experiment_id: str) -> Experiment:
        return Experiment(experiment_id, "trial", "", LifecycleStage.ACTIVE)

    def get_experiment_by_name(self, experiment_name: str) -> Experiment:
        """Return the sweep's experiment under any name: a trial has no other one."""
        return Experiment(_EXPERIMENT_ID, experiment_name, "", LifecycleStage.ACTIVE)

    def _directory(self) -> Path:
        return self._taker.directory() or _refuse("for something while no run was open")

    def _run_id(self) -> str:
        # MLflow keeps what it knows of a run by its id; a worker has one trial after the other.
        return hashlib.sha256(str(self._directory()).encode()).hexdigest()[:32]


def _refuse(what: str) -> NoReturn:
    raise MlflowException(
        f"this trial asked MLflow {what}; inside a trial the plain MLflow API records metrics, "
        "params, tags and files into the trial's own run and nothing else; leave the call out, or "
        "name a server of your own with mlflow.set_tracking_uri(...) before it"
    )


def _refused(name: str) -> Any:
    def method(self: Any, *args: Any, **options: Any) -> NoReturn:
        del self, args, options
        _refuse(f"for {name}")

    return method


for _name in UNSUPPORTED_STORE_METHODS:
    setattr(TrialStore, _name, _refused(_name.strip("_")))
abc.update_abstractmethods(TrialStore)  # type: ignore[type-abstract]
