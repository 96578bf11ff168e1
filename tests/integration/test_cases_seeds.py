"""Cases of `tests/cases` about seeds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.time_limits import scaled

CASES = Path(__file__).parents[1] / "cases"


def _run(directory: Path, *command: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=scaled(300),
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.chaos
def test_case_16_all_trials_share_validation_samples(tmp_path: Path) -> None:
    shutil.copytree(CASES / "16-random-split", tmp_path, dirs_exist_ok=True)
    _run(tmp_path, "-m", "sweeps.entry", "run", "sweep.yaml")
    curves = sorted(tmp_path.glob("runs/split/trials/*/metrics.jsonl"))
    last = [json.loads(curve.read_text().splitlines()[-1])["metrics"] for curve in curves]
    assert len(last) == 4
    assert len({metrics["val/which_samples"] for metrics in last}) == 1


HASHED = '''
import torch
from torch import nn
from trainable import Data, Task


class Hashed(Task):
    """Its classes have the order of a set of strings, as naive code has it."""

    def __init__(self):
        self.order = list({f"class-{number}" for number in range(40)})

    def build_model(self):
        return nn.Linear(4, 40)

    def build_data(self):
        x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
        y = torch.tensor([self.order.index(f"class-{number % 40}") for number in range(80)])
        return Data(train=(x, y), val=(x, y))
'''


def _trained(directory: Path, epochs: int, name: str) -> str:
    return _run(
        directory,
        *("-m", "sweeps.entry", "train", "hashed.yaml", "--dir", name),
        *("-s", f"budget.epochs={epochs}"),
    )


@pytest.mark.chaos
def test_set_order_is_fixed_or_refused(tmp_path: Path) -> None:
    (tmp_path / "hashed.py").write_text(HASHED)
    (tmp_path / "hashed.yaml").write_text(
        "name: hashed\ntask: hashed:Hashed\nmetric: val/loss\nmode: min\ntrials: 1\n"
        "train: {schedule: {name: constant}}\n"
    )
    first, again = (_trained(tmp_path, 1, name) for name in ("one", "two"))
    assert "val/loss" in first
    assert first == again
    _trained(tmp_path, 2, "one")

    command = [sys.executable, "-m", "sweeps.entry", "train", "hashed.yaml", "--dir", "two"]
    done = subprocess.run(
        [*command, "-s", "budget.epochs=2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )
    assert done.returncode == 2
    assert "train: tensor 1" in done.stderr
    assert "Traceback" not in done.stderr


def test_command_that_imports_a_task_in_another_hash_order_fails() -> None:
    # what holds the next command to it
    code = (
        "import os, sys; os.environ['PYTHONHASHSEED'] = '0'\n"
        "from trainable.user_code.task_import import check_hash_order; check_hash_order()"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    for seed, code_of_end in ((None, 1), ("0", 0)):
        own = {} if seed is None else {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment | own, capture_output=True, text=True
        )
        assert done.returncode == code_of_end, done.stderr
        assert ("restart_in_hash_order" in done.stderr) == bool(code_of_end)


CLOCKED = """
import os, pathlib, time
import torch
from torch import nn
from trainable import Data, Task


class Clocked(Task):
    # What differs between two processes stands for a clock, or for a host's name.

    def build_model(self):
        self.again = pathlib.Path("killed").exists()
        return nn.Sequential(nn.Linear(4, 2), *([nn.Tanh()] if self.again else []))

    def build_data(self):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return Data((x, (x.sum(1) > 0).long()), (x, (x.sum(1) > 0).long()))

    def evaluate(self, model, batches):
        if pathlib.Path("evaluated").exists() and not self.again:
            while not [*pathlib.Path("runs").rglob("checkpoints/step-*/manifest.json")]:
                time.sleep(0.01)  # until the first epoch is saved
            pathlib.Path("killed").touch()
            os.kill(os.getpid(), 9)
        if pathlib.Path("runs").exists():  # in a trial
            pathlib.Path("evaluated").touch()
        return super().evaluate(model, batches)
"""


@pytest.mark.chaos
def test_trial_that_rebuilds_another_model_fails(tmp_path: Path) -> None:
    (tmp_path / "clocked.py").write_text(CLOCKED)
    (tmp_path / "clocked.yaml").write_text(
        "name: clocked\ntask: clocked:Clocked\nmetric: val/loss\nmode: min\ntrials: 1\n"
        "budget: {epochs: 3}\nspace: {}\nfailures: {max_retries: 1}\n"
    )
    entry = [sys.executable, "-m", "sweeps.entry"]
    done = subprocess.run(
        [*entry, "run", "clocked.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 3, done.stdout + done.stderr
    (trial,) = json.loads(_run(tmp_path, "-m", "sweeps.entry", "trials", "clocked", "--json"))
    assert trial["state"] == "failed"
    assert (
        "builds something else than when this run started (model: its modules" in (trial["reason"])
    )
