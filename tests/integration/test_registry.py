"""What the model registry is not given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tracking.mlflow_server import connect
from tracking.registry import NotRegistered, register_model

pytestmark = pytest.mark.integration


class Branching(nn.Module):
    """Goes another way for other values: no graph is this model."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if inputs.sum() > 0 else -inputs


def test_a_model_that_is_no_graph_is_refused_and_nothing_is_registered(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = connect(uri)
    experiment = client.create_experiment("x", artifact_location=(tmp_path / "a").as_uri())
    run_id = client.create_run(experiment).info.run_id
    with pytest.raises(
        NotRegistered, match=r"cannot be exported as a graph .*; see torch\.export; its weights"
    ):
        register_model(uri, run_id, "m", Branching(), (torch.ones(2, 3),), digest="d", tags={})
    assert client.search_registered_models() == []
    assert client.list_artifacts(run_id) == []
    with pytest.raises(NotRegistered):
        register_model(uri, run_id, "a/b", nn.ReLU(), (torch.ones(2, 3),), digest="d", tags={})
    assert client.list_artifacts(run_id) == []
