"""The cases of `tests/cases` about seeds, as they stand."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).parents[1] / "cases"


def _run(directory: Path, *command: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_case_16_all_trials_are_validated_on_the_same_samples(tmp_path: Path) -> None:
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


def test_the_order_of_a_set_is_the_same_in_every_process_or_refused(tmp_path: Path) -> None:
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
