"""Sweeps of a function in this process: what is recorded, interrupted, resumed and refused."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from optuna.distributions import FloatDistribution, IntDistribution

from sweeps import Asked, SpecError, Sweep, SweepCommandError, UserError
from sweeps.api import command
from sweeps.errors import SearchChanged, SweepLockedError
from sweeps.run.doctor import check_sweeps
from sweeps.spec.space import Uniform
from tests.integration.commandline import wait_until
from tests.time_limits import scaled

LR = {"lr": {"uniform": [0.0, 1.0]}}
ASHA = {"scheduler": "asha", "grace_epochs": 1, "reduction": 2}
OF_REPORTS: dict[str, Any] = {
    "metric": "loss", "mode": "min", "budget": {"epochs": 4}, "early_stopping": ASHA,
}  # fmt: skip


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Sweep]:
    """Makes a sweep below a root of its own."""

    def build(objective: Any, space: Any = None, **keys: Any) -> Sweep:
        given = {"mode": "min", "trials": 3, "search": {"sampler": "random"}} | keys
        return Sweep(objective, space or LR, root=tmp_path / "runs", **given)

    return build


def square(lr: float) -> float:
    return (lr - 0.3) ** 2


def curve(lr: float) -> Iterator[dict[str, float]]:
    for epoch in range(4):
        yield {"loss": lr + 1 / (epoch + 1), "accuracy": lr}


def _table(sweep: Sweep) -> pd.DataFrame:
    """Return what a repeated run of a sweep must have in common with an undisturbed one."""
    frame = sweep.trials()
    times = ["started_at", "ended_at", "seconds", "attempts", "run_id"]
    return frame.drop(columns=times)


def test_function_that_returns_is_recorded_as_any_sweep(make: Callable[..., Sweep]) -> None:
    sweep = make(square).run()
    assert (sweep.name, sweep.status["state"]) == ("square", "finished")
    frame = sweep.trials()
    expected = [square(lr) for lr in frame["task.lr"]]
    assert frame["value"].tolist() == expected
    assert sweep.best.value == min(expected)
    assert square(**sweep.best.arguments) == sweep.best.value
    assert sweep.curves()["value"].tolist() == expected
    assert frame["attempts"].tolist() == [1, 1, 1]
    assert sweep.run().trials().equals(frame)  # nothing is left to do


def test_generator_is_stopped_by_the_rule_with_its_reason(make: Callable[..., Sweep]) -> None:
    sweep = make(curve, trials=6, **OF_REPORTS).run()
    frame = sweep.trials()
    assert set(frame["state"]) == {"complete", "pruned"}
    complete = frame[frame["state"] == "complete"]
    assert set(complete["epochs"]) == {4}
    assert (complete["loss"] == complete["task.lr"] + 0.25).all()
    pruned = frame[frame["state"] == "pruned"]
    assert (pruned["epochs"] < 4).all()
    assert pruned["reason"].str.match(r"asha at epoch [12]: loss [\d.]+, needed at most ").all()
    losses = sweep.curves("accuracy")
    assert len(losses) == frame["epochs"].sum()


def test_generator_may_end_before_its_budget_and_by_patience(make: Callable[..., Sweep]) -> None:
    def early(lr: float) -> Iterator[float]:
        yield from [1 + lr, lr, 2.0, 3.0]

    budget = {"epochs": 9}
    ended = make(early, trials=1, budget=budget).run().trial(0)
    assert (ended.state, ended.epochs, ended.value) == ("complete", 4, ended.arguments["lr"])
    stopping = {"scheduler": "none", "patience": 1}
    patient = make(early, name="p", trials=1, budget=budget, early_stopping=stopping).run()
    assert (patient.trial(0).state, patient.trial(0).epochs) == ("complete", 3)
    assert str(patient.trial(0).reason).startswith("patience at epoch 3")


SCRIPT = """
import os, signal, sys
from sweeps import Sweep

def train(lr, width):
    calls[0] += 1
    for epoch in range(4):
        if (calls[0], epoch) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        yield {"loss": lr + 1 / (epoch + 1) + width / 100}

kill_at, calls = eval(sys.argv[1]), [0]
Sweep(train, {"lr": {"uniform": [0, 1]}, "width": [1, 2, 3]}, metric="loss", mode="min", trials=7,
      budget={"epochs": 4}, search={"sampler": "tpe", "startup_trials": 2},
      early_stopping={"scheduler": "asha", "grace_epochs": 1, "reduction": 2}, root="runs").run()
heavy = {"ray", "torch", "mlflow"} & sys.modules.keys()
sys.exit(f"imported: {heavy}" if heavy else 0)
"""


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[[str, str], subprocess.CompletedProcess[str]]:
    """Runs the script in a directory, killed at a trial and an epoch."""

    def run(name: str, kill_at: str) -> subprocess.CompletedProcess[str]:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "script.py").write_text(SCRIPT)
        return subprocess.run(
            [sys.executable, "script.py", kill_at],
            cwd=directory,
            env={"PYTHONPATH": ":".join(sys.path), "PATH": "", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=scaled(120),
        )

    return run


def test_killed_script_runs_again_as_if_it_had_never_been_killed(
    run_script: Callable[[str, str], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    undisturbed = run_script("whole", "None")
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert "a task in a module of its own adds parallel trials" in undisturbed.stderr
    for kill_at in ("(1, 0)", "(1, 3)", "(3, 0)"):  # the first call is that of the killed trial
        assert run_script("cut", kill_at).returncode == -9
        cut = Sweep.open("train", root=tmp_path / "cut" / "runs")
        assert (cut.status["state"], cut.status["trials"]["waiting"] > 0) == ("interrupted", True)
    assert run_script("cut", "None").returncode == 0
    whole, cut = (Sweep.open("train", root=tmp_path / name / "runs") for name in ("whole", "cut"))
    pd.testing.assert_frame_equal(_table(cut), _table(whole))
    pd.testing.assert_frame_equal(cut.curves(), whole.curves())
    assert {"pruned", "complete"} == set(cut.trials()["state"])
    assert cut.trials()["attempts"].tolist()[:4] == [3, 1, 2, 1]


def test_ctrl_c_leaves_the_trial_to_the_next_run(make: Callable[..., Sweep]) -> None:
    seen: list[float] = []

    def train(lr: float) -> Iterator[float]:
        seen.append(lr)
        yield lr
        if len(seen) == 2:
            raise KeyboardInterrupt
        yield lr / 2

    sweep = make(train, budget={"epochs": 2})
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    assert sweep.status["state"] == "interrupted"
    assert sweep.trials()["epochs"].tolist() == [2, 0]
    again = make(train, budget={"epochs": 2}).run()
    assert seen[1] == seen[2]
    assert again.trials()["value"].tolist() == [lr / 2 for lr in (seen[0], *seen[2:])]
    assert again.trials()["attempts"].tolist() == [1, 2, 1]


def both(lr: float, warmup: float) -> float:
    return lr + warmup


def takes_more(lr: float, *, width: int = 3) -> float:
    return lr + width


async def later(lr: float) -> float:
    return lr


@pytest.mark.parametrize(
    ("objective", "space", "keys", "message"),
    [
        (both, LR, {}, "both takes lr and warmup, and space has no warmup; .* add warmup to the"),
        (square, LR | {"wd": [0, 1]}, {}, "space has wd, and square takes lr; .* rename one"),
        (square, {"train.lr": [0, 1]}, {}, "space has 'train.lr', which is no name of an argu"),
        (
            both,
            LR | {"warmup": {"uniform": [0, 1], "when": {"task.lr": 1}}},
            {},
            "warmup exists in some trials only .* give it a default, such as warmup=None",
        ),
        (later, LR, {}, "later is asynchronous; write it without async"),
        (curve, LR, {}, r"curve yields reports, and no budget .* write such as budget=\{'epochs'"),
        (square, LR, {"budget": {"epochs": 3}}, "square returns, and has one result, so that bud"),
        (square, LR, {"early_stopping": ASHA}, "so that early_stopping has no effect; leave it"),
        (square, LR, {"resources": {"gpu": 1}}, "resources has no effect on a function that runs"),
        (square, LR, {"task": "digits"}, "both a function and `task` are given"),
        (lambda lr: lr, LR, {}, "name: is missing"),
        (
            curve,
            LR,
            OF_REPORTS | {"early_stopping": {"scheduler": "asha_promote"}},
            "asha_promote, which pauses trials .* write asha, hyperband or median",
        ),
        (curve, LR, OF_REPORTS | {"early_stopping": ASHA | {"exempt": 0.5}}, "no exempt trials"),
        (square, {"lr": {"uniform": [1, 0]}}, {}, "low"),
        (square, LR, {"search": {"sampler": "grid"}}, "grid"),
        (takes_more, LR | {"width": [1, 2]}, {"search": {"try_first": [{"task.x": 1}]}}, "task.x"),
    ],
)
def test_wrong_call_creates_nothing(
    make: Callable[..., Sweep],
    tmp_path: Path,
    objective: Any,
    space: Any,
    keys: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises((UserError, SpecError), match=message):
        make(objective, space, **keys).run()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "train gave None as value; a report is a number, or a dict"),
        ("0.5", r"train gave .*\(str\) as value"),
        ({"loss": 1.0}, "train gave loss without value, which the sweep compares"),
    ],
)
def test_what_is_no_report_ends_the_run_and_its_trial_runs_again(
    make: Callable[..., Sweep], given: Any, message: str
) -> None:
    def train(lr: float) -> Any:  # noqa: ARG001
        return given

    with pytest.raises(UserError, match=message):
        make(train).run()
    assert Sweep.open("train", root=make(train).paths.root).trials()["state"].tolist() == [
        "waiting"
    ]

    def train(lr: float) -> Any:  # type: ignore[no-redef]  # the corrected function
        return lr

    again = make(train).run().trials()
    assert (again["state"].tolist(), again["attempts"].tolist()) == (["complete"] * 3, [2, 1, 1])


def test_value_that_is_not_finite_fails_its_trial_alone(make: Callable[..., Sweep]) -> None:
    numbers = iter(range(9))

    def train(lr: float) -> float:
        return lr if next(numbers) == 5 else math.nan

    frame = make(train, trials=6).run().trials()
    assert frame["state"].tolist() == ["failed"] * 5 + ["complete"]
    assert frame["reason"][:5].str.startswith("non_finite: value is nan in report 1").all()


def test_trials_that_end_are_named_where_no_terminal_shows_a_bar(
    make: Callable[..., Sweep], capsys: pytest.CaptureFixture[str]
) -> None:
    def train(lr: float) -> float:  # noqa: ARG001
        return 0.25

    make(train, trials=2).run()
    make(train, trials=3).run()
    lines = capsys.readouterr().err.splitlines()
    assert [one for one in lines if one.startswith("trial ")] == [
        *(f"trial {n} complete, best value 0.25 ({n + 1}/2 trials)" for n in range(2)),
        "trial 2 complete, best value 0.25 (3/3 trials)",
    ]


def test_function_that_fails_alike_three_times_stops_the_sweep(
    make: Callable[..., Sweep],
) -> None:
    def train(lr: float) -> float:  # noqa: ARG001
        raise ZeroDivisionError("no batches")

    with pytest.raises(ZeroDivisionError) as caught:
        make(train, trials=9).run()
    files = [frame.filename for frame in traceback.extract_tb(caught.tb)]
    assert [Path(file).name for file in files] == ["test_light.py", "sweep.py", "test_light.py"]
    assert caught.value.__context__ is None
    (note,) = caught.value.__notes__
    assert note.endswith("the sweep has stopped: correct the function, and run it again")
    assert note.startswith("trials 0, 1 and 2 failed in the same way: ZeroDivisionError: no batch")
    sweep = Sweep.open("train", root=make(train).paths.root)
    assert sweep.trials()["state"].tolist() == ["failed"] * 3
    assert sweep.trial(0).reason == "ZeroDivisionError: no batches"
    assert sweep.status["stopped_by"]["key"] == "failures.same_failure_limit"


def test_changed_function_is_refused_once_a_trial_has_a_result(
    make: Callable[..., Sweep], tmp_path: Path
) -> None:
    def train(lr: float) -> float:
        return lr

    make(train).run()
    before = sorted((tmp_path / "runs" / "train").rglob("*"))

    def train(lr: float) -> float:  # type: ignore[no-redef]
        return 2 * lr

    with pytest.raises(SearchChanged, match=r"the function has changed .* name='train_2'"):
        make(train, trials=4).run()
    assert sorted((tmp_path / "runs" / "train").rglob("*")) == before


def test_other_keys_are_refused_and_trials_are_added(make: Callable[..., Sweep]) -> None:
    first = make(square).run().trials()
    with pytest.raises(SearchChanged, match=r"mode: min -> max.*name='square_2'"):
        make(square, mode="max").run()
    more = make(square, trials=5).run().trials()
    assert len(more) == 5
    assert more[:3].equals(first)


def test_stop_criterion_ends_the_sweep(make: Callable[..., Sweep]) -> None:
    sweep = make(square, trials=50, stop={"value": 0.2}).run()
    assert sweep.best.value is not None
    assert sweep.best.value <= 0.2
    assert len(sweep.trials()) < 50
    assert sweep.status["stopped_by"]["key"] == "stop.value"


def test_defaults_of_the_function_are_the_first_point(make: Callable[..., Sweep]) -> None:
    def train(lr: float = 0.25, warmup: float = 0.5) -> float:
        return lr + warmup

    sweep = make(train, LR | {"warmup": {"uniform": [0.0, 1.0]}}, trials=2).run()
    assert sweep.trial(0).arguments == {"lr": 0.25, "warmup": 0.5}
    assert sweep.trial(1).arguments != {"lr": 0.25, "warmup": 0.5}


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (range(1, 9), "{int: [1, 8]}"),
        (range(8, 65, 8), "{int: [8, 64], step: 8}"),
        (["sgd", "adam"], "{choice: [sgd, adam]}"),
        ((0.1, 0.2), "{choice: [0.1, 0.2]}"),
        (Uniform(0.0, 1.0), "{uniform: [0.0, 1.0]}"),
        (FloatDistribution(0.1, 1, log=True), "{loguniform: [0.1, 1.0]}"),
        (FloatDistribution(0, 1, step=0.25), "{quniform: [0.0, 1.0, 0.25]}"),
        (IntDistribution(2, 8, step=2), "{int: [2, 8], step: 2}"),
        (IntDistribution(1, 8, log=True), "{logint: [1, 8]}"),
    ],
)
def test_python_objects_are_distributions(
    make: Callable[..., Sweep], value: Any, written: str
) -> None:
    assert f"task.lr: {written}\n" in make(square, {"lr": value}, trials=1).to_yaml()


def test_distribution_of_optuna_is_stored_as_it_is(make: Callable[..., Sweep]) -> None:
    sweep = make(square, {"lr": FloatDistribution(0.1, 1.0, log=True)}).run()
    (stored,) = {str(one.distributions["task.lr"]) for one in sweep.study.trials}
    assert stored == str(FloatDistribution(0.1, 1.0, log=True))


def test_asked_trials_are_told_once_each(make: Callable[..., Sweep]) -> None:
    sweep = make(None, name="by_hand", trials=4)
    first, second = sweep.ask(), sweep.ask()
    assert isinstance(first, Asked)
    assert isinstance(second, Asked)
    assert (first.number, second.number) == (0, 1)
    assert first.params != second.params
    assert list(first.params) == ["lr"]
    sweep.tell(second, 0.5)
    with pytest.raises(UserError, match="trial 1 is not running"):
        sweep.tell(second, 0.4)
    with pytest.raises(UserError, match="neither a result nor a failure for trial 0"):
        sweep.tell(first)
    with pytest.raises(UserError, match="the caller gave None as value"):
        sweep.tell(first, {"value": None})  # type: ignore[dict-item]
    sweep.tell(first.number, failure="out of memory")
    assert sweep.trials()["state"].tolist() == ["failed", "complete"]
    assert sweep.trial(0).reason == "error: out of memory"
    assert sweep.best.number == 1


def test_trial_that_was_never_told_is_asked_again_first(make: Callable[..., Sweep]) -> None:
    sweep = make(None, name="by_hand", trials=2)
    lost = sweep.ask()
    with pytest.raises(SweepLockedError, match="is already being run by process"):
        make(None, name="by_hand", trials=2).ask()
    del sweep  # as the end of its process does
    again = make(None, name="by_hand", trials=2)
    assert again.ask() == lost
    other = again.ask()
    assert other is not None
    assert again.ask() is None
    for one in (lost, other):
        assert one is not None
        again.tell(one, one.params["lr"])
    assert again.ask() is None
    assert again.status["state"] == "finished"


def test_sweep_with_a_task_has_nothing_to_ask(tmp_path: Path) -> None:
    sweep = Sweep(
        name="x", task="digits", metric="val/loss", mode="min", trials=1, root=tmp_path / "runs"
    )
    with pytest.raises(UserError, match="has a task, whose trials run"):
        sweep.ask()


@pytest.mark.integration
def test_doctor_finds_no_fault_in_what_only_sync_would_record(make: Callable[..., Sweep]) -> None:
    sweep = make(square).run()
    assert not list(check_sweeps(sweep.paths.root))


def test_command_that_needs_the_function_names_the_script(
    make: Callable[..., Sweep], capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = make(square).run()
    with pytest.raises(SweepCommandError) as caught:
        sweep.resume({"trials": 9})
    assert caught.value.exit_code == 2
    assert "'square' is a function of a script or a notebook" in capfd.readouterr().err
    assert len(sweep.trials()) == 3
    offered = {card["command"] for card in sweep.audit()["cards"]}
    assert offered == {None}  # without a function the card of the noise offers a command


_DRAINS = """
import signal, sys, time
def drain(*_):
    time.sleep(0.2)
    sys.exit(130)
signal.signal(signal.SIGINT, drain)
open(sys.argv[1], "w").close()
time.sleep(60)
"""


def test_an_interrupt_while_it_looks_lets_the_command_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_SECONDS_BETWEEN_LOOKS", 0.01)
    ready = tmp_path / "ready"
    child = subprocess.Popen([sys.executable, "-c", _DRAINS, str(ready)])
    wait_until(ready.exists)
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise KeyboardInterrupt

    code = command._wait(child, look, lambda: child.send_signal(signal.SIGINT))
    assert code == 128 + signal.SIGINT
