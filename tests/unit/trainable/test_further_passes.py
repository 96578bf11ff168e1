"""The passes of a sharded model that a rank computes for the others leave task and model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_training import Groups, config, to_end
from tests.saved_objects import saved_values
from trainable.checkpoint import CheckpointStore
from trainable.config import TrialConfig
from trainable.errors import TaskError
from trainable.processes.local_ranks import LocalRanks

pytestmark = pytest.mark.integration

EPOCHS = 2
TRAINED, EVALUATED = [[6, 6, 6, 1], [6, 6, 6]], [[6, 1], [6]]
"""The samples of each pass of an epoch on each of two ranks: of 37 in windows of 12, and of 13."""


def _config(name: str) -> TrialConfig:
    options = {"epochs": EPOCHS, "accumulation": 1, "every": "1 epoch", "sharding": "fsdp"}
    return config(2, {"name": f"tests.rank_sync_tasks:{name}"}, **options)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], TaskError, set[bool]]:
    """Return the last state of a run, the error of another one, and the model's modes."""
    root: Path = tmp_path_factory.mktemp("passes")
    torch.set_num_threads(1)
    with LocalRanks(2) as children:
        plan = [(_config(name), root / name) for name in ("Recording", "Exhausting")]
        groups = Groups(children, plan)
        groups.begin()
        with groups.first(0) as trainer:
            to_end(trainer)
            modes = {module.training for module in trainer.model.modules()}
        with pytest.raises(TaskError) as raised, groups.first(1) as trainer:
            to_end(trainer)
        (other,) = children.ends()
    assert other.result[0] == ""
    store = CheckpointStore(root / "Recording")
    newest = store.newest()
    assert newest is not None
    return store.load(newest), raised.value, modes


def test_passes_for_other_ranks_change_nothing(ended: Any) -> None:
    state, _, modes = ended
    for rank, own in enumerate((state, *state["ranks"])):
        held, of_model = saved_values(own, "task"), saved_values(own, "model")
        lengths = (TRAINED[rank] + EVALUATED[rank]) * EPOCHS
        calls = len(lengths)
        assert held["lengths"] == [0, *lengths]
        assert held["queue"] == lengths[-3:]
        assert held["table['all']"] == list(range(1, calls + 1))
        assert held["calls"] == held["newest"] == held["value"] == of_model["calls"] == calls
        assert held["array"].numpy().view("float64").tolist() == [calls, calls]
        drawn = torch.Generator()
        noise = [torch.randn(3, generator=drawn).double() / 10 for _ in range(calls)][-1]
        assert torch.equal(held["noise"], noise)
    assert modes == {True}


def test_change_that_cannot_be_undone_is_refused(ended: Any) -> None:
    _, error, _ = ended
    assert "Exhausting.numbers" in str(error)
    assert "a rank calls loss() once more on a batch that it has seen" in str(error)
