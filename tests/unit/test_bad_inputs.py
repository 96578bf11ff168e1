# ruff: noqa: E501, because messages are compared whole, each on one line
"""What no spec alone can get wrong, and the whole message it gets: commands, machines, tasks.

Each kind of wrong input has a number (`KINDS`), with which the tests that hold it begin: those of
a spec's text `sweeps/test_*_bad_inputs.py`, of words and flags `test_wrong_words.py`; those
that need a server are integration tests.
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
from sweeps.cli import app
from sweeps.config.provenance_check import Origin, check_origin
from sweeps.config.revisions import write_spec
from sweeps.config.spec import parse_spec, parse_with_positions
from sweeps.engine.resources import Machine, ResourcePlan
from sweeps.engine.task_check import TaskInspector, TaskRefused, longest_warmup
from sweeps.errors import OriginChanged, SpecError
from sweeps.sweep_lock import SweepLock
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import MadeSweep
from trainable.inspect_task import _answer

ROOT = Path(__file__).parents[2]
SMALL = "name: small\ntask: {name: spiral, samples: 8}\nmetric: val/loss\nmode: min\ntrials: 2\nbudget: {epochs: 5}\n"
SPEC = "name: small\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 2\n"
NO_PLACE = "files cannot be written there (Not a directory); the directory must be writable, or its parent if it does not exist; choose another, or correct its permissions"
NOT_ONE = "a trial runs on one node, the largest is"

COMMANDS = [
    pytest.param(
        ["check", "s.yaml", "-s", "resources.gpu=0.3"],
        f"-s resources.gpu=0.3: resources.gpu: 0.3 GPU is more than any node has; {NOT_ONE} {{machine}}; write gpu: auto or gpu: 0",
        id="34 a share where there is no GPU",
    ),
    pytest.param(
        ["run", "s.yaml", "-s", "resources.gpu=0.3"],
        f"-s resources.gpu=0.3: resources.gpu: 0.3 GPU is more than any node has; {NOT_ONE} {{machine}}; write gpu: auto or gpu: 0",
        id="34 a sweep of it",
    ),
    pytest.param(
        ["resume", "made", "-s", "resources.gpu=2"],
        f"-s resources.gpu=2: resources.gpu: 2 GPU is more than any node has; {NOT_ONE} {{machine}}; write gpu: auto or gpu: 0",
        id="34 a resume where there is no GPU",
    ),
    pytest.param(
        ["check", "s.yaml", "-s", "resources.cpu=4096"],
        f"-s resources.cpu=4096: resources.cpu: 4096 CPUs are more than any node has; {NOT_ONE} {{machine}}; write cpu: {{cpus}} or less",
        id="37 more CPUs than there are",
    ),
    pytest.param(
        ["resume", "made", "-s", "resources.cpu=4096"],
        f"-s resources.cpu=4096: resources.cpu: 4096 CPUs are more than any node has; {NOT_ONE} {{machine}}; write cpu: {{cpus}} or less",
        id="37 a resume on a smaller machine",
    ),
    pytest.param(
        ["run", "s.yaml", "--root", "file/x"],
        f"--root {{here}}/file/x: {NO_PLACE}",
        id="43 a root in a file",
    ),
    pytest.param(
        ["ui", "--root", "file/x", "--no-open"],
        f"--root {{here}}/file/x: {NO_PLACE}",
        id="43 a tracking store in a file",
    ),
    pytest.param(
        ["train", "s.yaml", "--dir", "file/x"],
        f"--dir {{here}}/file/x: {NO_PLACE}",
        id="43 checkpoints in a file",
    ),
    pytest.param(
        ["train", "s.yaml", "--figures", "file/x"],
        f"--figures {{here}}/file/x: {NO_PLACE}",
        id="43 figures in a file",
    ),
    pytest.param(
        ["best", "made", "--export", "file/x"],
        f"--export {{here}}/file/x: {NO_PLACE}",
        id="43 weights in a file",
    ),
    pytest.param(
        ["report", "made", "--output", "file/x/page.html"],
        f"--output {{here}}/file/x: {NO_PLACE}",
        id="43 a report in a file",
    ),
    pytest.param(
        ["report", "made", "--output", "runs"],
        "--output runs: is a directory; the option names a file; write one in it, such as runs/report.html",
        id="43 a report over a directory",
    ),
    pytest.param(
        ["init", "file/x"],
        "file/x cannot be written (Not a directory); a starter is two files in a directory; choose another directory: sweep init DIR",
        id="43 a starter in a file",
    ),
    pytest.param(
        ["resume", "mades"],
        "there is no sweep 'mades' below {here}/runs; did you mean 'made'?",
        id="46 resume of an unknown sweep",
    ),
    pytest.param(
        ["status", "other"],
        "there is no sweep 'other' below {here}/runs; the sweeps there are: made; if it is elsewhere, name its directory with --root DIR or SWEEP_ROOT",
        id="46 a look at an unknown sweep",
    ),
    pytest.param(
        ["run", "s.yaml", "--name", "made"],
        "sweep 'made' exists already; a name must be unique below the root; resume it with: sweep resume made, or choose another name with --name",
        id="47 a name that exists",
    ),
    pytest.param(
        ["status", "../made"],
        "'../made' holds a path separator; a name becomes a directory of that name below the root; use --root to choose another place",
        id="49 a path for a name",
    ),
    pytest.param(
        ["run", "s.yaml", "--name", "../x"],
        "--name ../x: name: '../x' holds a path separator; a name becomes a directory of that name below the root; use --root to choose another place",
        id="49 a path for a new name",
    ),
    pytest.param(
        ["run", "s.yaml", "-s", "trials"],
        "-s trials: there is no '='; an override is KEY=VALUE; write -s trials=VALUE",
        id="58 a setting without a value",
    ),
    pytest.param(
        ["resume", "made", "-s", "trian.batch_size=3"],
        "-s trian.batch_size=3: trian.batch_size: unknown key 'trian'; did you mean 'train'?",
        id="59 a setting of nothing",
    ),
    pytest.param(
        ["resume", "made", "-s", "seed=7"],
        "trials of this sweep were run with other code, data or keys: seed 0 -> 7; trials before and after could not be compared; undo the change, or accept it with --accept-changes",
        id="48 a resume of something else",
    ),
    pytest.param(
        ["run", "none.yaml"],
        "none.yaml: there is no such file; a spec is a YAML file; `sweep init` writes one to start from",
        id="a spec that is not there",
    ),
    pytest.param(
        ["resume", "made", "--root", "none"],
        "there is no sweep 'made' below {here}/none; there are no sweeps there yet; if it is elsewhere, name its directory with --root DIR or SWEEP_ROOT",
        id="a root that is not there",
    ),
    pytest.param(
        ["resume", "made", "--grace", "x"],
        "--grace is 'x'; a duration is a count of seconds, or counts with units; write for example 30s, 2m or 1m30s",
        id="a duration that is none",
    ),
    pytest.param(
        ["run", "s.yaml", "--grace", "-1"],
        "--grace is '-1'; a duration is a count of seconds, or counts with units; write for example 30s, 2m or 1m30s",
        id="a negative duration",
    ),
    pytest.param(
        ["resume", "made", "--grace", "9" * 400],
        f"--grace is '{'9' * 57}...'; a duration is at most a year (8760h); write for example 30s, 2m or 1m30s",
        id="a duration that no clock counts to",
    ),
    pytest.param(
        ["stop", "made", "--timeout", ""],
        "--timeout is ''; a duration is a count of seconds, or counts with units; write for example 30s, 2m or 1m30s",
        id="an empty duration",
    ),
    pytest.param(
        ["run", "s.yaml", "--address", "head"],
        "--address head: is no address; the address of a Ray cluster is HOST:PORT of its head, as `ray start --head` prints it, such as 10.0.0.5:6379; write it so, or `auto` for the cluster of which this machine is a node, or `local` for a local Ray",
        id="an address that is none",
    ),
    pytest.param(
        ["run", "s.yaml", "--tracking-uri", ""],
        "--tracking-uri : tracking.uri: '' has the wrong length; it must not be empty",
        id="an empty tracking address",
    ),
    pytest.param(
        ["list", "--root", "file"],
        "--root {here}/file: is a file; the root is the directory that holds all sweeps; name that directory",
        id="43 a root that is a file",
    ),
    pytest.param(
        ["status", "made", "--watch", "--json"],
        "--watch and --json exclude each other; --watch redraws a table, --json prints once; omit one of them",
        id="two ways of showing",
    ),
    pytest.param(
        ["stop", "made"],
        "sweep 'made' is interrupted and no driver runs it; only a running sweep can be stopped; resume it with: sweep resume made",
        id="a sweep that nobody runs",
    ),
    pytest.param(
        ["best", "made", "--trial", "5"],
        "trial 5 of sweep 'made' is not the best; choose one of: 0; see: sweep best made",
        id="a choice that there is not",
    ),
    pytest.param(
        ["stop", "made", "--trial", "0", "--now"],
        "--now and --trial exclude each other; a trial ends at its next step; leave one of them out",
        id="flags that exclude each other",
    ),
    pytest.param(
        ["best", "made", "--pickle"],
        "--pickle says how to register; add --register MODEL",
        id="a flag that needs another",
    ),
    pytest.param(
        ["best", "made", "--register", "a/b"],
        "'a/b' holds a path separator; a model's name is part of addresses; use letters, digits, '-' and '_'",
        id="a model's name that the registry refuses",
    ),
    pytest.param(
        ["best", "made", "--export", "runs"],
        "runs is not empty; an export never overwrites files; name a new directory",
        id="an export over something",
    ),
    pytest.param(
        ["show", "made", "9"],
        "sweep 'made' has no trial 9; its trials are 0 to 0",
        id="a trial that there is not",
    ),
    pytest.param(
        ["init", "runs/made"],
        "runs/made/sweep.yaml exists already; nothing is overwritten; choose another directory: sweep init DIR",
        id="a starter over something",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), COMMANDS)
def test_the_whole_message_of_a_wrong_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "s.yaml").write_text(SPEC)
    (tmp_path / "file").touch()
    MadeSweep(tmp_path / "runs", "made").add("complete", 0.5)
    before = _everything(tmp_path)
    done = CliRunner().invoke(app, arguments)
    machine = Machine.probe()
    expected = message.format(machine=machine, cpus=machine.cpus, here=tmp_path)
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"{expected}\n")
    assert _everything(tmp_path) == before


def test_a_run_of_a_name_that_another_driver_holds_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert done.stderr == (
        f"sweep 'made' is already being run by {holder.describe()}; only one driver may run a sweep, this one since {holder.since}; watch it with: sweep status made --watch\n"
    )


def test_37_a_resume_is_told_the_line_of_the_sweeps_own_spec(
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
    assert (done.exit_code, done.stdout, done.stderr) == (
        2,
        "",
        f"{made.paths.spec}:{line}:18: resources.cpu: 4096 CPUs are more than any node has; {NOT_ONE} {machine}; write cpu: {machine.cpus} or less\n",
    )


def _everything(directory: Path) -> set[Path]:
    # SQLite's own files come and go beside a database that is looked at; the lock's file is there
    # in every sweep that was ever run.
    return {
        path
        for path in directory.rglob("*")
        if not path.name.startswith("ledger.db-") and path.name != "lock"
    }


TASKS = [
    pytest.param(
        {"train:": "{schedule: {warmup: 5}}"},
        "s.yaml:7:28: train.schedule.warmup: 5 steps of 5 steps in all; it must be shorter than the run; lower train.schedule.warmup or raise budget.epochs",
        id="26 warmup as long as the run",
    ),
    pytest.param(
        {"train:": "{precision: bf16}"},
        "s.yaml:7:20: train.precision: bf16; on the device mps only fp32 is supported; write auto or fp32",
        id="30 a precision that the device lacks",
    ),
    pytest.param(
        {"metric:": "val/los"},
        "s.yaml:3:9: metric: 'val/los' is not reported (did you mean 'val/loss'?); it must be one that is reported at the end of an epoch: memory/process_mb, train/clip_fraction, train/grad_norm, train/loss, train/lr, train/samples_per_second, val/accuracy, val/loss; write one of these",
        id="38 a metric that is not reported",
    ),
    pytest.param(
        {"task:": "digit"},
        "s.yaml:2:7: task.name: 'digit' is no built-in task (did you mean 'digits'?); built in are char_lm, digits, fashion_mnist, spiral; write one of these, or your own as package.module:ClassName",
        id="40 neither built in nor a path",
    ),
    pytest.param(
        {"task:": "{name: trainable.tasks.nowhere:Spiral}"},
        "s.yaml:2:14: task.name: 'trainable.tasks.nowhere:Spiral': the module 'trainable.tasks.nowhere' could not be imported (ModuleNotFoundError: No module named 'trainable.tasks.nowhere'); the part before the colon must be importable from where you start; correct the module or its name",
        id="40 the half before the colon",
    ),
    pytest.param(
        {"task:": "trainable.tasks.spiral:Spirale"},
        "s.yaml:2:7: task.name: 'trainable.tasks.spiral:Spirale': the module 'trainable.tasks.spiral' was imported, but it has no 'Spirale' (did you mean 'Spiral'?); its tasks are: Spiral; name one that is there",
        id="40 the half after the colon",
    ),
    pytest.param(
        {"task:": "pathlib:Path"},
        "s.yaml:2:7: task.name: 'pathlib:Path' is the class Path, which does not derive from Task; it must be a class that derives from trainable.Task and defines build_model() and build_data(), or a generator function run(config, context); tasks beside it: none; name one",
        id="41 a class that is no task",
    ),
    pytest.param(
        {"task:": "json:dumps"},
        "s.yaml:2:7: task.name: 'json:dumps' is a function that cannot be called with two arguments (too many positional arguments); a loop is a generator function run(config, context); name one, or a class that derives from trainable.Task",
        id="41 a function that is no loop",
    ),
    pytest.param(
        {"task:": "{name: spiral, smaples: 8}"},
        "s.yaml:2:31: task.smaples: 'spiral' takes no argument 'smaples' (did you mean 'samples'?); it takes: samples, width, turns, noise, data_seed, label_smoothing, class_weights; correct or remove it",
        id="41 an argument that the task does not take",
    ),
    pytest.param(
        {"task:": "{name: spiral, samples: 1}"},
        "s.yaml:2:7: task: 'spiral' refused its arguments {{'samples': 1}}: spiral: samples is 1; it must be at least 4 for each class",
        id="41 an argument that the task refuses",
    ),
    pytest.param(
        {"task:": "{name: fashion_mnist, data_dir: ../data, download: false}"},
        "s.yaml:2:39: task.data_dir: {there}/data/FashionMNIST/raw lacks train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte and download is false; put the files there (packed as .gz or not), set task.data_dir to where they are, or write task.download: true",
        id="42 a data set that is not there",
    ),
    pytest.param(
        {"task:": "fashion_mnist", "-s": "task.download=false"},
        "s.yaml:2:7: task.data_dir: {there}/.cache/gradsweep/FashionMNIST/raw lacks train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte and download is false; put the files there (packed as .gz or not), set task.data_dir to where they are, or write task.download: true",
        id="42 a data set that is not where it is by default",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), TASKS)
def test_the_whole_message_of_a_wrong_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str], message: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])  # where the command looks for modules is added
    device = "mps" if "bf16" in message else "cpu"
    monkeypatch.setattr("trainable.build.find_device", lambda _: torch.device(device))
    lines = dict(line.split(" ", 1) for line in SMALL.splitlines()) | wrong
    override = ["-s", override] if (override := lines.pop("-s", "")) else []
    (here / "s.yaml").write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
    done = CliRunner().invoke(app, ["train", "s.yaml", *override])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == message.format(there=tmp_path)
    assert [each.name for each in here.iterdir()] == ["s.yaml"]


def test_40_a_module_that_is_not_there_is_known_without_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec, document = parse_with_positions(SPEC.replace("digits", "nowhere:Mine"), "s.yaml")
    with pytest.raises(SpecError) as refused, document.attach_locations():
        TaskInspector(spec, ResourcePlan(1, 0, 1))
    assert str(refused.value) == (
        f"s.yaml:2:7: task.name: 'nowhere:Mine': there is no module 'nowhere' in {tmp_path} or among the installed packages; the part before the colon must be importable from where you start; change the directory, install the package, or correct the name"
    )


@pytest.mark.parametrize("stranger", ["trainable.py", "trainable/__init__.py"])
def test_40_a_file_that_hides_what_trains_is_known_without_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / stranger
    path.parent.mkdir(exist_ok=True)
    path.write_text("a = 1")
    spec, document = parse_with_positions(SPEC, "s.yaml")
    with pytest.raises(SpecError) as refused, document.attach_locations():
        TaskInspector(spec, ResourcePlan(1, 0, 1))
    assert str(refused.value) == (
        f"s.yaml:2:7: task.name: '{path}' hides the package 'trainable', which trains every trial; no file in the directory where a sweep starts may have that name; rename the file, or start from another directory"
    )


def test_40_another_copy_of_what_trains_is_no_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trainable").mkdir()
    shutil.copy(trainable.__file__, tmp_path / "trainable")
    monkeypatch.chdir(tmp_path)
    spec, _ = parse_with_positions(SPEC, "s.yaml")
    TaskInspector(spec, ResourcePlan(1, 0, 1)).terminate()


def test_40_a_task_that_is_not_built_in_is_known_without_a_child() -> None:
    spec, document = parse_with_positions(SPEC, "s.yaml", ["task=digit"])
    with pytest.raises(SpecError) as refused, document.attach_locations():
        TaskInspector(spec, ResourcePlan(1, 0, 1))
    assert str(refused.value) == (
        "-s task=digit: task.name: 'digit' is no built-in task (did you mean 'digits'?); built in are char_lm, digits, fashion_mnist, spiral; write one of these, or your own as package.module:ClassName"
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        pytest.param(
            "task: trainable.task:Task\n",
            "s.yaml:2:7: task: 'trainable.task:Task' could not be built (NotImplementedError: Task must define build_data()); its model and its data are built once before anything is created; correct the task or its arguments",
            id="41 a task that lacks a part",
        ),
        pytest.param(
            "task: {name: spiral, samples: 8}\nspace:\n  train.schedule.warmup: {int: [90, 100]}\n",
            "s.yaml:4:26: space.train.schedule.warmup: 90 steps of 10 steps in all; it must be shorter than the run; lower train.schedule.warmup or raise budget.epochs",
            id="26 a warmup that is searched",
        ),
        pytest.param(
            "task: {name: spiral, samples: 8}\nspace:\n  train.schedule.warmup: {int: [0, 100]}\n",
            "s.yaml:4:26: space.train.schedule.warmup: 100 steps of 10 steps in all; it must be shorter than the run; lower train.schedule.warmup or raise budget.epochs",
            id="26 the end of a warmup that is searched",
        ),
    ],
)
def test_what_a_child_refuses_has_the_place_of_its_key(lines: str, message: str) -> None:
    spec, document = parse_with_positions(SPEC.replace("task: digits\n", lines), "s.yaml")
    configs = spec.trial_config(0, spec.example_params()), longest_warmup(spec)
    answer = _answer(*(config.model_dump_json() for config in configs))
    with pytest.raises(SpecError) as refused, document.attach_locations():
        raise TaskRefused(spec, answer["key"], answer["refused"])
    assert str(refused.value) == message


def test_48_a_resume_of_something_else_shows_the_difference_and_names_the_flag() -> None:
    spec = parse_spec(SPEC, "s.yaml")
    other = with_overrides(spec, ["seed=1", "task=spiral"])
    with pytest.raises(OriginChanged) as refused:
        check_origin(Origin(), Origin(), spec, other, accepted=False)
    assert str(refused.value) == (
        "trials of this sweep were run with other code, data or keys: task.name digits -> spiral; seed 0 -> 1; trials before and after could not be compared; undo the change, or accept it with --accept-changes"
    )


def test_07_and_09_are_no_mistakes() -> None:
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
    44: "test_a_refused_connection_ends_the_run_before_anything_exists",
    45: "test_a_server_that_refuses_ends_the_run_before_anything_exists",
}


def test_each_of_the_sixty_kinds_is_held() -> None:
    kinds = {int(kind.split()[0]) for kind in KINDS.split("·")}
    assert kinds == set(range(1, 61))
    text = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    held = {int(number) for number in re.findall(r'\bid="(\d\d) ', text)}
    for numbers in re.findall(r"def test_((?:\d\d_(?:and_)?)+)", text):
        held |= {int(number) for number in re.findall(r"\d\d", numbers)}
    held |= {row for row, test in HELD_ELSEWHERE.items() if f"def {test}(" in text}
    assert held == kinds
