"""Cases of `tests/cases` about state that torch or the run once lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.time_limits import Deadline

CASES = Path(__file__).parent.parent / "cases"


def _case(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(CASES / name, tmp_path / name))


def test_flags_changed_in_training_are_resumed(tmp_path):
    case = _case("02-unfreeze", tmp_path)
    found = subprocess.run(
        [sys.executable, "probe.py"], cwd=case, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(found) == 3
    for line in found[:2]:
        assert "resumed equals uninterrupted: True | grad flags True True" in line
        assert "(uninterrupted): True (resumed): True" in line
    assert "default" in found[2]
    assert "backbone moved (uninterrupted): True" in found[2]
    assert "resumed equals uninterrupted: True" in found[2]


@pytest.mark.chaos
def test_average_kept_on_the_task_is_resumed(tmp_path):
    case = _case("14-ema", tmp_path)
    command = [str(Path(sys.executable).parent / "sweep"), "train", "sweep.yaml", "--dir"]
    options = {"cwd": case, "env": {**os.environ, "PYTHONPATH": str(case)}}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    cut = subprocess.Popen([*command, "cut"], **options, **quiet)
    rows, until = case / "cut" / "metrics.jsonl", Deadline(120)
    while not (rows.is_file() and len(rows.read_text().splitlines()) > 200):
        assert cut.poll() is None, "it ended before it was interrupted"
        assert not until.passed
        time.sleep(0.01)
    cut.send_signal(signal.SIGINT)
    assert cut.wait(60) == 130
    for name in ("cut", "whole"):
        subprocess.run([*command, name], check=True, **options, **quiet)
    found, expected = (_losses(case / name) for name in ("cut", "whole"))
    assert len(expected) == 300
    assert found == expected


def _losses(directory: Path) -> list[float]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line)["metrics"] for line in lines]
    return [one["val/loss"] for one in metrics if "val/loss" in one]
