"""The driver disables the parts of Ray and Tune that it does not use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps.engine.resources import usable_cpus
from tests.integration.commandline import TINY, CommandLine
from tests.time_limits import scaled

pytestmark = pytest.mark.integration

TRIALS = 6

# How often Tune wrote down all trials, and how much, is counted from outside, as nothing is left.
DRIVER = """
import sys
from ray.tune.execution.tune_controller import TuneController
from sweeps.cli.app import main
save, saves = TuneController.save_to_dir, []
def counted(self):
    saves.append([sum(map(len, trial.get_json_state())) for trial in self._trials])
    save(self)
TuneController.save_to_dir = counted
try:
    main()
finally:
    print("saves", len(saves), "mlflow" in sys.modules)
    print(*saves[-1])
"""


def test_driver_imports_no_mlflow_and_tune_stays_minimal(
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
        timeout=scaled(180),
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *_, saves, kept = done.stdout.splitlines()
    assert saves == "saves 2 False", "at its beginning and at its end"
    assert len(kept.split()) == TRIALS
    assert max(map(int, kept.split())) < 8_000, "characters of a trial that has ended"
    assert len(cli.json("trials", "small")) == TRIALS


# As in the thread in which Ray tells what its head has heard, such as of a worker's death; what
# repeats itself within seconds it tells when it is stopped.
SAYING = """
import sys
import sweeps
from ray._private.worker import print_to_stdstream
told = {"lines": ["a worker died"], "pid": "raylet", "is_err": False}
print_to_stdstream(told, ignore_prefix=False)
print("the last line", file=sys.stderr)
"""


def test_ray_output_precedes_later_output(tmp_path: Path) -> None:
    with open(tmp_path / "said", "w+", encoding="utf-8") as said:
        buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
        command = [sys.executable, "-c", SAYING]
        subprocess.run(command, env=buffered, stdout=said, stderr=said, check=True)
        said.seek(0)
        rays, last = said.read().splitlines()
    assert "a worker died" in rays
    assert last == "the last line"


# So many workers come up one after the other where cores are few, and a trial is shorter than that
# takes.
SHORT = """
import os
import time


def run(config, context):
    config.train.schedule.warmup, config.train.clip.max_norm  # a loop reads what is searched
    with open("trained", "a") as file:
        print(os.getpid(), file=file)
    for _ in context.remaining_epochs():
        time.sleep(0.2)
        yield {"val/loss": config.train.optimizer.lr}
"""
AT_ONCE, TRIALS_OF_ALL = 12, 150


@pytest.mark.chaos
def test_starting_worker_is_not_interrupted(cli: CommandLine) -> None:
    cli.write("short.py", SHORT)
    spec = TINY.replace("{name: digits, model: mlp, width: 32}", '{name: "short:run"}')
    amounts = f"trials: {TRIALS_OF_ALL}\nconcurrency: {AT_ONCE}"
    spec = spec.replace("trials: 2\nconcurrency: 1", amounts)
    path = cli.write("short.yaml", f"{spec}resources: {{cpu: {usable_cpus() / AT_ONCE}}}\n")
    cli.ok("run", str(path))
    trained = (cli.directory / "trained").read_text().split()
    assert len(trained) == TRIALS_OF_ALL
    assert len(set(trained)) > AT_ONCE / 2, "3 of 12 where Tune ends those that start"


CLOSING = """
import os, signal, sys, uuid
from types import SimpleNamespace
import psutil
from sweeps.engine import local_ray
from sweeps.engine.resources import Machine

local_ray.PATIENCE_SECONDS = 10.0
token, machine = uuid.uuid4().hex, Machine("test", cpus=1, memory=2**30, gpus=())
local_ray.configure(token)
calm = SimpleNamespace(trial_grace_remaining=60.0)
lost = lambda cause: (print(cause), os._exit(3))
with local_ray.running(token, machine, concurrency=1, interruption=calm, lost=lost):
    (process,) = [one for one in psutil.Process().children() if one.name() == sys.argv[1]]
    process.send_signal(signal.SIGSTOP)
print("the sweep is finalized")
"""


@pytest.mark.chaos
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_ray_that_does_not_end_is_killed_and_the_sweep_finalized(
    tmp_path: Path, name: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLOSING, name],
        cwd=tmp_path,
        env=CommandLine(tmp_path).environment,
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )
    assert (done.stdout, done.returncode) == ("the sweep is finalized\n", 0)
