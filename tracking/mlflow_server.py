"""MLflow as a `TrackingServer`: the calls of delivery and reading, made with `MlflowClient`.

`connect` imports mlflow, which takes seconds and 150 MB: the caller chooses the thread that waits.
Only `MlflowClient` is used, because mlflow's fluent API has global state. What must not live here:
what is sent when, and what happens after an error.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tracking.address import is_database, sqlite_file, sqlite_uri
from tracking.artifact_addresses import check_inside
from tracking.delivery import (
    TAG_ROLE,
    TAG_SWEEP,
    TAG_TRIAL,
    FoundRun,
    RecordRejected,
    RunGone,
    RunState,
    TrackingServer,
)
from tracking.limits import clean_key
from tracking.metric_points import Request
from tracking.mlflow_compat import store_artifact
from tracking.outbox import SWEEP, logger
from tracking.trusted_stores import check_artifacts, check_trusted, secured

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_PAGE = 1000
_CREATE_SECONDS = 180.0
"""How long another process may take to create a store; it takes 20 s on a busy machine."""
_FILE = re.compile(r"sqlite(\+pysqlite)?:///(?!file:|:memory:|.*\?)")
"""URIs of SQLite files that may be created."""
# BAD_REQUEST is not among them: a proxy may have sent it, and the next attempt may succeed.
_REFUSALS = frozenset({"INVALID_PARAMETER_VALUE"})
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # mlflow would print a URL at the end of each run, into the JSON output of a command.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    # mlflow would repeat a request whose answer was lost. `Delivery` does that itself, after it
    # has checked what the first request did. Also, a thread in mlflow's back-off cannot be
    # stopped, and the back-off takes two minutes by default.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
}


def connect(uri: str) -> MlflowClient:
    """Import mlflow and return a client.

    A missing SQLite store is created, which takes seconds. MLflow's environment variables are set,
    except those that the user has set.
    """
    check_trusted(uri)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow

    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        _quiet()
    if _FILE.match(uri) and (store := sqlite_file(uri)) is not None and not store.exists():
        _create(store)
    return mlflow.MlflowClient(tracking_uri=secured(uri))


def _create(store: Path) -> None:
    """Create an SQLite store completely or not at all.

    mlflow creates its tables and then runs its migrations one by one. If the process is killed in
    between, mlflow can never open that file.
    """
    import mlflow

    aside = store.with_name(f".{store.name}.new")
    store.parent.mkdir(parents=True, exist_ok=True)
    directory = os.open(store.parent, os.O_RDONLY)
    try:
        _lock(directory, store)  # another sweep may be creating it
        if store.exists():
            return
        for rest in (aside, aside.with_name(f"{aside.name}-journal")):
            rest.unlink(missing_ok=True)  # left by a process that was killed
        mlflow.MlflowClient(tracking_uri=sqlite_uri(aside)).search_experiments(max_results=1)
        aside.rename(store)
        os.fsync(directory)
    finally:
        os.close(directory)


def _lock(directory: int, store: Path) -> None:
    """Lock a directory. Any process that may read the directory can do so."""
    deadline = time.monotonic() + _CREATE_SECONDS
    while True:
        try:
            return fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{store.parent} has been locked for {_CREATE_SECONDS:g} s, longer than "
                    f"another sweep needs to create {store.name} there; find the process that "
                    "holds the lock in /proc/locks and end it, or choose another --root"
                ) from None
            time.sleep(0.1)


def search(
    client: MlflowClient, experiment_id: str, sweep_id: str, *, page_size: int = _PAGE
) -> Iterator[Run]:
    """Yield all runs of a sweep, deleted ones included."""
    from mlflow.entities import ViewType

    token = None
    while True:
        page = client.search_runs(
            [experiment_id],
            filter_string=f"tags.`{TAG_SWEEP}` = '{sweep_id}'",
            run_view_type=ViewType.ALL,
            max_results=page_size,
            page_token=token,
        )
        yield from page
        token = page.token
        if not token:
            return


def trial_of(run: Run) -> int | None:
    """Return a run's trial: `SWEEP` for the sweep's own run, None for a run that is neither."""
    if run.data.tags.get(TAG_ROLE) == "sweep":
        return SWEEP
    number = run.data.tags.get(TAG_TRIAL, "")
    return int(number) if number.isdecimal() else None


class MlflowServer(TrackingServer):
    """A tracking server and one experiment in it."""

    def __init__(
        self, uri: str, artifact_root: Path | None, experiment: str, sweep_id: str
    ) -> None:
        self._client = connect(uri)
        self._uri = uri
        self._artifact_root = artifact_root
        self._experiment = experiment
        self._sweep_id = sweep_id

    def open_experiment(self, known: str | None) -> str:
        with _translated():
            found = self._client.get_experiment_by_name(self._experiment)
            if known is not None and self._holds_runs(known):
                found = self._client.get_experiment(known)
            if found is None:
                location = None
                if self._artifact_root is not None:
                    location = (
                        self._artifact_root.absolute() / _folder(self._experiment)
                    ).as_uri()
                return str(
                    self._client.create_experiment(self._experiment, artifact_location=location)
                )
            if found.lifecycle_stage == "deleted":
                self._client.restore_experiment(found.experiment_id)
                logger.warning(
                    "the experiment '%s' was deleted and is restored: the runs of this sweep are "
                    "recorded in it; to delete them for good, remove the sweep's directory, too",
                    found.name,
                )
            return str(found.experiment_id)

    def _holds_runs(self, experiment_id: str) -> bool:
        """Whether the experiment has runs of the sweep; a server that was emptied reuses ids."""
        try:
            with _translated():
                return any(search(self._client, experiment_id, self._sweep_id, page_size=1))
        except RunGone:  # the answer of some servers for a missing experiment
            return False

    def find_runs(self, experiment_id: str) -> list[FoundRun]:
        with _translated():
            return [
                FoundRun(
                    run_id=run.info.run_id,
                    trial=trial,
                    start_ms=run.info.start_time or 0,
                    deleted=run.info.lifecycle_stage == "deleted",
                    empty=not run.data.metrics and not run.data.params,
                )
                for run in search(self._client, experiment_id, self._sweep_id)
                if (trial := trial_of(run)) is not None
            ]

    def create_run(self, experiment_id: str, start_ms: int, tags: Mapping[str, str]) -> str:
        with _translated():
            run = self._client.create_run(experiment_id, start_time=start_ms, tags=dict(tags))
            return str(run.info.run_id)

    def restore_run(self, run_id: str) -> None:
        with _translated():
            self._client.restore_run(run_id)

    def delete_run(self, run_id: str) -> None:
        with _translated():
            self._client.delete_run(run_id)

    def read_run(self, run_id: str) -> RunState:
        with _translated():
            run = self._client.get_run(run_id)
            data = run.data
            return RunState(
                run.info.status,
                dict(data.params),
                frozenset(data.metrics),
                dict(data.tags),
                run.info.artifact_uri or "",
            )

    def history(self, run_id: str, key: str) -> list[tuple[int, float]]:
        with _translated():
            return [(m.step, m.value) for m in self._client.get_metric_history(run_id, key)]

    def log(self, run_id: str, request: Request) -> None:
        """Write new parameters, then points, then tags, each in a transaction of its own."""
        from mlflow.entities import Metric, Param, RunTag

        with _translated():
            for part in request.split():
                self._client.log_batch(
                    run_id,
                    params=[Param(k, v) for k, v in part.params.items()],
                    metrics=[Metric(p.key, p.value, p.timestamp_ms, p.step) for p in part.points],
                    tags=[RunTag(k, v) for k, v in part.tags.items()],
                )

    def set_experiment_tags(self, experiment_id: str, tags: Mapping[str, str]) -> None:
        with _translated():
            for name, value in tags.items():
                self._client.set_experiment_tag(experiment_id, name, value)

    def set_status(self, run_id: str, status: str, end_ms: int | None) -> None:
        with _translated():
            if end_ms is None:
                self._client.update_run(run_id, status=status)
            else:
                self._client.set_terminated(run_id, status=status, end_time=end_ms)

    def upload(self, run_id: str, path: Path, folder: str) -> None:
        with _translated():
            if is_database(self._uri):
                address = self._client.get_run(run_id).info.artifact_uri or ""
                check_artifacts(self._uri, address)
                if self._artifact_root is not None:
                    check_inside(address, self._artifact_root, f"{folder}/{path.name}".lstrip("/"))
                store_artifact(address, path, folder)
            else:
                self._client.log_artifact(run_id, str(path), folder or None)


@contextmanager
def _translated() -> Iterator[None]:
    """Raise `RunGone` or `RecordRejected` for errors that a retry cannot fix."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            raise RunGone(str(error)) from error
        if error.error_code in _REFUSALS:
            raise RecordRejected(str(error)) from error
        raise


class _ForwardToTracking(logging.Handler):
    """Forwards a library's warnings and errors to the logger `tracking`."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("tracking").handle(record)


def _quiet() -> None:
    """Drop mlflow's messages below WARNING, and forward the others to the logger `tracking`."""
    for name in ("mlflow", "alembic"):
        library = logging.getLogger(name)
        library.handlers = [_ForwardToTracking(logging.WARNING)]
        library.setLevel(logging.WARNING)
        library.propagate = False


def _folder(experiment: str) -> str:
    return re.sub(r"[ :/]", "_", clean_key(experiment))


__all__ = ["MlflowServer", "connect", "search", "trial_of"]
