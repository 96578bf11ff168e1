"""The tests of `tests/gpu`, where there is no GPU: that they start with little installed, and that
what they do is sound on the device there is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import test_training_gpu as on_gpu

ROOT = Path(__file__).parents[3]
# What a machine that only trains need not have.
_ABSENT = ("ray", "mlflow", "optuna", "sklearn", "torchvision", "matplotlib", "psutil", "pynvml")


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setattr(on_gpu, "DEVICE", "cpu")


def test_gpu_tests_need_torch_numpy_pydantic_and_pytest_only():
    script = (
        "import sys, pytest\n"
        f"for name in {_ABSENT}: sys.modules[name] = None\n"
        "sys.exit(pytest.main(['-q', 'tests/gpu']))"
    )
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no CUDA device on this machine" in done.stdout
    assert " skipped in " in done.stdout
    assert "passed" not in done.stdout


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_parity(tmp_path, precision):
    on_gpu.test_mixed_precision_trains_as_fp32_does(tmp_path, precision)


def test_overflow(tmp_path):
    on_gpu.test_fp16_overflow_skips_and_recovers(tmp_path)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_stopping(tmp_path, optimizer):
    on_gpu.test_non_finite_loss_changes_no_parameter(tmp_path, optimizer)


def test_resuming(tmp_path):
    on_gpu.test_resume_is_exact_on_the_same_device(tmp_path)
    on_gpu.test_run_moves_to_another_kind_of_device(tmp_path, "to the CPU")
    on_gpu.test_optimizers_are_fused(tmp_path / "fused", "adamw")


def test_steps_are_taken_without_the_generator_of_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)  # noqa: ARG005
    on_gpu.test_no_device_synchronisation_between_reports(tmp_path, "fp32")
