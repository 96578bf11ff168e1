"""Models in the registry: which are registered, and how others load them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.tracking_server import start_tracking_server
from tracking.mlflow_server import connect
from tracking.model_registry import ModelVersion, NotRegistered, register_model

pytestmark = pytest.mark.integration

BRANCHING = """
from torch import nn
{more}

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 2)

    def forward(self, inputs):
        return self.line(inputs) if inputs.sum() > 0 else -self.line(inputs)
"""
LOAD = """
import json, sys
sys.modules.update(dict.fromkeys(["sweeps", "trainable", "tracking"]))  # none can be imported
import mlflow, torch
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pytorch.load_model(sys.argv[2])
print(json.dumps(model(torch.tensor(json.loads(sys.argv[3]))).tolist()))
"""
ROWS = [[[1.0, 2.0, 3.0]], [[-1.0, -2.0, -3.0]]]


class Store:
    """A tracking store with one run, and modules that whoever loads a model can import.

    Args:
        directory: For the modules, and for files where no server keeps them.
        server: The address of a tracking server; None: SQLite.
    """

    def __init__(self, directory: Path, server: str | None = None) -> None:
        self.directory = directory
        self.uri = server or f"sqlite:///{directory}/mlflow.db"
        self.client = connect(self.uri)
        location = None if server else (directory / "artifacts").as_uri()
        experiment = self.client.create_experiment("x", artifact_location=location)
        self.run_id = self.client.create_run(experiment).info.run_id

    def register(self, name: str, model: nn.Module, digest: str, *, pickled: bool = False) -> str:
        inputs = (torch.ones(2, 3),)
        ours = ("sweeps", "trainable", "tracking", "redaction")
        wanted = ModelVersion(
            model=model.eval(),
            inputs=inputs,
            digest=digest,
            tags={},
            pickled=pickled,
            without=ours,
        )
        return register_model(self.uri, self.run_id, name, wanted)

    def load(
        self, model: str, rows: list[list[float]], *, path: str = "", pickles: bool
    ) -> Tensor:
        """What a model says in a process that has none of our packages."""
        done = subprocess.run(
            [sys.executable, "-c", LOAD, self.uri, model, json.dumps(rows)],
            cwd=self.directory,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": str(pickles).lower(),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return torch.tensor(json.loads(done.stdout))

    def is_empty(self) -> bool:
        return not self.client.search_registered_models() and not self.client.list_artifacts(
            self.run_id
        )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def module(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str, more: str = ""
) -> type[nn.Module]:
    """A class of somebody's own, in a module of its own that can be imported."""
    (store.directory / f"{name}.py").write_text(BRANCHING.format(more=more))
    monkeypatch.syspath_prepend(str(store.directory))
    monkeypatch.setenv("PYTHONPATH", str(store.directory))
    found: type[nn.Module] = __import__(name).Branching
    return found


@pytest.mark.chaos
def test_non_graph_model_is_registered_as_pickle_on_request(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = module(store, monkeypatch, "somebodys_own")()
    with pytest.raises(
        NotRegistered,
        match=r"cannot be exported as a graph .* a pickle of its class with --pickle",
    ):
        store.register("m", model, "d")
    assert store.is_empty()
    with pytest.raises(NotRegistered):
        store.register("a/b", nn.ReLU(), "d")
    assert store.is_empty()

    ours = module(store, monkeypatch, "beside_its_task", more="import trainable")()
    with pytest.raises(
        NotRegistered, match="does not load in a process without sweeps, trainable"
    ):
        store.register("m", ours, "d", pickled=True)
    assert store.is_empty()

    assert store.register("m", model, "d", pickled=True) == "1"
    for rows in ROWS:
        said = store.load("models:/m@best", rows, path=str(store.directory), pickles=True)
        torch.testing.assert_close(said, model(torch.tensor(rows)).detach())


@pytest.mark.chaos
def test_later_version_leaves_earlier_version_unchanged(tmp_path: Path) -> None:
    with start_tracking_server(f"sqlite:///{tmp_path}/server.db", tmp_path / "kept") as server:
        store = Store(tmp_path, server.url)
        models = [nn.Linear(3, 2), nn.Linear(3, 2)]
        for number, model in enumerate(models):
            assert store.register("m", model, f"digest{number}") == str(number + 1)
        assert store.register("m", models[0], "digest0") == "1", "it is known, and the best again"
        for name, model in (("models:/m@best", models[0]), ("models:/m/2", models[1])):
            said = store.load(name, ROWS[0], pickles=False)
            torch.testing.assert_close(said, model(torch.tensor(ROWS[0])).detach())
