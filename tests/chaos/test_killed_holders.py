"""Whatever keeps a state, and of whatever kind it is: SIGKILL ends the run, and it loses nothing.

The combinations are those of `tests/unit/trainable/test_holders.py`, which stops each run in one
process; here each kind and each place meets one real signal.
"""

from __future__ import annotations

import importlib
import itertools
import os
import random
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # each optimizer needs it: imported once, and not in each fork

from tests.chaos.killed_runs import curve, differences, without_measured
from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.loop import Trainer
from trainable.user_code.task_import import keep_caches_reachable

pytestmark = pytest.mark.chaos
_TASK = "tests.unit.trainable.holders_task"
_HOLDERS: Any = importlib.import_module(_TASK)
_KILLED_AT = 6
"""The step after which a run dies, in the second of two epochs; that before it is saved."""
CASES = list(zip(itertools.cycle(_HOLDERS.PLACES), _HOLDERS.MADE, strict=False))
_CONFIG = TrialConfig.model_validate(
    {
        "task": {"name": "toy"},
        "metric": "val/loss",
        "mode": "min",
        "seed": 0,
        "budget": {"epochs": 2},
        "checkpoint": {"every": "1 step"},
        "train": {"batch_size": 12},
    }
)


@pytest.mark.parametrize(("place", "kind"), CASES)
def test_killed_run_keeps_what_its_code_keeps(tmp_path: Path, place: str, kind: str) -> None:
    assert _in_process(tmp_path / "whole", place, kind) == 0
    assert _in_process(tmp_path / "cut", place, kind, kills=True) == -signal.SIGKILL
    assert not (tmp_path / "cut/ending.pt").exists()
    assert _in_process(tmp_path / "cut", place, kind) == 0
    whole, resumed = (_ending(tmp_path / name) for name in ("whole", "cut"))
    assert (whole.pop("began"), resumed.pop("began")) == (0, _KILLED_AT - 1)
    assert differences(whole, resumed) == []


def test_each_place_is_met() -> None:
    assert {place for place, _ in CASES} == set(_HOLDERS.PLACES)


def _ending(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(directory / "ending.pt", weights_only=True)
    return found


def _in_process(directory: Path, place: str, kind: str, *, kills: bool = False) -> int:
    """Train in a fork of this process, which has trained nothing; return its exit status."""
    child = os.fork()
    if child == 0:
        try:
            _train(directory, place, kind, kills=kills)
            os._exit(0)
        except BaseException:  # the tests that follow belong to the parent alone
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _train(directory: Path, place: str, kind: str, *, kills: bool) -> None:
    torch.set_num_threads(1)
    keep_caches_reachable()
    torch.manual_seed(os.getpid())
    random.seed(os.getpid())
    del sys.modules[_TASK]
    task = importlib.import_module(_TASK).Holding(place, kind)
    asked = itertools.count(1)

    def is_reached() -> bool:
        if kills and next(asked) == _KILLED_AT:
            trainer.store.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    trainer = open_trainer(
        _CONFIG, directory, device="cpu", threads=1, task=task, should_stop=is_reached
    )
    assert isinstance(trainer, Trainer)
    with trainer:
        began = trainer.state.progress.step
        for _ in trainer.events():
            pass
        state = without_measured(trainer.state.state_dict())
        found = {"began": began, "state": state, "curve": curve(directory)}
        torch.save(found, directory / "ending.pt")
