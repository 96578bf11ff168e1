"""The child process that loads a task: its requests and its environment."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sweeps.engine.resources import ResourcePlan, StepMemory
from sweeps.engine.task_check import TaskInspector, TaskRefused, largest_config, longest_warmup
from sweeps.spec.spec import SweepSpec, parse_spec
from tests.integration.commandline import wait_until
from tests.specs import with_overrides
from tests.time_limits import scaled

SPEC = """
name: packed
task: {name: spiral, samples: 20}
metric: val/loss
mode: min
trials: 4
space:
"""


def _spec(*space: str, more: str = "") -> SweepSpec:
    lines = "".join(f"  {line}\n" for line in space) or "  task.width: {int: [4, 8]}\n"
    return parse_spec(SPEC + lines + more, "packed.yaml")


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("train.batch_size: {choice: [32, 128, 64]}", "batch_size", 128),
        ("train.batch_size: {logint: [8, 256]}", "batch_size", 256),
        ("train.accumulation: {choice: [4, 1, 2]}", "accumulation", 1),
        ("train.precision: {choice: [bf16, fp32, fp16]}", "precision", "fp32"),
        (
            "train.activation_checkpointing: {choice: [true, false]}",
            "activation_checkpointing",
            False,
        ),
        ("train.optimizer.name: {choice: [sgd, adamw, lion]}", "optimizer.name", "adamw"),
    ],
)
def test_largest_trial_has_the_most_expensive_value(line: str, key: str, value: object) -> None:
    found: object = largest_config(_spec(line)).train
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_inconsistent_largest_values_fall_back_to_the_example() -> None:
    spec = _spec("train.batch_size: {choice: [6, 9]}", "train.accumulation: {choice: [3, 2]}")
    assert spec.trial_config(0, spec.example_params()) == largest_config(spec)


def test_longest_warmup_is_tried_with_the_example() -> None:
    spec = _spec(
        "train.schedule.warmup: {choice: [0, 9, 3]}",
        "train.ema.start: {choice: [1, 9, 3]}",
        "train.batch_size: {int: [8, 32]}",
        "task.hidden: {choice: [16, 64, 32]}",
    )
    longest = longest_warmup(spec)
    assert (longest.train.schedule.warmup, longest.train.batch_size) == (9, 8)
    assert longest.train.ema.start == 9
    assert longest.task.arguments["hidden"] == 16
    forbidden = with_overrides(spec, ["search.constraints=['train.schedule.warmup < 5']"])
    assert longest_warmup(forbidden).train.schedule.warmup == 0


LOUD = """
import os
from trainable.tasks.spiral import Spiral
print("imported")
os.write(1, b"{}\\n")
"""


def test_step_memory_is_measured_for_an_open_gpu_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the task's module prints, and by whichever way."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which is then the child's answer
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loud.py").write_text(LOUD)
    spec = with_overrides(_spec(), ["task.name=loud:Spiral"])
    facts = TaskInspector(spec, ResourcePlan(1, 0.25, 4)).facts()
    assert facts.num_train == 60
    assert facts.step_memory == StepMemory(failed="found no CUDA device that torch can use")


BUSY = """
import multiprocessing, subprocess, threading, time
from pathlib import Path
from trainable.tasks.spiral import Spiral
forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
forked.start()
Path("pids").write_text(f"{forked.pid} {subprocess.Popen(['sleep', '600']).pid}")
threading.Thread(target=time.sleep, args=(600,)).start()
"""


def test_leftover_process_of_a_task_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "busy.py").write_text(BUSY)
    spec = with_overrides(_spec(), ["task.name=busy:Spiral"])
    inspection = TaskInspector(spec, ResourcePlan(1, 0, 4))
    started = time.monotonic()
    assert inspection.facts().num_train == 60
    assert time.monotonic() - started < scaled(50)
    inspection.terminate()  # as when a signal comes after the answer
    left = (tmp_path / "pids").read_text().split()
    assert len(left) == 2
    wait_until(lambda: not any(_runs(int(pid)) for pid in left), seconds=10)


CHECKING = """
import sys
from sweeps.spec.spec import parse_spec
from sweeps.engine.resources import ResourcePlan
from sweeps.engine.task_check import TaskInspector
TaskInspector(parse_spec(sys.argv[1], "stuck.yaml"), ResourcePlan(1, 0, 4)).facts()
"""


def test_blocked_check_of_a_task_ends_with_its_driver(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(
        "import os, time\nfrom pathlib import Path\n"
        "Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    text = SPEC.replace("spiral, samples: 20", "'stuck:Stuck'") + "  task.width: {int: [4, 8]}\n"
    driver = subprocess.Popen([sys.executable, "-c", CHECKING, text], cwd=tmp_path)
    try:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    finally:
        driver.kill()
        driver.wait()
    wait_until(lambda: not _runs(int((tmp_path / "pid").read_text())), seconds=10)


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


COUNTING = """
import torch
from trainable.tasks.spiral import Spiral as Base

class Spiral(Base):
    def build_model(self):
        raise ValueError(f"{torch.get_num_threads()} threads")
"""


def test_task_is_computed_with_the_threads_of_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "counting.py").write_text(COUNTING)
    spec = with_overrides(_spec(), ["task.name=counting:Spiral"])
    with pytest.raises(TaskRefused, match="ValueError: 1 threads"):
        TaskInspector(spec, ResourcePlan(1, 0, 1)).facts()
