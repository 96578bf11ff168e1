"""`sweep show --log`: a trial's output, safe for a terminal, and followed until the trial ends."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sweeps.cli.app import app
from sweeps.sweep_lock import SweepLock
from sweeps.view import sweep_progress
from tests.unit.sweeps.sweep_factory import MadeSweep


@pytest.fixture
def sweep(tmp_path: Path) -> MadeSweep:
    made = MadeSweep(tmp_path)
    number = made.add("complete", 0.5)
    made.paths.trial(number).mkdir(parents=True)
    return made


def _log(sweep: MadeSweep, number: int = 0) -> Path:
    return sweep.paths.trial(number) / "trial.log"


def _logs(sweep: MadeSweep, *words: str) -> Result:
    return CliRunner().invoke(
        app, ["show", "small", "--log", *words, "--root", str(sweep.paths.root)]
    )


def test_log_is_printed_without_control_of_the_terminal(sweep: MadeSweep) -> None:
    _log(sweep).write_bytes("plain é\n\x1b[2Jred\rback\x07\n\xff end\n".encode("latin-1"))
    done = _logs(sweep, "0")
    assert done.exit_code == 0
    assert done.stdout == "plain \ufffd\n\\x1b[2Jred\nback\\x07\n\ufffd end\n"


def test_trial_without_output_is_named(sweep: MadeSweep) -> None:
    done = _logs(sweep, "0")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "trial 0 has printed nothing; see: " in done.stderr
    assert " show small 0 " in done.stderr


def test_log_that_is_no_file_does_not_block(sweep: MadeSweep) -> None:
    os.mkfifo(_log(sweep))
    done = _logs(sweep, "0")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "trial.log" in done.stderr


def test_follow_prints_new_lines_until_the_trial_ends(
    sweep: MadeSweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = sweep.add(None)
    looked, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def sleep(_: float) -> None:
        looked.release()
        assert go_on.acquire(timeout=60)

    monkeypatch.setattr(sweep_progress.time, "sleep", sleep)
    lock = SweepLock(sweep.paths.lock)
    lock.acquire()
    try:
        with ThreadPoolExecutor() as executor:
            done = executor.submit(_logs, sweep, str(number), "--follow")
            assert looked.acquire(timeout=60)  # the trial has no directory yet
            sweep.paths.trial(number).mkdir(parents=True)
            half = "é".encode()
            _log(sweep, number).write_bytes(b"one\n" + half[:1])
            go_on.release()
            assert looked.acquire(timeout=60)
            with _log(sweep, number).open("ab") as file:
                file.write(half[1:] + b"\ntwo\n")
            go_on.release()
            assert looked.acquire(timeout=60)
            with _log(sweep, number).open("ab") as file:
                file.write(b"the end\n")
            sweep.ledger.finish(number, "failed", reason="x")
            go_on.release()
            result = done.result(60)
    finally:
        lock.release()
    assert result.exit_code == 0
    assert result.stdout == "one\né\ntwo\nthe end\n"


def test_output_of_further_ranks_follows_that_of_the_first(sweep: MadeSweep) -> None:
    _log(sweep).write_text("first\n")
    for rank, text in ((10, "tenth\n"), (2, "second\n"), (3, "")):
        (sweep.paths.trial(0) / f"trial.rank{rank}.log").write_text(text)
    assert _logs(sweep, "0").stdout == "first\n[rank 2]\nsecond\n[rank 10]\ntenth\n"
