"""What `mlflow server` does before it serves, by MLflow's private parts (3.17).

`test_mlflow_has_the_names_we_patch` names what is relied on. What must not live here:
who may ask (`tracking.ui_guard`), and how artifacts are read (`tracking.ui_artifacts`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

STORE = "_MLFLOW_SERVER_FILE_STORE"
REGISTRY = "_MLFLOW_SERVER_REGISTRY_STORE"
ARTIFACTS = "_MLFLOW_SERVER_ARTIFACT_ROOT"
SERVED_BY = "_MLFLOW_SGI_NAME"


def pages(store: str, artifacts: Path) -> Any:
    """Return MLflow's ASGI application on a store, whose artifacts are read below a directory.

    Args:
        store: The database's address.
        artifacts: The directory.
    """
    place = artifacts.as_uri()
    os.environ.update({STORE: store, REGISTRY: store, ARTIFACTS: place, SERVED_BY: "uvicorn"})
    # mlflow.server sets its checks of hosts and origins up when it is imported
    from mlflow.server.fastapi_app import app
    from mlflow.server.handlers import initialize_backend_stores
    from mlflow.store.artifact.artifact_repository_registry import _artifact_repository_registry

    from tracking.ui_artifacts import below

    reader = below(artifacts)
    known = _artifact_repository_registry.get_registered_artifact_repositories()  # type: ignore[no-untyped-call]
    lead_to_others = {scheme: known[scheme] for scheme in ("runs", "models")}
    known.clear()
    known.update({"": reader, "file": reader, "mlflow-artifacts": reader, **lead_to_others})
    initialize_backend_stores(store, store, place)
    return app
