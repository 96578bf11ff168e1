"""Each private part of MLflow in `tracking/mlflow_compat.py` still is what the project relies on.

A new release of MLflow that changes one fails here by the part's name. Nothing is served and no
store is created: the tests read signatures, tables, and the scripts of MLflow's pages.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import import_module, util
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from tracking import mlflow_compat, mlflow_server, ui, ui_app
from tracking.mlflow_compat import TablesDiffer, check_revision

pytestmark = pytest.mark.integration  # importing MLflow takes seconds


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_importing_the_module_does_not_import_mlflow() -> None:
    program = (
        "import sys, tracking.mlflow_compat; sys.exit({'mlflow', 'sqlalchemy'} & {*sys.modules})"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    # `sys.exit` of a set that is not empty prints it and returns 1
    assert child.stderr.decode().strip() in ("", "set()")


@pytest.mark.parametrize("name", mlflow_compat.LAZY_NAMES)
def test_lazy_name(name: str) -> None:
    module = import_module(mlflow_compat.LAZY_NAMES[name])
    assert getattr(mlflow_compat, name) is getattr(module, name)


# -- The store of the plain API -------------------------------------------------------------------


def test_register_store() -> None:
    from mlflow.tracking._tracking_service import utils

    assert parameters(utils._register) == ["scheme", "builder"]
    built = object()
    given = {}

    def build(**options: Any) -> object:
        given.update(options)
        return built

    mlflow_compat.register_store("gradsweep-contract", build)
    assert utils._get_store("gradsweep-contract://run") is built
    assert set(given) == {"store_uri", "artifact_uri"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("log_batch", ["run_id", "metrics", "params", "tags"]),
        ("log_metric", ["run_id", "metric"]),
        ("log_param", ["run_id", "param"]),
        ("set_tag", ["run_id", "tag"]),
        ("create_run", ["experiment_id", "user_id", "start_time", "tags", "run_name"]),
        ("get_run", ["run_id"]),
        ("update_run_info", ["run_id", "run_status", "end_time", "run_name"]),
        ("get_experiment", ["experiment_id"]),
        ("get_experiment_by_name", ["experiment_name"]),
    ],
)
def test_abstract_store_method(name: str, expected: list[str]) -> None:
    from tracking.trial_store import TrialStore

    assert parameters(getattr(mlflow_compat.AbstractStore, name)) == ["self", *expected]
    assert parameters(getattr(TrialStore, name)) == ["self", *expected]


@pytest.mark.parametrize("name", mlflow_compat.UNSUPPORTED_STORE_METHODS)
def test_unsupported_store_method(name: str) -> None:
    from mlflow.store.tracking.rest_store import RestStore

    # MLflow's client calls a few methods that `AbstractStore` does not declare.
    assert hasattr(mlflow_compat.AbstractStore, name) or hasattr(RestStore, name)


def test_search_runs_calls_its_private_part() -> None:
    from mlflow.exceptions import MlflowException

    from tracking.trial_store import TrialStore

    assert "_search_runs" in mlflow_compat.UNSUPPORTED_STORE_METHODS
    store: Any = TrialStore(None)  # type: ignore[abstract, arg-type]
    with pytest.raises(MlflowException, match="inside a trial"):
        store.search_runs(["0"], "", 1)


# -- The pages and their artifacts ----------------------------------------------------------------


def test_artifact_repository() -> None:
    repository = mlflow_compat.ArtifactRepository
    assert parameters(repository) == ["artifact_uri", "tracking_uri", "registry_uri"]
    download = getattr(repository, mlflow_compat.DOWNLOAD_METHOD)
    assert parameters(download) == ["self", "remote_file_path", "local_path"]
    assert parameters(repository.list_artifacts) == ["self", "path"]
    assert parameters(repository.log_artifact)[1:] == ["local_file", "artifact_path"]
    assert parameters(repository.log_artifacts)[1:] == ["local_dir", "artifact_path"]


def test_download_artifacts_calls_the_overridden_method(tmp_path: Path) -> None:
    from tracking.ui_artifacts import below

    (tmp_path / "a b.txt").write_text("a")
    (tmp_path / "copies").mkdir()
    uri = (tmp_path / "a b.txt").as_uri()
    assert mlflow_compat.local_file_uri_to_path(uri) == str(tmp_path / "a b.txt")
    reader = below(tmp_path)(tmp_path.as_uri())
    copy = reader.download_artifacts("a b.txt", str(tmp_path / "copies"))
    assert Path(copy).read_text() == "a"


def test_store_artifact(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("x")
    mlflow_compat.store_artifact((tmp_path / "run").as_uri(), tmp_path / "file.txt", "notes")
    assert (tmp_path / "run/notes/file.txt").read_text() == "x"


def test_make_pages() -> None:
    from mlflow.environment_variables import _MLFLOW_SGI_NAME

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MLflow's about starlette
        from mlflow.server import constants
        from mlflow.server.fastapi_app import app
        from mlflow.server.handlers import initialize_backend_stores
    from mlflow.store.artifact.artifact_repository_registry import _artifact_repository_registry

    assert mlflow_compat.BACKEND_VARIABLE == constants.BACKEND_STORE_URI_ENV_VAR
    assert mlflow_compat.REGISTRY_VARIABLE == constants.REGISTRY_STORE_URI_ENV_VAR
    assert mlflow_compat.ARTIFACTS_VARIABLE == constants.ARTIFACT_ROOT_ENV_VAR
    assert _MLFLOW_SGI_NAME.name == mlflow_compat.SERVED_BY_VARIABLE
    assert parameters(initialize_backend_stores)[:3] == [
        "backend_store_uri",
        "registry_store_uri",
        "default_artifact_root",
    ]
    known = _artifact_repository_registry.get_registered_artifact_repositories()
    assert known is _artifact_repository_registry.get_registered_artifact_repositories()
    assert {"", "file", "mlflow-artifacts", *mlflow_compat.LEADS_TO_OTHERS} <= set(known)
    assert parameters(app.__call__) == ["scope", "receive", "send"]  # ASGI


def test_paths_that_the_guard_allows_are_mlflows() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MLflow's about starlette
        from mlflow.server import app

    asked = {
        "/ajax-api/2.0/mlflow/experiments/search": "POST",
        "/ajax-api/2.0/mlflow/experiments/get": "GET",
        "/ajax-api/2.0/mlflow/runs/search": "POST",
        "/ajax-api/2.0/mlflow/runs/get": "GET",
        "/ajax-api/2.0/mlflow/runs/set-tag": "POST",
        "/ajax-api/2.0/mlflow/artifacts/list": "GET",
        "/ajax-api/2.0/mlflow/metrics/get-history-bulk-interval": "GET",
        "/ajax-api/2.0/mlflow/registered-models/search": "GET",
        "/get-artifact": "GET",
        "/graphql": "POST",
        "/health": "GET",
        "/version": "GET",
    }
    offered = {
        (rule.rule, method) for rule in app.url_map.iter_rules() for method in rule.methods or ()
    }
    assert set(asked.items()) <= offered
    assert all(ui_app.is_allowed(method, path) for path, method in asked.items())


def test_shared_view() -> None:
    """The pages' scripts read the view's tag, its key in the address, and its fields."""
    unknown = {
        mlflow_compat.SHARED_VIEW_TAG.rstrip("."),
        "viewStateShareKey",
        "compareRunCharts",
        "compareRunSections",
        "isAccordionReordered",
        "runsHiddenMode",
        "FIRST_10_RUNS",
        "selectedParams",
        "selectedMetrics",
        "metricSectionId",
        "columnOrder",
        "columnWidths",
    }
    assert not _unknown_to_the_pages(unknown)


def test_browser_settings() -> None:
    """The pages' scripts read each setting under its key with its version behind `_v`."""
    names = {key.removesuffix("_v1") for key in mlflow_compat.BROWSER_SETTINGS}
    assert names.isdisjoint(mlflow_compat.BROWSER_SETTINGS)
    assert not _unknown_to_the_pages({f'key:"{name}",version:1' for name in names} | {"_v${"})


def _unknown_to_the_pages(texts: set[str]) -> set[str]:
    package = util.find_spec("mlflow")
    assert package is not None
    assert package.origin is not None
    build = Path(package.origin).parent / "server" / "js" / "build" / "static" / "js"
    for script in sorted(build.glob("*.js"), key=lambda file: -file.stat().st_size):
        script_text = script.read_text(encoding="utf-8")
        texts = {text for text in texts if text not in script_text}
    return texts


# -- Tables, requests, environment ----------------------------------------------------------------


def test_tables_have_the_columns_that_queries_read() -> None:
    """Each query is prepared on empty tables, as MLflow defines them."""
    from mlflow.store.tracking.dbmodels import models

    engine = sqlalchemy.create_engine("sqlite://")
    kinds = (
        *(models.SqlExperiment, models.SqlRun, models.SqlTag, models.SqlParam, models.SqlMetric),
        models.SqlLatestMetric,
    )
    models.SqlRun.metadata.create_all(engine, tables=[kind.__table__ for kind in kinds])
    names = ("role", "trial", "sweep", "id", "name", "ids", "run", "metric")
    queries = {name: text for name, text in vars(mlflow_compat).items() if name.endswith("_QUERY")}
    queries.pop("REVISION_QUERY")  # the table of Alembic, and not of MLflow's models
    with engine.connect() as db:
        for text in queries.values():
            query = text.format(key='"key"').replace(":ids", "(:ids)").replace("?", ":id")
            values = {name: "a" for name in names if f":{name}" in query}
            assert not db.execute(sqlalchemy.text(query), values).fetchall()
        assert sqlalchemy.inspect(db).has_table(mlflow_compat.RUNS_TABLE)
    engine.dispose()


def test_artifact_addresses() -> None:
    """These are all columns with addresses of artifacts, and each is a text."""
    from mlflow.store.model_registry.dbmodels import models as registry
    from mlflow.store.tracking.dbmodels import models

    kinds = (models.SqlExperiment, models.SqlRun, models.SqlLoggedModel, registry.SqlModelVersion)
    names = ("artifact_location", "artifact_uri", "source", "storage_location")
    found = {
        (kind.__tablename__, column.name)
        for kind in kinds
        for column in kind.__table__.columns
        if column.name in names and isinstance(column.type, sqlalchemy.String)
    }
    assert set(mlflow_compat.ARTIFACT_ADDRESSES) == found


def test_check_revision() -> None:
    from mlflow.store.db.utils import _get_latest_schema_revision

    check_revision((_get_latest_schema_revision(),))
    check_revision(None)
    with pytest.raises(TablesDiffer, match="its tables have revision 451aebb31d03, and MLflow "):
        check_revision(("451aebb31d03",))


def test_http_get() -> None:
    from mlflow.utils import credentials, rest_utils

    expected = {"host_creds", "endpoint", "method", "max_retries", "timeout", "raise_on_status"}
    assert expected <= set(parameters(rest_utils.http_request))
    assert parameters(rest_utils.http_request)[:3] == ["host_creds", "endpoint", "method"]
    assert parameters(credentials.get_default_host_creds) == ["store_uri"]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in (*mlflow_server._ENVIRONMENT, *ui.SERVER_ENVIRONMENT)
        if name.startswith("MLFLOW_")
    ],
)
def test_environment_variable(name: str) -> None:
    from mlflow import environment_variables

    assert getattr(environment_variables, name).name == name
