"""Fractions of a GPU: four trials at a quarter each run together on one (logical) GPU."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from sweeps.layout import SweepPaths
from sweeps.ledger import Ledger
from sweeps.live import PlainLines
from sweeps.resources import Gpu, Machine, ResourceError, plan
from sweeps.run import run_sweep
from sweeps.spec import SweepSpec, parse_spec

SPEC = """
name: packed
task: {{name: "tests.integration.barrier_task:Barrier", directory: {directory}, parties: 4}}
metric: val/loss
mode: min
trials: 4
budget: {{epochs: 1}}
space: {{train.optimizer.lr: {{loguniform: [1.0e-4, 1.0e-1]}}}}
resources: {{cpu: 1, gpu: 0.25}}
"""
ONE_GPU = Machine("test", cpus=4, memory=2**33, gpus=(Gpu("logical", 2**33),))


@pytest.fixture
def spec(tmp_path: Path) -> SweepSpec:
    directory = tmp_path / "barrier"
    directory.mkdir()
    return parse_spec(SPEC.format(directory=directory), "packed.yaml")


@pytest.mark.usefixtures("ray_on_two_cores")
def test_four_trials_at_a_quarter_run_together(spec: SweepSpec, tmp_path: Path) -> None:
    ways = plan(spec.resources, spec.trials, spec.concurrency, ONE_GPU)
    assert (ways.gpu, ways.concurrency) == (0.25, 4)
    paths = SweepPaths(tmp_path, spec.name)
    log = Console(file=io.StringIO())
    outcome = run_sweep(
        paths,
        spec,
        ways,
        ONE_GPU,
        lambda finished: PlainLines(log, spec, finished=finished),
        new=True,
    )
    # Each trial waited for the three others: had fewer run together, all would have failed.
    assert outcome.exit_code == 0, log.file.getvalue()  # type: ignore[attr-defined]
    assert [t.state for t in Ledger.open(paths.ledger).trials()] == ["complete"] * 4


def test_an_ask_that_no_machine_meets_is_refused_at_once(spec: SweepSpec) -> None:
    without = Machine("test", cpus=4, memory=2**33)
    with pytest.raises(ResourceError) as refused:
        plan(spec.resources, spec.trials, spec.concurrency, without)
    assert str(refused.value) == (
        "resources.gpu: 0.25 GPU is more than any node has; a trial runs on one node, "
        "the largest is test (4 CPUs, no GPU); write gpu: auto or gpu: 0"
    )
