"""Output before a run starts: its memory, and warnings.

That `sweep run` does so too is looked at where a sweep is run (`test_sweep.py`).
"""

from __future__ import annotations

import pytest

from tests.integration.commandline import CommandLine

TASK = """
import torch
from torch import nn
from trainable import Data, Task


class Normed(Task):
    def build_model(self):
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))

    def build_data(self):
        samples = torch.ones(12, 3), torch.zeros(12, dtype=torch.long)
        return Data(train=samples, val=samples)
"""
SPEC = """
name: normed
task: {name: "normed_task:Normed"}
metric: val/loss
mode: min
trials: 1
budget: {epochs: 1}
train: {batch_size: 6, accumulation: 2, optimizer: {name: adafactor}}
"""
# (3 x 5 + 5) + (5 + 5) + (5 x 2 + 2) = 42 parameters; Adafactor keeps 3 + 5 and 5 + 2 values for
# the two matrices and 17 for the vectors: 2 x 42 + 32 of 4 bytes.
MEMORY = "  42 parameters: 464 B with gradients and the optimizer's state"
CAUTION = (
    "accumulation is 2 and the model has BatchNorm (module '1'), which normalizes over "
    "micro-batches of 3 samples, not over the batch of 6: the result differs from that of the "
    "whole batch; use GroupNorm or LayerNorm, or accumulation 1"
)


@pytest.fixture
def normed(cli: CommandLine) -> CommandLine:
    cli.write("normed_task.py", TASK)
    cli.write("normed.yaml", SPEC)
    return cli


@pytest.mark.seeds("S5", "S27")
def test_check_prints_memory_and_batch_norm_warning(
    normed: CommandLine,
) -> None:
    lines = normed.ok("check", "normed.yaml").splitlines()
    assert MEMORY in lines
    assert lines[-1] == CAUTION
    alone = normed.ok("check", "normed.yaml", "-s", "train.accumulation=1")
    assert MEMORY in alone
    assert "BatchNorm" not in alone


@pytest.mark.seeds("S5", "S27")
def test_train_prints_memory_and_batch_norm_warning(normed: CommandLine) -> None:
    done = normed("train", "normed.yaml")
    assert done.returncode == 0, done.stderr
    assert MEMORY in done.stderr.splitlines()
    assert CAUTION in done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["epoch 1 step 2"]
