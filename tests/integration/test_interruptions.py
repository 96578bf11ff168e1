"""Sweeps stopped by signals, and a ledger that rejects an end. Kills and a second driver are in
`tests/chaos`, rows 1, 6 and 27.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import tomllib
import uuid
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.integration.commandline import SMALL, TINY, CommandLine, no_process_of, wait_until
from tests.slices import sliced
from tests.time_limits import scaled
from tests.unit.sweeps.sweep_factory import MadeSweep
from trainable.store.metrics_file import read_rows

# Some five seconds a trial, in few and heavy steps: a signal comes in the middle of several of
# them.
STEPS, EPOCHS, TRIALS = 6, 16, 3
LONG = (
    SMALL.replace("model: mlp, width: 32", "model: cnn, width: 64")
    .replace("trials: 4", f"trials: {TRIALS}")
    .replace("epochs: 4", f"epochs: {EPOCHS}")
    .replace("scheduler: asha", "scheduler: none")
    + "train: {batch_size: 256}\n"
)

# As SQLite says it while another process writes, but of the end of a trial alone.
HELD = """
CREATE TRIGGER held BEFORE UPDATE OF state ON trials WHEN NEW.state = 'COMPLETE'
BEGIN SELECT RAISE(ABORT, 'not now'); END
"""

DRAINS = """
import os, signal, sys, time
import ray
from sweeps.engine import local_ray
from sweeps.engine.signals import Interruption
from sweeps.engine.resources import Machine

token, moment = sys.argv[1:]
start = ray.init

def start_and_hear(**options):
    start(**options)
    if moment == "while it starts":
        os.kill(os.getpid(), signal.SIGTERM)

ray.init = start_and_hear
with Interruption(lambda: print("heard"), lambda: None, grace=60) as interruption:
    local_ray.configure(token)
    local_ray.start(token, Machine.probe(), concurrency=1)
    if moment == "when it has started":
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(4)
    local_ray.stop(token)
    print(interruption.exit_code)
"""


LEAVES = """
import os, signal, sys, time
from pathlib import Path
from sweeps.cli.process_end import ignore_broken_pipes
from sweeps.cli.messages import ConsoleNotices
from sweeps.run.stop_requests import StopRequests
from sweeps.run.driver import make_signal_handler
from sweeps.paths import SweepPaths
from sweeps.sweep_lock import SweepLock

directory, grace, signals, wish = sys.argv[1:5]
ignore_broken_pipes()
paths = SweepPaths(Path(directory), "s")
paths.directory.mkdir()
lock = SweepLock(paths.lock)
token = lock.acquire().token
if "sick" in sys.argv:
    def refuse():
        raise OSError(5, "Input/output error")
    lock.is_ours = refuse
requests, notices = StopRequests(paths, token), ConsoleNotices()
with make_signal_handler(paths, lock, requests, grace=float(grace), notices=notices):
    for _ in range(int(signals)):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
    if wish:
        paths.control.mkdir(exist_ok=True)
        Path(paths.control, f"{token}-{wish}").touch()
    time.sleep(30)
"""

ENDS = """
import os, signal, sys
from sweeps.cli.app import main
from sweeps.run import driver as run

remove, removed = run.remove_scratch, []

def remove_and_hear(paths):
    remove(paths)
    removed.append(paths)
    if len(removed) == 2:  # the first is what an earlier driver left
        os.kill(os.getpid(), signal.SIGINT)

run.remove_scratch = remove_and_hear
sys.argv = ["sweep", *sys.argv[1:]]
main()
"""

IMPORTED = "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"


def _trained(cli: CommandLine) -> bool:
    """Whether two trials have come far enough to have something to lose."""
    return (
        sum(len(read_rows(cli.root / f"small/trials/{n:04d}")) >= 3 * STEPS for n in range(TRIALS))
        >= 2
    )


def _interrupt(
    cli: CommandLine, number: int
) -> tuple[subprocess.Popen[str], str, list[dict[str, Any]]]:
    """Start the sweep and send a signal in the middle of two trials; returns the driver, its
    token and the trials.
    """
    cli.write("small.yaml", LONG)
    # Its first tables are made before: that can take longer than who is interrupted delivers.
    cli.root.mkdir()
    MlflowClient(f"sqlite:///{cli.root / 'mlflow.db'}").search_experiments(max_results=1)
    driver = cli.start("run", "small.yaml")
    wait_until(lambda: driver.poll() is not None or _trained(cli))
    assert driver.poll() is None, driver.communicate()
    token, before = cli.token("small"), cli.json("trials", "small")
    os.kill(driver.pid, number)
    return driver, token, before


def _assert_whole(cli: CommandLine, before: list[dict[str, Any]]) -> None:
    """Exactly the sweep's trials, each with one end, one run and one continuous curve."""
    after = cli.json("trials", "small")
    assert [t["number"] for t in after] == list(range(TRIALS))
    assert [t["state"] for t in after] == ["complete"] * TRIALS
    assert [t["params"] for t in after[: len(before)]] == [t["params"] for t in before]
    assert [t["attempts"] for t in after[:2]] == [2, 2]
    client = MlflowClient(f"sqlite:///{cli.root / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == TRIALS + 1
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert not any(run.data.tags.get("stopped_by") for run in runs)
    by_trial = {
        run.data.tags["gradsweep.trial"]: run for run in runs if "gradsweep.trial" in run.data.tags
    }
    for trial in after:
        rows = read_rows(cli.root / f"small/trials/{trial['number']:04d}")
        assert [row.step for row in rows] == list(range(1, EPOCHS * STEPS + 1))
        run = by_trial[str(trial["number"])].info.run_id
        for key in ("train/loss", "val/loss", "train/grad_norm"):
            wanted = [(row.step, row.metrics[key]) for row in rows if key in row.metrics]
            assert (
                sorted((m.step, m.value) for m in client.get_metric_history(run, key)) == wanted
            ), key


@pytest.mark.chaos  # row 7 shows the same of every byte; this is what a user sees of it
def test_ctrl_c_saves_drains_and_prints_resume_command(cli: CommandLine) -> None:
    driver, token, before = _interrupt(cli, signal.SIGINT)
    printed, _ = driver.communicate(timeout=scaled(60))
    assert driver.returncode == 130, printed
    assert printed.splitlines()[-1] == "sweep resume small"
    assert "Traceback" not in printed
    assert no_process_of(token)
    # The trials saved where they were, not where their last epoch ended.
    steps = [int(t["checkpoint"].rpartition("-")[2]) for t in cli.json("trials", "small")[:2]]
    assert all(step >= 3 * STEPS for step in steps)
    client = MlflowClient(f"sqlite:///{cli.root / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    for run in client.search_runs([experiment.experiment_id]):
        assert (run.info.status, run.data.tags["stopped_by"]) == ("KILLED", "interrupt")
    # Meanwhile one of them is damaged: the one before it is used, and that is said.
    damaged = Path(cli.json("trials", "small")[0]["checkpoint"])
    (damaged / "state.pt").write_bytes(b"")
    done = cli("resume", "small")
    assert done.returncode == 0, done.stderr
    told = f"trial 0: checkpoint {damaged.name} is damaged and was set aside: "
    assert [told in line for line in done.stdout.splitlines()].count(True) == 1
    (run,) = client.search_runs([experiment.experiment_id], "tags.`gradsweep.trial` = '0'")
    assert run.data.tags["checkpoint.set_aside"].startswith(f"checkpoint {damaged.name} is ")
    _assert_whole(cli, before)


def test_second_ctrl_c_exits_immediately(cli: CommandLine) -> None:
    driver, token, before = _interrupt(cli, signal.SIGINT)
    wait_until(
        (cli.root / "small/control/drain").exists, every=0.01
    )  # two at once would arrive as one
    os.kill(driver.pid, signal.SIGINT)
    assert driver.wait(timeout=scaled(2)) == 130
    wait_until(lambda: no_process_of(token), seconds=10)
    kept = cli.json("trials", "small")
    assert [t["params"] for t in kept[: len(before)]] == [t["params"] for t in before]
    assert all(t["checkpoint"] for t in kept[:2])


def test_ledger_that_rejects_an_end_stops_the_sweep(
    cli: CommandLine,
) -> None:
    cli.write("small.yaml", TINY)
    driver = cli.start("run", "small.yaml")
    wait_until((cli.root / "small/sweep.yaml").exists, every=0.05)  # Ray is still to start
    with contextlib.closing(sqlite3.connect(cli.root / "small/ledger.db")) as ledger:
        ledger.execute(HELD)
        printed, _ = driver.communicate(timeout=scaled(60))
        ledger.execute("DROP TRIGGER held")
    assert driver.returncode == 3, printed
    assert "ledger.db cannot be used: not now; what it holds is untouched" in printed
    assert printed.splitlines()[-1] == "sweep resume small"
    cli.ok("resume", "small")
    after = cli.json("trials", "small")
    assert [(t["state"], t["attempts"]) for t in after] == [("complete", 1)] * 2


@pytest.mark.parametrize(
    "moment", sliced(["while it starts", "when it has started"], "while it starts".__eq__)
)
def test_ray_does_not_abort_a_draining_driver(moment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRAINS, uuid.uuid4().hex, moment],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "heard\n143\n"), done.stderr


def _run_and_interrupt_the_end(cli: CommandLine, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", ENDS, *arguments, "--root", cli.root],
        cwd=cli.directory,
        capture_output=True,
        text=True,
        timeout=scaled(150),  # on a busy machine its end waits for a minute for the tracking store
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_ctrl_c_after_the_end_changes_no_message(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path / "runs")
    for value in (0.5, 0.25, 0.75):
        made.add("complete", value)
    code, out, err = _run_and_interrupt_the_end(CommandLine(tmp_path), "resume", "small")
    assert code == 0, err
    assert out.startswith("best: trial 1 with 0.25 ")
    assert "interrupted" not in err


def test_ctrl_c_during_shutdown_prints_resume_command(tmp_path: Path) -> None:
    cli = CommandLine(tmp_path)
    cli.write("small.yaml", TINY)
    (cli.root / "small/trials/0000").mkdir(parents=True)  # a stranger in the way
    code, _, err = _run_and_interrupt_the_end(cli, "run", "small.yaml")
    assert code == 130, err
    assert err.splitlines()[-1] == "sweep resume small"


@pytest.mark.parametrize(
    ("grace", "signals", "wish"),
    [("30", "2", ""), ("1", "1", ""), ("30", "1", "now"), ("30", "0", "now")],
    ids=["second signal", "end of grace", "drain and stop --now", "stop --now"],
)
def test_driver_exits_even_if_output_fails(
    tmp_path: Path, grace: str, signals: str, wish: str
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", LEAVES, tmp_path, grace, signals, wish],
            stderr=full,
            timeout=scaled(20),
            check=False,
        )
    assert done.returncode == 130


def test_interrupt_during_import_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(IMPORTED)
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    module, _, function = project["project"]["scripts"]["sweep"].partition(":")
    done = subprocess.run(
        [sys.executable, "-c", f"from {module} import {function} as main; main()"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_driver_exits_immediately_whatever_fails(tmp_path: Path) -> None:
    """Everybody else stands still by then."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVES, tmp_path, "30", "2", "", "sick"],
        capture_output=True,
        text=True,
        timeout=scaled(25),
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert "exited immediately" in done.stderr
