"""Every private part of MLflow that this project uses: names, tables, and a patch.

Each has a comment with the reason. `tests/contract/test_mlflow_compat.py` asserts each signature
and meaning by name, so it fails with a release of MLflow that changes one; a unit test makes sure
that no other module uses such a part. Importing this module does not import MLflow, which takes
seconds: commands that only read a store use the queries without it. What must not live here:
public parts of MLflow, and what is done with these.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from importlib import import_module, metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.protos.databricks_pb2 import PERMISSION_DENIED, RESOURCE_DOES_NOT_EXIST
    from mlflow.store.artifact.artifact_repo import ArtifactRepository
    from mlflow.store.tracking.abstract_store import AbstractStore
    from mlflow.utils.file_utils import local_file_uri_to_path

__all__ = [
    "DOWNLOAD_METHOD",
    "PERMISSION_DENIED",
    "RESOURCE_DOES_NOT_EXIST",
    "SHARED_VIEW_TAG",
    "UNSUPPORTED_STORE_METHODS",
    "AbstractStore",
    "ArtifactRepository",
    "TablesDiffer",
    "check_revision",
    "http_get",
    "local_file_uri_to_path",
    "make_pages",
    "register_store",
    "store_artifact",
]

LAZY_NAMES = {
    # The plain MLflow API in a trial calls a store of this kind (`trial_store`).
    "AbstractStore": "mlflow.store.tracking.abstract_store",
    # The pages of `sweep ui` read artifacts through a class of this kind (`ui_artifacts`).
    "ArtifactRepository": "mlflow.store.artifact.artifact_repo",
    # It reads `file:` addresses as MLflow itself does.
    "local_file_uri_to_path": "mlflow.utils.file_utils",
    # The error codes that MLflow's pages show as "no permission" and "no such artifact".
    "PERMISSION_DENIED": "mlflow.protos.databricks_pb2",
    "RESOURCE_DOES_NOT_EXIST": "mlflow.protos.databricks_pb2",
}
"""MLflow's classes, functions and constants, with their modules."""

DOWNLOAD_METHOD = "_download_file"
"""The method of `ArtifactRepository` that reads one artifact; subclasses must override it."""

UNSUPPORTED_STORE_METHODS = (
    *("search_experiments", "create_experiment", "delete_experiment", "restore_experiment"),
    *("rename_experiment", "delete_run", "restore_run", "get_metric_history", "_search_runs"),
    *("log_inputs", "log_outputs", "link_traces_to_run", "delete_tag", "record_logged_model"),
    *("create_logged_model", "log_logged_model_params", "start_trace", "log_spans"),
)
"""Methods of `AbstractStore` that the store of one trial refuses. `_search_runs` is what
`search_runs` calls."""

SHARED_VIEW_TAG = "mlflow.sharedViewState."
"""The prefix of the experiment's tags from which the pages of runs read a shared view: no page
takes parameters or metrics from its address. MLflow documents neither the tag nor its JSON."""


def __getattr__(name: str) -> Any:
    """Import one of MLflow's names on first access."""
    if (module := LAZY_NAMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


# -- The tables of MLflow's SQL store: they are read without importing MLflow ---------------------

VERSION_TABLE = "alembic_version"
"""The table of the store's revision; a database without it is no store, or an empty one."""
RUNS_TABLE = "runs"
"""A table that every complete store has."""
REVISION_QUERY = "SELECT version_num FROM alembic_version"
"""The revision of a store's tables."""
EXPERIMENT_QUERY = "SELECT 1 FROM experiments WHERE name = ?"
"""Whether an experiment exists: it reads the table's index."""
RUN_QUERY = "SELECT 1 FROM runs WHERE run_uuid = ?"
"""Whether a run exists."""

# In the queries below, `{key}` is the quoted column `key`, which is a reserved word of MySQL.
SWEEP_RUNS_QUERY = """
    SELECT r.run_uuid, role.value, trial.value, r.status, r.lifecycle_stage,
        e.lifecycle_stage, r.artifact_uri
    FROM tags t JOIN runs r ON r.run_uuid = t.run_uuid
    JOIN experiments e ON e.experiment_id = r.experiment_id
    LEFT JOIN tags role ON role.run_uuid = t.run_uuid AND role.{key} = :role
    LEFT JOIN tags trial ON trial.run_uuid = t.run_uuid AND trial.{key} = :trial
    WHERE t.{key} = :sweep AND t.value = :id ORDER BY r.start_time, r.run_uuid"""
"""The runs of a sweep, by the tag `:sweep` with the value `:id`; deleted ones included."""
PARAMS_QUERY = "SELECT run_uuid, {key} FROM params WHERE run_uuid IN :ids"
"""The names of the parameters of some runs."""
TAGS_QUERY = "SELECT run_uuid, {key}, value FROM tags WHERE run_uuid IN :ids"
"""The tags of some runs."""
CURVES_QUERY = (
    "SELECT run_uuid, {key}, COUNT(*), SUM(step) FROM metrics "
    "WHERE run_uuid IN :ids GROUP BY run_uuid, {key}"
)
"""How many points each metric of some runs has; MLflow's client would fetch every point."""
LAST_VALUES_QUERY = (
    "SELECT run_uuid, {key}, value, is_nan FROM latest_metrics WHERE run_uuid IN :ids"
)
"""The last value of each metric of some runs."""
STEPS_QUERY = "SELECT DISTINCT step FROM metrics WHERE run_uuid = :run AND {key} = :metric"
"""The steps at which a metric has values."""

ARTIFACT_ADDRESSES_QUERY = """
    SELECT artifact_location FROM experiments WHERE name = :name
    UNION SELECT r.artifact_uri FROM runs r
    JOIN experiments e ON e.experiment_id = r.experiment_id WHERE e.name = :name"""
"""The addresses of the artifacts of an experiment and of its runs."""
EXPERIMENT_ADDRESSES_QUERY = "SELECT artifact_location FROM experiments"
"""The addresses of the artifacts of all experiments."""
ARTIFACT_ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
"""The tables and columns with absolute addresses of artifacts: MLflow has no relative ones, and no
method that changes one."""

MIGRATIONS = Path("store", "db_migrations", "versions")
"""Where MLflow's package has its migrations: the newest one is the revision that it needs."""
_REVISION = re.compile(r'^(down_)?revision = "(\w+)"', re.MULTILINE)


class TablesDiffer(Exception):
    """A store's schema version is not that of the installed MLflow."""

    def __init__(self, found: str, wanted: str, *, is_older: bool) -> None:
        version = metadata.version("mlflow")
        super().__init__(
            f"was created by another MLflow version: its tables have revision {found}, and MLflow "
            f"{version} needs {wanted}"
        )
        self._is_older = is_older

    def remedy(self, uri: str) -> str:
        """Return the remedy: an upgrade of the database, or another MLflow."""
        if self._is_older:
            return f"take a backup of it and run: mlflow db upgrade '{uri}'"
        return "install the MLflow version that created it"


def check_revision(row: Sequence[Any] | None) -> None:
    """Compare the answer to `REVISION_QUERY` with the installed MLflow.

    MLflow refuses a store whose migrations are not those of its package.
    """
    if row is None:
        return
    known, before = _migrations()
    (wanted,) = known - before
    if row[0] != wanted:
        raise TablesDiffer(str(row[0]), wanted, is_older=row[0] in known)


def _migrations() -> tuple[set[str], set[str]]:
    """Return the revisions of all migrations, and those that have a successor."""
    package = util.find_spec("mlflow")
    assert package is not None, "mlflow is a dependency"
    assert package.origin is not None, "mlflow is not a namespace package"
    revisions: tuple[set[str], set[str]] = set(), set()
    for file in Path(package.origin).parent.joinpath(MIGRATIONS).glob("*.py"):
        for is_before, revision in _REVISION.findall(file.read_text(encoding="utf-8")):
            revisions[bool(is_before)].add(revision)
    return revisions


# -- The requests of MLflow's client --------------------------------------------------------------


def http_get(uri: str, endpoint: str, *, timeout: float) -> Any:
    """Send one GET request to a tracking server, without a retry.

    This calls MLflow's own function, so certificates, proxies and tokens are as in later calls.
    """
    from mlflow.utils import credentials, rest_utils

    request: Any = rest_utils.http_request  # these two have no types
    read_credentials: Any = credentials.get_default_host_creds
    return request(
        read_credentials(uri.rstrip("/")),
        endpoint,
        "GET",
        max_retries=0,
        timeout=timeout,
        raise_on_status=False,
    )


# -- The plain API inside a trial -----------------------------------------------------------------


def register_store(scheme: str, builder: Callable[..., Any]) -> None:
    """Let addresses of a scheme lead to a tracking store.

    The public way is an entry point, but every MLflow process of the environment would load it.
    """
    from mlflow.tracking._tracking_service import utils

    utils._register(scheme, builder)  # type: ignore[no-untyped-call]


# -- The pages behind `sweep ui` ------------------------------------------------------------------

BROWSER_SETTINGS = {
    "mlflow.workflowType_v1": '"machine_learning"',
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true",
}
"""What MLflow's pages keep in a browser's local storage, with values in JSON. By the first, the
page of a run is that of a training run, which begins with the description. By the second, the
assistant does not open by itself: it takes a quarter of the page, and `tracking.ui_app` refuses
its requests."""

BACKEND_VARIABLE = "_MLFLOW_SERVER_FILE_STORE"
"""The environment variable in which MLflow's application finds the tracking store."""
REGISTRY_VARIABLE = "_MLFLOW_SERVER_REGISTRY_STORE"
"""The same for the model registry."""
ARTIFACTS_VARIABLE = "_MLFLOW_SERVER_ARTIFACT_ROOT"
"""The same for the root of the artifacts."""
SERVED_BY_VARIABLE = "_MLFLOW_SGI_NAME"
"""If it is set, MLflow's application knows that an ASGI server runs it."""
LEADS_TO_OTHERS = ("runs", "models")
"""Schemes of artifacts whose reader looks up another address and reads from there."""


def store_artifact(address: str, file: Path, folder: str) -> None:
    """Store a file below the address of a run's artifacts.

    A client takes the address that it remembers for the run's id. In a copied root the run has
    another one.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    store = get_artifact_repository(address)
    store.log_artifact(str(file), folder or None)  # type: ignore[no-untyped-call]


def make_pages(store: str, artifacts: Path, reader: type[ArtifactRepository]) -> Any:
    """Return MLflow's ASGI application on a store, as `mlflow server` makes it.

    `mlflow server` itself reads every file that a run's artifact address names, and has no login.
    So all readers of artifacts are replaced.
    """
    root = artifacts.as_uri()
    os.environ.update(
        {
            BACKEND_VARIABLE: store,
            REGISTRY_VARIABLE: store,
            ARTIFACTS_VARIABLE: root,
            SERVED_BY_VARIABLE: "uvicorn",
        }
    )
    # The import of mlflow.server sets up its checks of hosts and origins.
    from mlflow.server.fastapi_app import app
    from mlflow.server.handlers import initialize_backend_stores
    from mlflow.store.artifact.artifact_repository_registry import _artifact_repository_registry

    known = _artifact_repository_registry.get_registered_artifact_repositories()  # type: ignore[no-untyped-call]
    lead_to_others = {scheme: known[scheme] for scheme in LEADS_TO_OTHERS}
    known.clear()
    known.update({"": reader, "file": reader, "mlflow-artifacts": reader, **lead_to_others})
    initialize_backend_stores(store, store, root)
    return app
