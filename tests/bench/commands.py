"""P11: how long the commands that only look take."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.ray_results import write_experiment
from tests.bench.table import Goal, Result, Sample, interleave, size

_SWEEP = Path(sys.executable).with_name("sweep")
_DIGITS = Path(__file__).parents[2] / "sweeps" / "examples" / "digits.yaml"
_TRIALS, _EPOCHS, _STEPS = 1000, 10, 1000
_SMOKE_TRIALS, _LEADERS = 20, 5
_METRICS = (
    "train/loss",
    "train/lr",
    "train/grad_norm",
    "train/clip_fraction",
    "train/samples_per_second",
    "memory/process_mb",
    "val/loss",
    "val/accuracy",
    "epoch",
)
_TAGS = (
    *(f"gradsweep.{name}" for name in ("attempts", "code", "command", "data", "device", "role")),
    *(f"gradsweep.{name}" for name in ("precision", "sweep_id", "trial")),
    *("best_epoch", "best_step", "figures", "stopped_by", "mlflow.parentRunId"),
)
_ROWS = {"status": "P11", "trials": "P10", "compare": "P10"}

_REFUSED = {
    "26": ["space.train.schedule.warmup={int: [90000, 100000]}"],
    "40": ["task=trainable.tasks.spiral:Spirale"],
    "41": ["task=pathlib:Path"],
    "42": ["task.name=fashion_mnist", "task.download=false", "task.data_dir=nowhere"],
}
"""By number, what only a task's own process finds, as settings of the digits sweep."""

_SPEC = """
name: large
task: digits
metric: val/loss
mode: min
space:
  train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}
  train.schedule.warmup: {uniform: [0.0, 0.3]}
  train.clip.max_norm: {loguniform: [0.1, 10]}
"""


def help_page(repeats: int) -> list[Result]:
    """`sweep --help` against an interpreter that does nothing."""
    return _within(0.5, "P11 sweep --help", lambda: _wall([str(_SWEEP), "--help"]), repeats)


def looking(repeats: int) -> list[Result]:
    """`sweep status`, `trials` and `compare` on a thousand trials of a thousand points each."""
    with tempfile.TemporaryDirectory() as directory:
        trials = write_large_sweep(Path(directory))
        results = []
        for command in ("status", "trials", "compare"):
            line = [str(_SWEEP), command, "large", "--root", directory]
            row = f"{_ROWS[command]} sweep {command}, {trials} trials"
            results += _within(1.0, row, partial(_wall, line), repeats)
        return results


def refusals(repeats: int) -> list[Result]:
    """How soon `sweep run` says what is wrong, where it has to build the task for that."""
    results = []
    for number, settings in _REFUSED.items():
        words = [word for setting in settings for word in ("-s", setting)]
        row = f"bad input {number}, sweep run"
        results += _within(5.0, row, partial(_refused, words), repeats)
    return results


def against_mlflow(repeats: int) -> list[Result]:
    """What `sweep trials` and `sweep compare` show against `mlflow.search_runs` on the same runs,
    without what either imports, and without drawing: all of them, with `--json` their verified
    checkpoints too, and for `compare` the leaders alone. Then DataFrames of the same trials. The
    runs carry what the recorder gives each trial: that many parameters, tags and metrics.
    """
    import json

    import mlflow
    import optuna
    from mlflow.entities import Metric, Param

    from sweeps import Sweep
    from sweeps.paths import SweepPaths
    from sweeps.view.compare import compare, resolved
    from sweeps.view.sweep_view import SweepView

    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        trials = write_large_sweep(root)
        paths = SweepPaths(root, "large")
        uri = f"sqlite:///{root / 'mlflow.db'}"
        mlflow.set_tracking_uri(uri)
        client = mlflow.MlflowClient(uri)
        experiment = client.create_experiment("large", (root / "artifacts").as_uri())
        view = SweepView(paths)
        for record in view.records:
            tags = {tag: f"{tag} of {record.number}" for tag in _TAGS}
            run = client.create_run(experiment, tags=tags)
            points = [
                Metric(name, 1 / step, step, step)
                for name in _METRICS
                for step in range(1, _STEPS + 1, len(_METRICS))
            ]
            assert record.value is not None
            points.append(Metric("best/val/loss", record.value, _STEPS, _STEPS))
            searched = {f"space.{key}": value for key, value in record.params.items()}
            values = searched | resolved(view, record)
            params = [Param(key, str(value)) for key, value in values.items()]
            client.log_batch(run.info.run_id, points[:_STEPS], params)
            client.log_batch(run.info.run_id, points[_STEPS:])

        def listed() -> float:
            started = time.perf_counter()
            assert len(SweepView(paths).rows()) == trials
            return time.perf_counter() - started

        def verified() -> float:
            started = time.perf_counter()
            printed = json.dumps(SweepView(paths).trials())
            assert printed.count('"number"') == trials
            return time.perf_counter() - started

        def compared() -> float:
            started = time.perf_counter()
            printed = json.dumps(compare([SweepView(paths)], top=_LEADERS))
            assert printed.count('"number"') == _LEADERS
            return time.perf_counter() - started

        def found(count: int, order: list[str] | None = None) -> float:
            started = time.perf_counter()
            runs = mlflow.search_runs([experiment], max_results=count, order_by=order)
            assert len(runs) == count
            return time.perf_counter() - started

        def framed() -> float:
            started = time.perf_counter()
            assert len(Sweep.open("large", root=root).trials()) == trials
            return time.perf_counter() - started

        def drawn() -> float:
            started = time.perf_counter()
            curves = Sweep.open("large", root=root).curves("train/loss", "val/loss")
            assert curves["trial"].nunique() == trials
            return time.perf_counter() - started

        def optunas() -> float:
            started = time.perf_counter()
            study = optuna.load_study(storage=f"sqlite:///{paths.ledger}", study_name="sweep")
            assert len(study.trials_dataframe()) == trials
            return time.perf_counter() - started

        configs = [record.params for record in view.records]
        open_results = write_experiment(root / "ray", configs, _STEPS)

        def rays() -> float:
            started = time.perf_counter()
            assert open_results() == trials
            return time.perf_counter() - started

        peers: dict[str, Sample] = {"mlflow.search_runs": lambda: found(trials)}
        frames = peers | {"study.trials_dataframe": optunas}
        best = ["metrics.`best/val/loss` ASC"]
        leaders: dict[str, Sample] = {"the same, leaders alone": lambda: found(_LEADERS, best)}
        results = []
        for row, ours, against in (
            (f"P10 all of {trials} trials", listed, peers),
            (f"P10 all of {trials} trials, --json", verified, peers),
            (f"P10 {_LEADERS} leaders of {trials} trials", compared, peers | leaders),
        ):
            results += interleave(
                row,
                ours,
                against,
                unit="s",
                goals={"mlflow.search_runs": Goal("ratio", 1 / 20)},
                repeats=repeats,
            )
        for row, ours, against, most in (
            ("trials()", framed, frames | {"ResultGrid.get_dataframe": rays}, 1.0),
            ("curves() of two", drawn, frames, 3.0),
        ):
            goals = dict.fromkeys(against, Goal("ours", most))
            results += interleave(
                f"P10 Sweep.open, {row}", ours, against, unit="s", goals=goals, repeats=repeats
            )
        return results


def _within(seconds: float, row: str, ours: Sample, repeats: int) -> list[Result]:
    """A command against an interpreter that does nothing, with a limit of its own."""
    return interleave(
        row,
        ours,
        {"python -c pass": lambda: _wall([sys.executable, "-c", "pass"])},
        unit="s",
        goals={"python -c pass": Goal("ours", seconds)},
        repeats=repeats,
    )


def _wall(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def _refused(words: list[str]) -> float:
    with tempfile.TemporaryDirectory() as root:
        started = time.perf_counter()
        done = subprocess.run(
            [str(_SWEEP), "run", str(_DIGITS), "--root", root, *words],
            check=False,
            stderr=subprocess.PIPE,
            text=True,
        )
        taken = time.perf_counter() - started
        assert done.returncode == 2, done.stderr
        assert os.listdir(root) == []
    return taken


def write_large_sweep(root: Path) -> int:
    """A finished sweep: half of its trials pruned on their third epoch, the others complete, each
    with a checkpoint and a curve. Returns how many there are.
    """
    import numpy
    import optuna

    from sweeps.ledger.ledger import Ledger
    from sweeps.paths import SweepPaths
    from sweeps.spec.revisions import write_spec
    from sweeps.spec.spec import load_with_positions

    file = root / "large.yaml"
    num_trials = size(_TRIALS, _SMOKE_TRIALS)
    file.write_text(f"{_SPEC}trials: {num_trials}\nbudget: {{epochs: {_EPOCHS}}}\n")
    spec = load_with_positions(file)[0]
    paths = SweepPaths(root, spec.name)
    paths.directory.mkdir()
    write_spec(paths.spec, spec)
    ledger = Ledger.create(paths.ledger, mode=spec.mode, sweep_id="bench")
    space: dict[str, Any] = {key: value.to_optuna() for key, value in spec.space.items()}
    draw = numpy.random.default_rng(0)
    trials, progress = [], {"step": _STEPS, "best_step": _STEPS, "best_epoch": 3}
    for number in range(num_trials):
        epochs = 3 if number % 2 else _EPOCHS
        values = {epoch: float(draw.uniform(0, 2)) for epoch in range(1, epochs + 1)}
        pruned = epochs < _EPOCHS
        trials.append(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.PRUNED
                if pruned
                else optuna.trial.TrialState.COMPLETE,
                value=None if pruned else min(values.values()),
                params={key: float(draw.uniform(d.low, d.high)) for key, d in space.items()},
                distributions=space,
                intermediate_values=values,
                user_attrs={"attempts": 1, "progress": progress | {"epoch": epochs}},
            )
        )
    storage = f"sqlite:///{ledger.location}"
    optuna.load_study(storage=storage, study_name="sweep").add_trials(trials)
    for number in range(num_trials):
        _write_files(paths.trial(number), paths.trial(0))
    return num_trials


def _write_files(trial: Path, first: Path) -> None:
    """A checkpoint and a curve; all are one file, so that writing them is quick."""
    from tests.curves import append_rows
    from trainable.store.generations import MANIFEST, STATE
    from trainable.store.manifest import Generation, format_manifest
    from trainable.store.metrics_file import FILE_NAME, Row

    saved = f"checkpoints/step-{_STEPS:08d}"
    (trial / saved).mkdir(parents=True)
    if trial != first:
        for name in (FILE_NAME, f"{saved}/{STATE}", f"{saved}/{MANIFEST}"):
            os.link(first / name, trial / name)
        return
    (trial / saved / STATE).write_bytes(b"")
    generation = Generation(str(trial), 1, _STEPS, _EPOCHS, "val/loss", "min", 0.5, 0, "")
    (trial / saved / MANIFEST).write_bytes(format_manifest(generation))
    rows = [
        Row(step, step, {"train/loss": 1 / step, "train/lr": 0.1, "train/grad_norm": 1.0})
        for step in range(1, _STEPS)
    ]
    last = {"val/loss": 0.5, "train/clip_fraction": 0.25, "epoch": float(_EPOCHS)}
    append_rows(trial, [*rows, Row(_STEPS, _STEPS, last)])
