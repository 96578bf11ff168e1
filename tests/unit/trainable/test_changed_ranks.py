"""A run that resumes on another number of ranks: what its task collects on each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_training import Groups, config, curve, to_end
from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.errors import ConfigError
from trainable.loop import Trainer
from trainable.processes.local_ranks import LocalRanks

pytestmark = pytest.mark.integration

SAMPLES, BATCH = 37, 12
"""Of an epoch, and of each of its steps but the fourth and last one."""
STOPPED = {"between": 4, "within": 2, "fewer": 2}
"""The steps that the runs have taken before their number of ranks changes."""
BEFORE = {"between": "1", "within": "1, within an epoch", "fewer": "2, within an epoch"}


def _config(workers: int) -> TrialConfig:
    return config(workers, {"name": "tests.rank_training:Counting"}, epochs=3)


def _train(trainer: Any, *, stop_at: int | None = None) -> dict[str, str]:
    """Train to a step or the end, and return what the run's tags say of its ranks."""
    assert isinstance(trainer, Trainer)
    trainer.stop_at = stop_at or trainer.stop_at
    to_end(trainer)
    return trainer.workers(trainer._ranks.size)


def _alone(directory: Path, *, stop_at: int | None = None, accept: bool = False) -> dict[str, str]:
    opened = open_trainer(_config(1), directory, device="cpu", accept_workers=accept)
    with opened as trainer:
        return _train(trainer, stop_at=stop_at)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, str]]]:
    """Two runs go on with two ranks, and one that began with two with one."""
    root = tmp_path_factory.mktemp("changed")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tags = {}
    for name in ("between", "within"):
        _alone(root / name, stop_at=STOPPED[name])
    with LocalRanks(2) as children:
        groups = Groups(children, [(_config(2), root / name) for name in STOPPED])
        groups.begin(accept_workers=[0, 1])
        for number, name in enumerate(STOPPED):
            with groups.first(number) as trainer:
                tags[name] = _train(trainer, stop_at=STOPPED["fewer"] if number == 2 else None)
        (other,) = children.ends()
    assert other.result == [""] * 3
    with pytest.raises(ConfigError, match="in the epoch, of which it has trained a part"):
        _alone(root / "fewer")
    tags["fewer"] = _alone(root / "fewer", accept=True)
    torch.set_num_threads(threads)
    return root, tags


@pytest.mark.parametrize(
    ("name", "counted"),
    [
        ("between", SAMPLES),
        ("within", SAMPLES + 2 * BATCH),  # the new rank has a copy of what the first one counted
        ("fewer", SAMPLES - BATCH),  # the rank that is gone had half of the two steps
    ],
)
def test_what_a_task_counts_on_each_rank(runs: Any, name: str, counted: int) -> None:
    rows = [row.metrics for row in curve(runs[0] / name)]
    assert len(rows) == 12
    reports = [row for row in rows if "seen" in row]
    assert [row["seen"] for row in reports] == [counted, SAMPLES, SAMPLES]
    assert [row["logged"] for row in reports] == [SAMPLES] * 3


@pytest.mark.parametrize("name", STOPPED)
def test_tag_says_whether_it_was_within_an_epoch(runs: Any, name: str) -> None:
    workers = "1" if name == "fewer" else "2"
    before = {f"workers.before_step_{STOPPED[name]}": BEFORE[name]}
    assert runs[1][name] == {"workers": workers, **before}
