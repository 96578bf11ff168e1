"""What Ray and Tune do for nobody in a driver, which has no option, is left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.commandline import TINY, CommandLine

pytestmark = pytest.mark.integration

TRIALS = 6

# How often Tune wrote down all trials is counted from outside, as nothing of it is left.
DRIVER = """
import sys
from ray.tune.execution.tune_controller import TuneController
from sweeps.cli import main
save, saves = TuneController.save_to_dir, []
TuneController.save_to_dir = lambda self: (saves.append(1), save(self))
try:
    main()
finally:
    print("saves", len(saves), "mlflow" in sys.modules)
"""


def test_a_driver_neither_imports_mlflow_nor_writes_down_tunes_state_at_each_save(
    tmp_path: Path,
) -> None:
    cli = CommandLine(tmp_path)
    spec = cli.write("tiny.yaml", TINY)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, "run", str(spec), "-s", f"trials={TRIALS}"],
        cwd=tmp_path,
        env=cli.environment,
        capture_output=True,
        text=True,
        timeout=180,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "saves 2 False", "at its beginning and at its end"
    assert len(cli.json("trials", "small")) == TRIALS
