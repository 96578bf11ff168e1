"""The Python API as a caller sees it: `make check` reads this file with mypy --strict.

A type that changes, or a public name that is missing here, fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_type

import sweeps
from sweeps import Asked, Comparison, Figures, Sweep, SweepCommandError, Trial, compare

if TYPE_CHECKING:
    import optuna
    import pandas as pd
    import plotly.graph_objects as go
    from torch import nn

    from trainable import Task


def _write(root: Path) -> None:
    space = {"train.optimizer.lr": {"loguniform": [1e-4, 1e-1]}}
    sweep = Sweep(
        name="a", task="digits", metric="val/loss", mode="min", trials=8, space=space, root=root
    )
    assert_type(sweep, Sweep)
    assert_type(Sweep.from_file("sweep.yaml", {"trials": 8}, root="runs"), Sweep)
    assert_type(Sweep.open("a", root=root), Sweep)
    assert_type(sweep.name, str)
    assert_type(sweep.to_yaml(), str)
    assert_type(sweep.run(offline=True), Sweep)
    assert_type(sweep.resume({"trials": 9}, finish=[3], accept_changes=True), Sweep)
    assert_type(sweep.retry([3], fresh=True, overrides={"trials": 9}), Sweep)
    assert_type(sweep.confirm(top=3, seeds=4, until=0.9), dict[str, Any])
    assert_type(sweep.check(thorough=True), dict[str, Any])
    assert_type(sweep.check(hours=8.0, thorough=True), dict[str, Any])
    sweep.stop()


def _train(lr: float) -> float:
    return lr


def _yield(lr: float) -> Iterator[dict[str, float]]:
    yield {"loss": lr}


def _call(root: Path) -> None:
    sweep = Sweep(_train, {"lr": [0.1, 0.2]}, mode="min", trials=8, root=root)
    Sweep(_yield, {"lr": range(3)}, metric="loss", mode="min", trials=8, budget={"epochs": 3})
    asked = sweep.ask()
    assert_type(asked, Asked | None)
    if asked is not None:
        assert_type(asked.number, int)
        assert_type(asked.params, dict[str, Any])
        sweep.tell(asked, 0.5)
        sweep.tell(asked.number, failure="out of memory")


def _read(sweep: Sweep) -> None:
    assert_type(sweep.status, dict[str, Any])
    assert_type(sweep.audit(), dict[str, Any])
    table: pd.DataFrame = sweep.trials()
    curves: pd.DataFrame = sweep.curves("val/loss", "train/grad_norm")
    study: optuna.Study = sweep.study
    assert_type(sweep.best, Trial)
    assert_type(sweep.best_confirmed, Trial)
    assert_type(sweep.confirmation, dict[str, Any] | None)
    assert_type(sweep.front, list[Trial])
    assert_type(sweep.trial(3), Trial)
    assert_type(sweep.figures, Figures)
    assert_type(sweep.findings, list[str])
    assert_type(sweep.report("report.html"), Path)
    assert_type(sweep.compare(sweep, top=3), Comparison)
    assert_type(sweep.export("tables", kind="parquet"), list[Path])
    del table, curves, study


def _read_trial(trial: Trial) -> None:
    assert_type(trial.number, int)
    assert_type(trial.state, str)
    assert_type(trial.params, dict[str, Any])
    assert_type(trial.value, float | None)
    assert_type(trial.epochs, int)
    assert_type(trial.reason, str | None)
    assert_type(trial.directory, Path)
    assert_type(trial.run_id, str | None)
    assert_type(trial.metrics, dict[str, float])
    assert_type(trial.config, dict[str, Any])
    assert_type(trial.arguments, dict[str, Any])
    assert_type(trial.checkpoint, str)
    curve: pd.Series[float] = trial.curve("val/loss")
    model: nn.Module = trial.load_model()
    task: Task = trial.load_task()
    assert_type(trial.test(), dict[str, float])
    assert_type(trial.export("best"), list[Path])
    del curve, model, task


def _draw(figures: Figures) -> list[go.Figure]:
    return [
        *(figures.history(), figures.curves(), figures.importance(), figures.slices()),
        *(figures.parallel(), figures.contours(), figures.survival(), figures.clipping()),
        *(figures.timeline(), figures.pareto()),
    ]


def _compare(first: Sweep, second: Sweep) -> None:
    found = compare(first, second, top=3)
    assert_type(found, Comparison)
    leaders: pd.DataFrame = found.leaders
    assert_type(found.same, dict[str, Any])
    del leaders


def _fail(error: SweepCommandError) -> None:
    assert_type(error.exit_code, int)


def test_every_public_name_is_typed_here() -> None:
    text = Path(__file__).read_text()
    for name in sweeps.__all__:
        public = getattr(sweeps, name)
        if not isinstance(public, type) or not issubclass(public, BaseException):
            assert name in text
            for member in vars(public):
                assert member.startswith("_") or f".{member}" in text, f"{name}.{member}"


def test_every_public_name_has_an_example() -> None:
    """`test_python_api.py` runs them; figures have one of the class."""
    for public in (getattr(sweeps, name) for name in sweeps.__all__):
        if isinstance(public, type) and issubclass(public, BaseException):
            continue
        members = {} if public is Figures or public is Comparison else dict(vars(public))
        named = [public, *(one for name, one in members.items() if not name.startswith("_"))]
        for one in named:
            kind = isinstance(one, type | property | classmethod) or inspect.isfunction(one)
            if kind and one not in (Comparison, Sweep.name, Sweep.figures):
                assert ">>> " in (inspect.getdoc(one) or ""), one
