"""Private names of MLflow and Optuna occur in `mlflow_compat` and `optuna_compat` alone.

A name is private if it, or its module, begins with `_`; or if its library does not document it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("sweeps", "trainable", "tracking", "redaction")
ALLOWED = ("sweeps/optuna_compat/", "tracking/mlflow_compat.py")
UNDOCUMENTED = ("mlflow.store", "mlflow.server", "mlflow.utils", "mlflow.protos")
"""Packages of MLflow that its reference leaves out."""
NAMES = {
    # MLflow
    "_download_file",
    "_search_runs",
    "_register",
    "_artifact_repository_registry",
    "_get_store",
    # Optuna
    "_trial_id",
    "_study_id",
    "_storage",
    "_backend",
    "_cached_storage",
    "_gprs_cache_list",
    "_find_sample_id",
    "_set_trial_param_without_commit",
    "scoped_session",
}
"""Attributes of the objects of both; own attributes of these names are read through `self`."""
OWN = {"self", "cls"}
TEXTS = re.compile(
    r"_MLFLOW_|mlflow\.sharedViewState|NSGAIISampler:|alembic_version|version_info|"
    r"\b(FROM|JOIN|INTO|UPDATE|TABLE) (experiments|tags|params|metrics|latest_metrics|"
    r"studies|study_\w+|trials|trial_\w+)\b"
)
"""Environment variables, tags, attributes and tables."""


def files() -> list[Path]:
    found = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return [file for file in found if not str(file.relative_to(ROOT)).startswith(ALLOWED)]


def private(source: str) -> Iterator[str]:
    """Yield the private names of MLflow and Optuna in a module."""
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (one.name for one in names if _is_private(one.name))
            case ast.ImportFrom(module=str(module), names=names):
                full = (f"{module}.{one.name}" for one in names)
                yield from filter(_is_private, full)
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in OWN:
                if name in NAMES - {"_storage", "_study_id", "_register"}:
                    yield f"{owner}.{name}"
            case ast.Attribute(attr=name) if name in NAMES:
                yield name
            case ast.FunctionDef(name=name) if name in NAMES - {"_storage", "_register"}:
                yield f"def {name}"
            case ast.Constant(value=str(text)) if id(node) not in documentation:
                yield from (match[0] for match in TEXTS.finditer(text))


def _is_private(name: str) -> bool:
    library = name.partition(".")[0]
    return library in ("mlflow", "optuna") and (
        any(part.startswith("_") for part in name.split("."))
        or name.startswith(tuple(f"{package}." for package in UNDOCUMENTED))
        or name in UNDOCUMENTED
    )


@pytest.mark.parametrize(
    "line",
    [
        "import mlflow.server",
        "from mlflow.utils import rest_utils",
        "from mlflow.tracking._tracking_service import utils",
        "from optuna.storages._rdb.models import TrialModel",
        "from optuna.storages import _CachedStorage",
        "trial._trial_id = 1",
        "study._storage.set_trial_system_attr()",
        "class A:\n    def _find_sample_id(self): ...",
        "self._gprs_cache_list = []",
        "os.environ['_MLFLOW_SGI_NAME'] = 'uvicorn'",
        "db.execute('SELECT 1 FROM trial_params')",
        "db.execute(f'SELECT {a} FROM metrics')",
    ],
)
def test_private_name_is_found(line: str) -> None:
    assert list(private(line))


@pytest.mark.parametrize(
    "line",
    [
        "from mlflow import MlflowClient",
        "from mlflow.exceptions import MlflowException",
        "from optuna.trial import FrozenTrial",
        "self._storage = storage",
        "db.execute('SELECT run_id FROM runs')",
        '"""Read by SQL FROM trials."""',
    ],
)
def test_public_name_is_not_found(line: str) -> None:
    assert not list(private(line))


def test_no_module_has_private_names() -> None:
    sources = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files()}
    assert len(sources) > 200
    found = {file: names for file, source in sources.items() if (names := [*private(source)])}
    assert found == {}
