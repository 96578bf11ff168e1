"""Out of memory is recognised from every source; if allowed, the run continues with smaller
micro-batches.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.saved_objects import Seen
from tests.time_limits import Deadline
from trainable.checkpoint import CheckpointStore
from trainable.config import TrainConfig, TrialConfig
from trainable.data import WindowPlan
from trainable.errors import OutOfMemory
from trainable.memory import finer_accumulation, is_out_of_memory
from trainable.processes.trial_run import Restart, TrialRun
from trainable.store.metrics_file import read_rows
from trainable.store.notes import read_earlier
from trainable.task import Data, Task

SAMPLES, BATCH = 40, 16
seen = Seen()
"""The samples of each forward pass, in order."""


class Greedy(Task):
    """Takes no more than so many samples at once, as a device's memory would; no dropout."""

    limit = BATCH

    def build_model(self) -> nn.Module:
        return nn.Linear(3, 2, dtype=torch.float64)

    def build_data(self) -> Data:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
        inputs[:, 0] = torch.arange(SAMPLES)
        return Data(
            train=(inputs, torch.arange(SAMPLES) % 2), val=(inputs, torch.arange(SAMPLES) % 2)
        )

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        inputs, targets = batch
        if model.training:
            seen.append(inputs[:, 0].long().tolist())
        if len(inputs) > type(self).limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().loss(model, (inputs / SAMPLES, targets))


class _Trial:
    """A trial whose run is opened by another object after each `Restart`, as by its actor."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._run = self._opened()

    def _opened(self) -> TrialRun:
        return TrialRun(self._config, lambda *_: pytest.fail("a trial of one rank has no others"))

    def step(self) -> dict[str, Any]:
        """Train to the next report."""
        while True:
            try:
                return self._run.step()
            except Restart as restart:
                self._config |= restart.changes
                self._run = self._opened()

    def cleanup(self) -> None:
        """Close the run."""
        self._run.cleanup()


def _trial(directory: Path, *, halve_batch: bool, task: str = "Greedy", **train: Any) -> _Trial:
    config = TrialConfig(
        task={"name": f"{__name__}:{task}"},
        metric="val/loss",
        mode="min",
        budget={"epochs": 2},
        train={"batch_size": BATCH, "precision": "fp32", **train},
        checkpoint={"every": "1 steps"},
    )
    return _Trial(
        {
            "number": 0,
            "params": {},
            "config": config.model_dump(mode="json"),
            "directory": str(directory),
            "drain": str(directory / "drain"),
            "stop": str(directory / "stop"),
            "threads": 1,
            "halve_batch": halve_batch,
        }
    )


def _run(trial: _Trial) -> list[dict[str, Any]]:
    results = []
    while not results or "ending" not in results[-1]:
        results.append(trial.step())
    trial.cleanup()
    return results


@pytest.fixture(autouse=True)
def _nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Greedy, "limit", BATCH)
    for name in ("set_num_threads", "set_num_interop_threads"):
        monkeypatch.setattr(torch, name, lambda _: None)
    seen.clear()


def test_fewer_samples_at_once_take_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _run(_trial(tmp_path / "whole", halve_batch=False))
    order = [sample for part in seen for sample in part]
    seen.clear()

    monkeypatch.setattr(Greedy, "limit", 5)
    parts = _run(_trial(tmp_path / "parts", halve_batch=True))
    assert [r.get("accumulation") for r in parts] == [4, 4]
    assert [r["ending"] for r in (whole[-1], parts[-1])] == ["finished"] * 2
    taken = [part for part in seen if len(part) <= 5]
    assert [sample for part in taken for sample in part] == order
    ours, theirs = read_rows(tmp_path / "parts"), read_rows(tmp_path / "whole")
    assert [row.step for row in ours] == [row.step for row in theirs] == list(range(1, 7))
    for one, other in zip(ours, theirs, strict=True):
        for key in ("train/loss", "train/grad_norm"):
            assert one.metrics[key] == pytest.approx(other.metrics[key], rel=1e-12)
    log = (tmp_path / "parts/trial.log").read_text()
    assert "out of memory: resumes from step 0 with 4 micro-batches of 4 samples" in log


def test_resumes_from_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = _trial(tmp_path, halve_batch=True)
    assert "accumulation" not in trial.step()  # the first epoch's three steps
    monkeypatch.setattr(Greedy, "limit", 8)
    seen.clear()
    results = _run(trial)
    assert [r["accumulation"] for r in results] == [2]
    order = WindowPlan(SAMPLES, BATCH, BATCH, seed=0).order(1).tolist()
    assert [sample for part in seen[1:] for sample in part] == order
    assert "from step 3 with 2" in (tmp_path / "trial.log").read_text()
    (earlier,) = read_earlier(tmp_path)
    assert (earlier.until, earlier.config.train.accumulation) == (3, 1)


def test_save_that_fails_with_the_step_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where ranks write a checkpoint together, and one runs out of memory in the next step."""
    commit, failed = CheckpointStore._commit, []

    def failing(*store_and_state: Any, step: int, **more: Any) -> None:
        if step == 3 and not failed:
            deadline = Deadline(60)
            while len(seen) < 4 and not deadline.passed:
                time.sleep(0.001)
            failed.append(step)
            raise OutOfMemory("rank 1: CUDA out of memory")
        commit(*store_and_state, step=step, **more)

    monkeypatch.setattr(CheckpointStore, "_commit", failing)
    trial = _trial(tmp_path, halve_batch=True)
    assert "accumulation" not in trial.step()  # the first epoch's three steps
    monkeypatch.setattr(Greedy, "limit", 8)
    assert [r.get("accumulation") for r in _run(trial)] == [2, 2]  # both epochs
    assert failed
    assert "from step 2 with 2" in (tmp_path / "trial.log").read_text()


def test_single_sample_that_does_not_fit_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Greedy, "limit", 0)
    (result,) = _run(_trial(tmp_path, halve_batch=True))
    assert result["accumulation"] == BATCH
    assert result["failure"]["kind"] == "oom"
    assert "raise train.accumulation" in result["failure"]["reason"]


class Loaded(Greedy):
    """Its samples come in batches."""

    def build_data(self) -> Data:
        data = super().build_data()
        assert isinstance(data.train, tuple)
        return Data(DataLoader(TensorDataset(*data.train), BATCH), data.val)


@pytest.mark.filterwarnings("ignore:a resumed run reads the stream train again")
def test_given_batches_cannot_be_made_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loaded, "limit", BATCH // 2)
    *_, last = _run(_trial(tmp_path, halve_batch=True, task="Loaded"))
    assert (last["ending"], last["failure"]["kind"]) == ("failed", "oom")
    assert "accumulation" not in last


def test_default_ends_immediately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Greedy, "limit", 8)
    (result,) = _run(_trial(tmp_path, halve_batch=False))
    assert result["ending"] == "failed"
    assert result["failure"]["kind"] == "oom"
    assert len(seen) == 1


def test_run_stopped_before_its_start_trains_nothing(tmp_path: Path) -> None:
    (tmp_path / "drain").touch()
    assert [r["ending"] for r in _run(_trial(tmp_path, halve_batch=False))] == ["interrupted"]
    (tmp_path / "stop").touch()
    assert [r["ending"] for r in _run(_trial(tmp_path, halve_batch=False))] == ["stopped"]
    assert not seen


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "finer"),
    [(64, 1, 2), (64, 32, 64), (64, 64, None), (12, 4, 12), (9, 1, 3), (7, 1, 7), (1, 1, None)],
)
def test_finer_accumulation(batch_size: int, accumulation: int, finer: int | None) -> None:
    train = TrainConfig(batch_size=batch_size, accumulation=accumulation)
    assert finer_accumulation(train) == finer


@pytest.mark.parametrize(("accumulation", "finer"), [(1, 2), (4, 8), (8, None), (16, None)])
def test_ranks_that_take_one_sample_split_no_more(accumulation: int, finer: int | None) -> None:
    train = TrainConfig(batch_size=16, accumulation=accumulation)
    assert finer_accumulation(train, workers=2) == finer


def test_out_of_memory_errors_are_recognised() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("..."))
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))
