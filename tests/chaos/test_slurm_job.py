"""The Slurm script with a real Ray of two nodes and a real sweep, without Slurm itself."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.integration.slurm_job import SLURM, Job

ROOT = Path(__file__).parents[2]


@pytest.mark.chaos
def test_slurm_job_runs_on_two_nodes_and_cleans_up() -> None:
    # Ray's sockets lie there, and their addresses hold about 100 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory:
        environment = {"RAY_TMPDIR": directory, "SLURM_CPUS_PER_TASK": "1"}
        job = Job(Path(directory), SLURM | {"hostname": "echo 127.0.0.1"}, environment)
        settings = ("-s", "trials=2", "-s", "budget.epochs=2")
        spec = str(ROOT / "sweeps" / "examples" / "digits.yaml")
        code, out, err = job.run("two-nodes", spec, *settings, seconds=240)
        assert code == 0, out + err
        assert "2 trials at a time, each with 1 CPU, on 2 nodes" in err
        sweep = Path(sys.executable).with_name("sweep")
        looked: list[str | Path] = [sweep, "status", "two-nodes", "--root", job.root, "--json"]
        status = json.loads(subprocess.run(looked, capture_output=True, check=True).stdout)
        assert status["state"] == "finished"
        assert status["trials"]["running"] == status["trials"]["failed"] == 0
        assert not list(job.root.glob(".slurm-*"))
        assert _processes_of(directory) == []


def _processes_of(directory: str) -> list[str]:
    """What runs whose environment names a directory."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("RAY_TMPDIR") == directory:
                found.append(process.name())
    return found
