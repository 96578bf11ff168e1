# ruff: noqa: E501, because a spec stands on one line
"""Errors of commands, machines and tasks, which no spec alone can have.

The messages are in `tests/golden/messages`. Each kind of wrong input has a number (`KINDS`), with
which its tests begin. Those of a spec are in `sweeps/spec/test_*_bad_inputs.py`, those of words
and flags in `test_usage_errors.py`; those that need a server are integration tests.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import trainable
from sweeps.cli.app import app
from sweeps.engine.resources import Machine, ResourcePlan
from sweeps.engine.task_check import TaskInspector, TaskRefused, longest_warmup
from sweeps.errors import OriginChanged, SpecError
from sweeps.spec.resume_checks import Origin, check_origin
from sweeps.spec.revisions import write_spec
from sweeps.spec.spec import parse_spec, parse_with_positions
from sweeps.sweep_lock import SweepLock
from tests.golden.messages import compare_messages
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import MadeSweep
from trainable.check.findings import CheckRequest
from trainable.check.inspect_task import answer

ROOT = Path(__file__).parents[2]
SMALL = "name: small\ntask: {name: spiral, samples: 8}\nmetric: val/loss\nmode: min\ntrials: 2\nbudget: {epochs: 5}\n"
SPEC = "name: small\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 2\n"

COMMANDS = {
    "34 a share where there is no GPU": ["check", "s.yaml", "-s", "resources.gpu=0.3"],
    "34 a sweep of it": ["run", "s.yaml", "-s", "resources.gpu=0.3"],
    "34 a resume where there is no GPU": ["resume", "made", "-s", "resources.gpu=2"],
    "37 more CPUs than there are": ["check", "s.yaml", "-s", "resources.cpu=4096"],
    "37 a resume on a smaller machine": ["resume", "made", "-s", "resources.cpu=4096"],
    "43 a root in a file": ["run", "s.yaml", "--root", "file/x"],
    "43 a tracking store in a file": ["ui", "--root", "file/x", "--no-open"],
    "43 checkpoints in a file": ["train", "s.yaml", "--dir", "file/x"],
    "43 figures in a file": ["train", "s.yaml", "--figures", "file/x"],
    "43 weights in a file": ["best", "made", "--export", "file/x"],
    "43 a report in a file": ["report", "made", "--output", "file/x/page.html"],
    "43 a report over a directory": ["report", "made", "--output", "runs"],
    "43 a starter in a file": ["init", "file/x"],
    "46 resume of an unknown sweep": ["resume", "mades"],
    "46 a look at an unknown sweep": ["status", "other"],
    "47 a name that exists": ["run", "s.yaml", "--name", "made"],
    "49 a path for a name": ["status", "../made"],
    "49 a path for a new name": ["run", "s.yaml", "--name", "../x"],
    "58 a setting without a value": ["run", "s.yaml", "-s", "trials"],
    "59 a setting of nothing": ["resume", "made", "-s", "trian.batch_size=3"],
    "48 a resume of something else": ["resume", "made", "-s", "seed=7"],
    "a spec that is not there": ["run", "none.yaml"],
    "a root that is not there": ["resume", "made", "--root", "none"],
    "a duration that is none": ["resume", "made", "--grace", "x"],
    "a negative duration": ["run", "s.yaml", "--grace", "-1"],
    "a duration that no clock counts to": ["resume", "made", "--grace", "9" * 400],
    "an empty duration": ["stop", "made", "--timeout", ""],
    "an address that is none": ["run", "s.yaml", "--address", "head"],
    "an empty tracking address": ["run", "s.yaml", "--tracking-uri", ""],
    "43 a root that is a file": ["list", "--root", "file"],
    "two ways of showing": ["status", "made", "--watch", "--json"],
    "a sweep that nobody runs": ["stop", "made"],
    "a choice that there is not": ["best", "made", "5"],
    "flags that exclude each other": ["stop", "made", "0", "--now"],
    "a flag that needs another": ["best", "made", "--pickle"],
    "a model's name that the registry refuses": ["best", "made", "--register", "a/b"],
    "an export over something": ["best", "made", "--export", "runs"],
    "a trial that there is not": ["show", "made", "9"],
    "a starter over something": ["init", "runs/made"],
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_invalid_command_is_refused(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "s.yaml").write_text(SPEC)
    (tmp_path / "file").touch()
    MadeSweep(tmp_path / "runs", "made").add("complete", 0.5)
    before = _everything(tmp_path)
    done = CliRunner().invoke(app, arguments)
    machine = Machine.probe()
    assert (done.exit_code, done.stdout) == (2, "")
    printed = done.stderr.replace(str(tmp_path), "{tmp_path}").replace(str(machine), "{machine}")
    printed = printed.replace(f"cpu: {machine.cpus} or less", "cpu: {cpus} or less")
    compare_messages(request, printed.splitlines())
    assert _everything(tmp_path) == before


def test_run_with_a_held_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(SPEC)
    made = MadeSweep(tmp_path / "runs", "made")
    lock = SweepLock(made.paths.lock)
    holder = lock.acquire()
    try:
        done = CliRunner().invoke(app, ["run", "s.yaml", "--name", "made"])
    finally:
        lock.release()
    assert (done.exit_code, done.stdout) == (4, "")
    assert holder.describe() in done.stderr
    assert holder.since in done.stderr
    assert done.stderr.endswith("watch it with: sweep status made --watch\n")


def test_37_resume_error_names_the_line_of_the_sweeps_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = MadeSweep(tmp_path / "runs", "made", more="resources: {cpu: 4096}\n")
    write_spec(made.paths.spec, with_overrides(made.spec, ["trials=9"]))
    lines = made.paths.spec.read_text().splitlines()
    line = len(lines) - lines[::-1].index("resources: {cpu: 4096, gpu: auto}")
    assert line > len(lines) / 2  # in the second revision
    done = CliRunner().invoke(app, ["resume", "made"])
    machine = Machine.probe()
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{made.paths.spec}:{line}:18: resources.cpu: 4096 CPUs ")
    assert done.stderr.endswith(f"write cpu: {machine.cpus} or less\n")


def _everything(directory: Path) -> set[Path]:
    # SQLite's own files come and go beside a database that is looked at; the lock's file is there
    # in every sweep that was ever run.
    return {
        path
        for path in directory.rglob("*")
        if not path.name.startswith("ledger.db-") and path.name != "lock"
    }


TASKS = {
    "26 warmup as long as the run": {"train:": "{schedule: {warmup: 5}}"},
    "30 a precision that the device lacks": {"train:": "{precision: bf16}"},
    "38 a metric that is not reported": {"metric:": "val/los"},
    "40 neither built in nor a path": {"task:": "digit"},
    "40 the half before the colon": {"task:": "{name: trainable.tasks.nowhere:Spiral}"},
    "40 the half after the colon": {"task:": "trainable.tasks.spiral:Spirale"},
    "41 a class that is no task": {"task:": "pathlib:Path"},
    "41 a function that is no loop": {"task:": "json:dumps"},
    "41 an argument that the task does not take": {"task:": "{name: spiral, smaples: 8}"},
    "41 an argument that the task refuses": {"task:": "{name: spiral, samples: 1}"},
    "42 a data set that is not there": {
        "task:": "{name: fashion_mnist, data_dir: ../data, download: false}"
    },
    "42 a data set that is not where it is by default": {
        "task:": "fashion_mnist",
        "-s": "task.download=false",
    },
}


@pytest.mark.parametrize("wrong", TASKS.values(), ids=TASKS)
def test_invalid_task_is_refused(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: dict[str, str],
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])  # where the command looks for modules is added
    device = "mps" if "bf16" in str(wrong) else "cpu"
    monkeypatch.setattr("trainable.build.find_device", lambda _: torch.device(device))
    lines = dict(line.split(" ", 1) for line in SMALL.splitlines()) | wrong
    override = ["-s", override] if (override := lines.pop("-s", "")) else []
    (here / "s.yaml").write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
    done = CliRunner().invoke(app, ["train", "s.yaml", *override])
    assert (done.exit_code, done.stdout) == (2, "")
    printed = done.stderr.splitlines()[-1].replace(str(tmp_path), "{tmp_path}")
    compare_messages(request, [printed])
    assert [each.name for each in here.iterdir()] == ["s.yaml"]


def test_40_missing_module_is_found_without_a_child(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec, document = parse_with_positions(SPEC.replace("digits", "nowhere:Mine"), "s.yaml")
    with pytest.raises(SpecError) as refused, document.attach_locations():
        TaskInspector(spec, ResourcePlan(1, 0, 1))
    compare_messages(request, [str(refused.value).replace(str(tmp_path), "{tmp_path}")])


@pytest.mark.parametrize("stranger", ["trainable.py", "trainable/__init__.py"])
def test_40_shadowing_file_is_found_without_a_child(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / stranger
    path.parent.mkdir(exist_ok=True)
    path.write_text("a = 1")
    spec, document = parse_with_positions(SPEC, "s.yaml")
    with pytest.raises(SpecError) as refused, document.attach_locations():
        TaskInspector(spec, ResourcePlan(1, 0, 1))
    compare_messages(request, [str(refused.value).replace(str(tmp_path), "{tmp_path}")])


def test_40_second_copy_of_the_packages_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trainable").mkdir()
    shutil.copy(trainable.__file__, tmp_path / "trainable")
    monkeypatch.chdir(tmp_path)
    spec, _ = parse_with_positions(SPEC, "s.yaml")
    TaskInspector(spec, ResourcePlan(1, 0, 1)).terminate()


def test_40_unknown_built_in_task_is_found_without_a_child(request: pytest.FixtureRequest) -> None:
    spec, document = parse_with_positions(SPEC, "s.yaml", ["task=digit"])
    with pytest.raises(SpecError) as refused, document.attach_locations():
        TaskInspector(spec, ResourcePlan(1, 0, 1))
    compare_messages(request, [str(refused.value)])


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(
            "task: trainable.task:Task\n",
            id="41 a task that lacks a part",
        ),
        pytest.param(
            "task: {name: spiral, samples: 8}\nspace:\n  train.schedule.warmup: {int: [90, 100]}\n",
            id="26 a warmup that is searched",
        ),
        pytest.param(
            "task: {name: spiral, samples: 8}\nspace:\n  train.schedule.warmup: {int: [0, 100]}\n",
            id="26 the end of a warmup that is searched",
        ),
    ],
)
def test_error_of_the_child_names_the_place_of_its_key(
    request: pytest.FixtureRequest, lines: str
) -> None:
    spec, document = parse_with_positions(SPEC.replace("task: digits\n", lines), "s.yaml")
    config = spec.trial_config(0, spec.example_params())
    reply = answer(CheckRequest(config=config, longest_warmup=longest_warmup(spec)))
    with pytest.raises(SpecError) as refused, document.attach_locations():
        raise TaskRefused(spec, reply["key"], reply["refused"])
    compare_messages(request, [str(refused.value)])


def test_48_changed_resume_shows_the_diff_and_the_flag(request: pytest.FixtureRequest) -> None:
    spec = parse_spec(SPEC, "s.yaml")
    other = with_overrides(spec, ["seed=1", "task=spiral"])
    with pytest.raises(OriginChanged) as refused:
        check_origin(Origin(), Origin(), spec, other, accepted=False)
    compare_messages(request, [str(refused.value)])


def test_07_and_09_are_accepted() -> None:
    text = SPEC.replace("name: small", "name: on") + "train: {optimizer: {lr: 1e-4}}\n"
    spec = parse_spec(text, "s.yaml")
    assert (spec.name, spec.train.optimizer.lr) == ("on", 1e-4)


KINDS = """
1 empty file · 2 top-level list · 3 tab indent · 4 unclosed bracket · 5 duplicate key · 6 misspelt key · 7 1e-4 is a number ·
8 decimal comma · 9 `on` is text · 10 leading zero · 11 a time is text · 12 object tag · 13 alias bomb · 14 file too large ·
15 not UTF-8 · 16 logarithm from 0 · 17 low above high · 18 low equals high · 19 NaN bound · 20 infinite bound · 21 logarithm
with a step · 22 empty choices · 23 unknown distribution · 24 lr of 0 · 25 warmup of 1.0 · 26 warmup of all steps · 27 max_norm
of 0 · 28 accumulation of 0 · 29 batch smaller than accumulation · 30 precision that the device lacks · 31 space of no field ·
32 no trials · 33 no concurrency · 34 a share of no GPU · 35 gpu of 1.5 · 36 negative gpu · 37 more CPUs than there are ·
38 misspelt metric · 39 misspelt mode · 40 bad module:Name · 41 target of another kind · 42 no data · 43 storage not writable ·
44 MLflow unreachable · 45 MLflow refuses · 46 resume of an unknown sweep · 47 a name that exists · 48 resume of something else ·
49 a name that is no directory's · 50 too long for MLflow · 51 checkpoints every 0 · 52 negative retries · 53 unset variable ·
54 unknown flag or command · 55 grace of all epochs · 56 a scheduler that needs checkpoints · 57 two keys for one field ·
58 setting without a value · 59 setting of nothing · 60 spec of a newer version
"""
HELD_ELSEWHERE = {
    44: "test_refused_connection_ends_run_before_it_starts",
    45: "test_refusing_server_ends_run_before_it_starts",
}


def test_each_of_the_sixty_kinds_is_held() -> None:
    kinds = {int(kind.split()[0]) for kind in KINDS.split("·")}
    assert kinds == set(range(1, 61))
    text = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    held = {int(number) for number in re.findall(r'(?:\bid=|^    )"(\d\d) ', text, re.MULTILINE)}
    for numbers in re.findall(r"def test_((?:\d\d_(?:and_)?)+)", text):
        held |= {int(number) for number in re.findall(r"\d\d", numbers)}
    held |= {row for row, test in HELD_ELSEWHERE.items() if f"def {test}(" in text}
    assert held == kinds
