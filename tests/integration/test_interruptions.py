"""Sweeps stopped by signals, and a ledger that rejects an end. Kills and a second driver are in
`tests/chaos`, rows 1, 6 and 27.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import tomllib
import uuid
from pathlib import Path

import pytest

from tests.integration.commandline import TINY, CommandLine, wait_until
from tests.slices import sliced
from tests.time_limits import scaled
from tests.unit.sweeps.sweep_factory import MadeSweep

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


@pytest.mark.chaos
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


@pytest.mark.chaos
@pytest.mark.parametrize("moment", ["while it starts", "when it has started"])
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
    assert out.startswith("best: trial 1 with val/loss 0.25 ")
    assert "interrupted" not in err


@pytest.mark.chaos
def test_ctrl_c_during_shutdown_prints_resume_command(tmp_path: Path) -> None:
    cli = CommandLine(tmp_path)
    cli.write("small.yaml", TINY)
    (cli.root / "small/trials/0000").mkdir(parents=True)  # a stranger in the way
    code, _, err = _run_and_interrupt_the_end(cli, "run", "small.yaml")
    assert code == 130, err
    assert err.splitlines()[-1] == "sweep resume small"


@pytest.mark.parametrize(
    ("grace", "signals", "wish"),
    sliced(
        [("30", "2", ""), ("1", "1", ""), ("30", "1", "now"), ("30", "0", "now")],
        lambda row: row[1] != "0" and not row[2],
    ),
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
