"""Putting a model into MLflow's model registry, in a form that runs no code when it is loaded.

What must not live here: where the model comes from, and torch as an import: a model is only handed
on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracking.mlflow_server import connect

if TYPE_CHECKING:
    from mlflow import MlflowClient

ALIAS = "best"
_ARTIFACTS = "model"
_DIGEST = "gradsweep.sha256"


class NotRegistered(Exception):
    """A model could not be put into the registry."""


def register_model(
    uri: str,
    run_id: str,
    name: str,
    model: Any,
    inputs: Sequence[Any],
    *,
    digest: str,
    tags: Mapping[str, str],
) -> str:
    """Register a PyTorch model as a version of `name`, with the alias `best`.

    It is saved as a graph (`torch.export`): `mlflow.pytorch.load_model("models:/NAME@best")` needs
    neither its class nor this package, and unpickles nothing. A model whose digest is registered
    under that name already gets the alias and no second version.

    Args:
        uri: An MLflow tracking URI.
        run_id: The run that the version belongs to.
        name: The registered model; created when missing.
        model: A `torch.nn.Module` on the CPU, in evaluation mode.
        inputs: Tensors for one call of it, whose first dimension counts samples.
        digest: Identifies its weights.
        tags: Of the version.

    Returns:
        The version.

    Raises:
        NotRegistered: It cannot be exported as a graph, or the server refuses.
    """
    client = connect(uri)
    from mlflow.exceptions import MlflowException

    try:
        number = _known_version(client, name, digest)
        if number is None:
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory, _ARTIFACTS)
                _save(model, inputs, path)  # what cannot be saved leaves nothing at the server
                _create(client, name)
                client.log_artifacts(run_id, str(path), _ARTIFACTS)
            source = f"{client.get_run(run_id).info.artifact_uri}/{_ARTIFACTS}"
            made = client.create_model_version(
                name, source, run_id=run_id, tags={**tags, _DIGEST: digest}
            )
            number = str(made.version)
        client.set_registered_model_alias(name, ALIAS, number)
    except MlflowException as error:
        raise NotRegistered(str(error)) from error
    return number


def _known_version(client: MlflowClient, name: str, digest: str) -> str | None:
    found = client.search_model_versions(f"name = '{name}'")
    known = [one.version for one in found if one.tags.get(_DIGEST) == digest]
    return str(max(known, key=int)) if known else None


def _create(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _save(model: Any, inputs: Sequence[Any], path: Path) -> None:
    import mlflow.pytorch
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    arrays = [one.numpy() for one in inputs]
    names = [f"input{index}" for index in range(len(arrays))] if len(arrays) > 1 else [None]
    specs: list[Any] = [
        TensorSpec(one.dtype, (-1, *one.shape[1:]), name)
        for one, name in zip(arrays, names, strict=True)
    ]
    try:
        mlflow.pytorch.save_model(
            model,
            str(path),
            serialization_format="pt2",
            signature=ModelSignature(inputs=Schema(specs)),
            input_example=tuple(arrays),
            pip_requirements=[f"torch=={version('torch')}"],
        )
    except Exception as error:  # tracing a model runs its code, which may raise anything
        reason = str(error).strip().splitlines()
        raise NotRegistered(
            f"the model cannot be exported as a graph ({type(error).__name__}: "
            f"{reason[0] if reason else ''}); see torch.export; "
            "its weights can be had with `sweep best NAME --export DIR`"
        ) from error
