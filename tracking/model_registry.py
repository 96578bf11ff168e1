"""Register a model in MLflow's model registry, as a graph or on request as a pickle.

Loading a graph runs no code. A pickle runs code; it is for models that cannot be exported as a
graph.

    python -m tracking.model_registry DIRECTORY MODULE...

loads a saved pickle where the modules cannot be imported. What must not live here: where the model
comes from, and torch as an import.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracking.child_process import ChildFailed, run_child
from tracking.mlflow_server import connect
from tracking.trusted_stores import check_artifacts

if TYPE_CHECKING:
    from mlflow import MlflowClient

ALIAS = "best"
_DIGEST = "gradsweep.sha256"
_FORMAT = "gradsweep.format"
_GRAPH, _PICKLE = "pt2", "pickle"


class NotRegistered(Exception):
    """A model could not be registered."""


@dataclass(frozen=True, kw_only=True)
class ModelVersion:
    """What a version of a registered model is made of."""

    model: Any
    inputs: Sequence[Any]
    digest: str
    """The SHA-256 of the checkpoint."""
    tags: Mapping[str, str]
    pickled: bool = False
    without: Sequence[str] = ()
    """Modules that loading a pickle must not need."""


def register_model(uri: str, run_id: str, name: str, wanted: ModelVersion) -> str:
    """Register a PyTorch model as a version of `name`, with the alias `best`.

    The model is saved as a graph (`torch.export`): loading it with
    `mlflow.pytorch.load_model("models:/NAME@best")` needs neither its class nor this package, and
    unpickles nothing. If a version with the same digest and format exists, it gets the alias, and
    no second version is created.
    """
    client = connect(uri)
    from mlflow.exceptions import MlflowException

    form = _PICKLE if wanted.pickled else _GRAPH
    artifacts = f"model-{wanted.digest[:12]}-{form}"  # unique: a later version must not replace it
    try:
        number = _known_version(client, name, wanted.digest, form)
        if number is None:
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory, artifacts)
                _save(wanted.model, wanted.inputs, path, form)
                if wanted.pickled:
                    _check_loads(path, wanted.without)
                check_artifacts(uri, client.get_run(run_id).info.artifact_uri or "")
                _create(client, name)
                client.log_artifacts(run_id, str(path), artifacts)
            source = f"{client.get_run(run_id).info.artifact_uri}/{artifacts}"
            all_tags = {**wanted.tags, _DIGEST: wanted.digest, _FORMAT: form}
            created = client.create_model_version(name, source, run_id=run_id, tags=all_tags)
            number = str(created.version)
        client.set_registered_model_alias(name, ALIAS, number)
    except MlflowException as error:
        raise NotRegistered(str(error)) from error
    return number


def _known_version(client: MlflowClient, name: str, digest: str, form: str) -> str | None:
    wanted = {_DIGEST: digest, _FORMAT: form}.items()
    found = client.search_model_versions(f"name = '{name}'")
    known = [one.version for one in found if wanted <= one.tags.items()]
    return str(max(known, key=int)) if known else None


def _create(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _check_loads(path: Path, without: Sequence[str]) -> None:
    """Load a pickle in a new process to check that it does not need the modules `without`."""
    environment = {**os.environ, "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "true"}
    try:
        run_child(__spec__.name, str(path), *without, environment=environment)
    except ChildFailed as error:
        raise NotRegistered(
            f"the pickle does not load in a process without {', '.join(without)} ({error}); "
            "define the model's class in a module that imports none of them and is on the import "
            "path of the process that loads it"
        ) from None


def _save(model: Any, inputs: Sequence[Any], path: Path, form: str) -> None:
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # MLflow warns about its own type hints
            mlflow.pytorch.save_model(
                model,
                str(path),
                serialization_format=form,
                signature=ModelSignature(inputs=Schema(specs)),
                input_example=tuple(arrays),
                pip_requirements=[f"torch=={version('torch')}"],
            )
    except Exception as error:  # the model's own code runs here and may raise any exception
        reason = str(error).strip().splitlines()
        what, remedy = {
            _GRAPH: (
                "exported as a graph",
                "register a pickle of its class with --pickle, which runs code when it is loaded",
            ),
            _PICKLE: ("pickled", "export its weights with `sweep best NAME --export DIR`"),
        }[form]
        raise NotRegistered(
            f"the model cannot be {what} ({type(error).__name__}: {reason[0] if reason else ''}); "
            f"{remedy}"
        ) from error


def main(path: str, *without: str) -> None:
    """Load a model in a process in which some modules cannot be imported."""
    for name in [*sys.modules, *without]:
        if name.partition(".")[0] in without:
            sys.modules[name] = None  # type: ignore[assignment]  # importing it fails
    import mlflow.pytorch

    sys.path.append(os.getcwd())  # the model's class may be there; last, as for a task's import
    with contextlib.redirect_stdout(sys.stderr):
        mlflow.pytorch.load_model(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
