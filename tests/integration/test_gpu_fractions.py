"""Fractions of several GPUs: four trials at a half each run together on two (logical) ones."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from sweeps.cli.run_console import PlainLines
from sweeps.engine.resources import Gpu, Machine, ResourceError, plan
from sweeps.ledger.ledger import Ledger
from sweeps.paths import SweepPaths
from sweeps.run.driver import run_sweep
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.view.outcome import SweepOutcome
from sweeps.view.sweep_progress import SweepProgress
from tests.integration.commandline import wait_until
from tests.message_parts import assert_parts
from tests.unit.sweeps.sweep_factory import RunsNoTrial, prepared

SPEC = """
name: packed
task: {{name: "tests.integration.barrier_task:Barrier", directory: {directory}, parties: 4}}
metric: val/loss
mode: min
trials: 4
budget: {{epochs: 1}}
space: {{train.optimizer.lr: {{loguniform: [1.0e-4, 1.0e-1]}}}}
resources: {{cpu: 2, gpu: 0.5}}
"""
TWO_GPUS = Machine("test", cpus=8, memory=2**33, gpus=(Gpu("logical", 2**33),) * 2)


@pytest.fixture
def spec(tmp_path: Path) -> SweepSpec:
    directory = tmp_path / "barrier"
    directory.mkdir()
    return parse_spec(SPEC.format(directory=directory), "packed.yaml")


@pytest.mark.usefixtures("ray_on_two_cores")
def test_four_half_gpu_trials_run_on_two_gpus(spec: SweepSpec, tmp_path: Path) -> None:
    ways = plan(spec.resources, spec.trials, spec.concurrency, TWO_GPUS)
    assert (ways.gpu, ways.concurrency) == (0.5, 4)
    paths = SweepPaths(tmp_path, spec.name)
    log = Console(file=io.StringIO())
    ended: list[SweepOutcome] = []
    ready = replace(prepared(paths, spec, new=True), resources=ways, machine=TWO_GPUS)
    display = RunsNoTrial()
    display.begin = lambda _, before, __: PlainLines(  # type: ignore[assignment]
        log, SweepProgress(spec, before)
    )
    run_sweep(ready, display, ended.append)
    # Each trial waited for the three others: had fewer run together, all would have failed.
    assert ended[0].exit_code == 0, log.file.getvalue()  # type: ignore[attr-defined]
    assert [t.state for t in Ledger.open(paths.ledger).trials()] == ["complete"] * 4
    seen = [left.read_text() for left in (tmp_path / "barrier").iterdir()]
    told = [one.split() for one in sorted(seen)]
    assert [gpu for gpu, _ in told] == ["0", "0", "1", "1"], (
        "each sees one GPU alone, with one other"
    )
    assert [threads for _, threads in told] == ["2"] * 4, "as many as its CPUs"


def test_impossible_request_is_refused_immediately(spec: SweepSpec) -> None:
    without = Machine("test", cpus=4, memory=2**33)
    with pytest.raises(ResourceError) as refused:
        plan(spec.resources, spec.trials, spec.concurrency, without)
    parts = ("resources.gpu: 0.5 GPU", "test (4 CPUs, no GPU)", "write gpu: auto or gpu: 0")
    assert_parts(str(refused.value), *parts)


STUCK = """
import time
import torch
from torch.utils.data import Dataset
from trainable.config import LoaderConfig
from trainable.data import LoaderSource, SplitReading, WindowPlan

class Stuck(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        print("stuck", flush=True)
        time.sleep(1000)

source = LoaderSource(
    Stuck(), WindowPlan(8, 4, 4), SplitReading("train", torch.device("cpu"),
    loader=LoaderConfig(num_workers=2)))
next(source.windows(0))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
def test_waiting_loader_ends_with_its_killed_trial() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE) as trial:
        assert trial.stdout is not None
        assert trial.stdout.readline() == trial.stdout.readline() == b"stuck\n"
        seen = psutil.Process(trial.pid).children()
        assert len(seen) == 2
        trial.kill()
        trial.wait()
        wait_until(lambda: not any(map(_lives, seen)), seconds=20)


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
