"""Checks after a fault and a resume: U1 to U5, each a function that names the violation.

    U1  the final state of every trial equals the uninterrupted sweep's bit for bit
    U2  every (run, metric, step) is in the tracking store exactly once, with its value there
    U3  exactly as many trials, each with one end and one run whose status says the same
    U4  within 30 s no processes, temporary files, requests or locks are left
    U5  the documented exit code, the cause in one line, and the command that continues

Bit for bit holds on one device model with the same library versions and deterministic algorithms.
What must not live here: how a sweep is started or killed (`sandbox.py`), and faults.
"""

from __future__ import annotations

import fcntl
import hashlib
import pickle
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from pathlib import Path

import psutil

from sweeps.engine.process_cleanup import scratch_directory
from sweeps.sweep_lock import is_held
from tests.chaos.killed_runs import differences
from tests.chaos.outcome import Outcome, digest, read_outcome
from tests.chaos.sandbox import PARALLEL, SERIAL, Driver, Ended, Sandbox, Template
from tests.time_limits import Deadline

__all__ = [
    "PARALLEL",
    "SERIAL",
    "Driver",
    "Ended",
    "Outcome",
    "References",
    "Sandbox",
    "Template",
    "assert_all",
    "assert_ended",
    "assert_no_residue",
    "assert_points",
    "assert_prints_resume_command",
    "assert_states",
    "assert_trials",
]

_RESIDUE_SECONDS = 30.0
# MLflow's status for each end in the ledger; KILLED is for a trial that a user stopped.
_STATUS = {"complete": "FINISHED", "pruned": "FINISHED", "failed": "FAILED"}
_STOPPED_BY_USER = "stopped by the user"
# Names of what is only there while something is being written.
_UNFINISHED = re.compile(r"\.(writing|export|tmp)|tmp|.*(-journal|\.tmp|\.partial)$")
_STORE_BEGUN = ".mlflow.db.new"
"""What is left where the making of the root's store was cut off; whoever makes it removes that."""
_SHOWN = 8


class References:
    """Sweeps that nothing interrupted, each made once per run of the tests and spec.

    Args:
        directory: Where they are run; shared by the processes of the tests.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[str, Outcome] = {}

    def of(self, spec: str) -> Outcome:
        """What the sweep of a spec comes to when nothing happens to it."""
        if spec not in self._made:
            directory = self._place(spec)
            kept = directory.with_suffix(".pickle")
            with directory.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making it
                if not kept.exists():
                    shutil.rmtree(directory, ignore_errors=True)  # of one that failed
                    kept.write_bytes(pickle.dumps(_undisturbed(Sandbox(directory, spec))))
            self._made[spec] = pickle.loads(kept.read_bytes())
        return self._made[spec]

    def sandbox(self, spec: str) -> Sandbox:
        """Where the sweep of a spec was run that nothing happened to, to be looked at."""
        self.of(spec)
        return Sandbox(self._place(spec), spec)

    def _place(self, spec: str) -> Path:
        return self._directory / hashlib.sha256(spec.encode()).hexdigest()[:12]


def _undisturbed(sandbox: Sandbox) -> Outcome:
    """Run a sweep to its end."""
    try:
        ended = sandbox.run().wait()
        assert_ended(ended, 0)
        found = read_outcome(sandbox, ended.seconds)
        assert_points(found, found)
        assert_trials(found, found)
        assert_no_residue(sandbox)
    finally:
        sandbox.close()
    return found


_OF_A_WORKER = ("gradsweep.device", "gradsweep.precision")
"""What runs say of the workers that trained them, once a driver has heard from one."""


def assert_all(
    sandbox: Sandbox,
    reference: Outcome,
    ended: Ended | None = None,
    *,
    code: int = 0,
    only: Collection[int] | None = None,
) -> Outcome:
    """Assert U1 to U4, and the exit code, once the sweep has been brought to its end.

    Args:
        sandbox: Where the sweep is; no driver of it runs any more.
        reference: What it comes to when nothing happens to it.
        ended: How the last driver ended.
        code: How it had to end.
        only: The trials that must equal the reference's; None: all.

    Returns:
        What the sweep has come to, for what else a test has to say.
    """
    if ended is not None:
        assert_ended(ended, code)
    found = read_outcome(sandbox)
    assert_trials(found, reference, only=only)
    assert_states(found, reference, only=only)
    assert_points(found, reference, only=only)
    assert_no_residue(sandbox)
    return found


def assert_states(
    found: Outcome, reference: Outcome, *, only: Collection[int] | None = None
) -> None:
    """U1: the sha256 of every trial's final state is the reference's."""
    for number in _numbers(reference, only):
        ours, theirs = found.states.get(number, {}), reference.states[number]
        if digest(ours) != digest(theirs):
            named = differences(theirs, ours, f"trial {number} ") or ["types or order differ"]
            raise AssertionError(_listed("U1: final state differs", [d[:300] for d in named]))


def assert_points(
    found: Outcome, reference: Outcome, *, only: Collection[int] | None = None
) -> None:
    """U2: every point is in the tracking store exactly once, with the reference's value; and so is
    every row in the trial's own file.
    """
    problems = []
    for number in _numbers(reference, only):
        wanted, there = reference.history(number), found.history(number)
        for run in found.runs.get(number, []):
            places = [(key, step) for key, step, _ in run.points.elements()]
            problems += [
                f"U2: trial {number} {key} step {step}: {places.count((key, step))} times"
                for key, step in sorted({place for place in places if places.count(place) > 1})
            ]
        for key, step in sorted(wanted.keys() | there.keys()):
            expected, value = wanted.get((key, step)), there.get((key, step))
            if expected != value and not (expected != expected and value != value):
                problems.append(
                    f"U2: trial {number} {key} step {step}: {_point(value)}, "
                    f"the reference has {_point(expected)}"
                )
        curves = reference.curves.get(number), found.curves.get(number)
        problems += [f"U2: trial {number} metrics.jsonl{d}" for d in differences(*curves)]
    assert not problems, _listed("U2: points in the tracking store", problems)


def assert_trials(
    found: Outcome, reference: Outcome, *, only: Collection[int] | None = None
) -> None:
    """U3: the reference's trials, each with one end and one run whose status says the same."""
    numbers = [trial["number"] for trial in found.trials]
    wanted = [trial["number"] for trial in reference.trials]
    assert numbers == wanted, f"U3: trials {numbers} are there, must be {wanted}"
    problems = []
    for ours, theirs in zip(found.trials, reference.trials, strict=True):
        number = ours["number"]
        compared = (
            ("state", "params", "value", "step", "epoch")
            if number in _numbers(reference, only)
            else ()
        )
        problems += [
            f"U3: trial {number} {key}: {ours[key]!r}, the reference has {theirs[key]!r}"
            for key in compared
            if ours[key] != theirs[key]
        ]
        if ours["state"] not in _STATUS:
            problems.append(f"U3: trial {number} has no end: it is {ours['state']}")
            continue
        runs = found.runs.get(number, [])
        if len(runs) != 1:
            problems.append(f"U3: trial {number} has {len(runs)} runs: {[r.run_id for r in runs]}")
            continue
        (run,) = runs
        stopped = ours["state"] == "pruned" and ours.get("reason") == _STOPPED_BY_USER
        if run.status != ("KILLED" if stopped else _STATUS[ours["state"]]):
            problems.append(
                f"U3: trial {number} is {ours['state']}, its run says {run.status} {run.tags}"
            )
        if run.tags.get("stopped_by") == "interrupt":
            problems.append(f"U3: trial {number} came to an end, its run says interrupted")
        if run.run_id != ours["mlflow_run_id"]:
            problems.append(f"U3: trial {number} names the run {ours['mlflow_run_id']}")
        told = {"gradsweep.attempts": str(ours["attempts"])}
        if compared:
            (untouched,) = reference.runs[number]
            told |= {key: untouched.tags[key] for key in _OF_A_WORKER if key in run.tags}
        problems += [
            f"U3: trial {number} {key}: its run says {run.tags.get(key)!r}, must be {value!r}"
            for key, value in told.items()
            if run.tags.get(key) != value
        ]
    strangers = found.runs.keys() - set(wanted) - {None}
    problems += [
        f"U3: there are runs of a trial {number}" for number in sorted(map(str, strangers))
    ]
    sweeps = found.runs.get(None, [])
    if len(sweeps) != 1:
        problems.append(f"U3: {len(sweeps)} runs belong to no trial, the sweep has one")
    elif sweeps[0].status != reference.runs[None][0].status:
        problems.append(f"U3: the sweep's own run says {sweeps[0].status}")
    assert not problems, _listed("U3: trials and runs", problems)


def assert_no_residue(sandbox: Sandbox, *, seconds: float = _RESIDUE_SECONDS) -> None:
    """U4: nothing is left of what only a running sweep needs."""
    deadline = Deadline(seconds)
    while problems := _residue(sandbox):
        assert not deadline.passed, _listed(f"U4: {seconds:.0f} s later", problems)
        time.sleep(0.2)


def assert_ended(ended: Ended, code: int, cause: str | None = None) -> None:
    """U5: the documented exit code, without a traceback, and the cause in one line.

    Args:
        ended: How the command ended.
        code: Its documented exit code.
        cause: A pattern that one line of what it printed must match.
    """
    assert ended.code == code, f"U5: exit code {ended.code}, must be {code}:\n{ended.text}"
    assert "Traceback" not in ended.text, f"U5: a traceback is no cause:\n{ended.text}"
    if cause is not None:
        lines = [line for line in ended.text.splitlines() if re.search(cause, line)]
        assert lines, f"U5: no line says {cause!r}:\n{ended.text}"


def assert_prints_resume_command(ended: Ended, code: int, cause: str | None = None) -> None:
    """U5 for a driver that ended early: the last line is the command that continues."""
    assert_ended(ended, code, cause)
    assert ended.last_line == "sweep resume chaos", f"U5: the last line is {ended.last_line!r}"


def _numbers(reference: Outcome, only: Collection[int] | None) -> list[int]:
    every = [trial["number"] for trial in reference.trials]
    return [number for number in every if only is None or number in only]


def _residue(sandbox: Sandbox) -> list[str]:
    paths = sandbox.paths
    for journal in paths.root.glob("*.db-journal"):
        # What was cut in the middle SQLite takes back when somebody opens the store; a journal
        # with nothing in it yet it uses when somebody writes, as the next driver does.
        with closing(sqlite3.connect(str(journal).removesuffix("-journal"))) as store:
            (version,) = store.execute("PRAGMA user_version").fetchone()
            store.execute(f"PRAGMA user_version = {version}")
    looks: list[Callable[[], list[str]]] = [
        lambda: [f"process {pid} lives: {command[:80]}" for pid, command in _alive(sandbox)],
        lambda: [f"{d} exists" for d in map(scratch_directory, sandbox.tokens) if d.exists()],
        lambda: [
            f"{path.relative_to(sandbox.directory)} exists"
            for path in paths.root.rglob("*")
            if _UNFINISHED.match(path.name)
            and "mlartifacts" not in path.parts
            and not path.name.startswith(_STORE_BEGUN)
        ],
        lambda: [f"{path.name} of control/ exists" for path in _files(paths.drain.parent)],
        lambda: [f"{paths.ray} exists"] if paths.ray.exists() else [],
        # Lock files stay; the kernel drops the lock of who is gone.
        lambda: [f"{path} is held" for path in paths.root.rglob("*lock") if is_held(path)],
    ]
    return [problem for look in looks for problem in look()]


def _alive(sandbox: Sandbox) -> list[tuple[int, str]]:
    """The processes that run, with their commands: none that ends meanwhile, and no zombie."""
    found = []
    for process in sandbox.processes():
        with suppress(psutil.NoSuchProcess):  # a zombie, too
            found.append((process.pid, " ".join(process.cmdline())))
    return found


def _files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _point(value: float | None) -> str:
    return "missing" if value is None else repr(value)


def _listed(title: str, problems: list[str]) -> str:
    more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return "\n".join([title, *problems[:_SHOWN], *more])
