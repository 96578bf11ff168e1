"""What Optuna's study holds after the same sweep by Ray's OptunaSearch and by ours.

Five trials, one after the other, under ASHA. Their loss grows from the second epoch on, and one
trial's is NaN. Both sides try the same points, so ASHA stops the same trials at the same epochs.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import FloatDistribution

from sweeps.search.samplers import Samplers
from sweeps.spec.spec import parse_spec
from tests.integration.commandline import CommandLine
from tests.time_limits import scaled

SEED, TRIALS, EPOCHS = 4, 5, 4
CURVE = f"""
def loss(x, epoch):
    return float("nan") if x > 0.8 else x + 0.4 * (epoch - 1)

def run(config, context):
    for epoch in context.remaining_epochs():
        yield {{"val/loss": loss(config.task.x, epoch + 1)}}

def stock(config):
    from ray import tune
    for epoch in range(1, {EPOCHS} + 1):
        tune.report({{"val/loss": loss(config["x"], epoch)}})
"""
OURS = f"""
name: ours
task: {{name: "curve:run", x: 0.5}}
metric: val/loss
mode: min
trials: {TRIALS}
seed: {SEED}
concurrency: 1
budget: {{epochs: {EPOCHS}}}
space: {{task.x: {{uniform: [0, 1]}}}}
search: {{sampler: random, try_first: []}}
early_stopping: {{scheduler: asha, grace_epochs: 1, reduction: 2}}
"""
STOCK = f"""
import json, logging, sys, tempfile
import curve, optuna, ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

points, scratch = json.loads(sys.argv[1]), sys.argv[2]
short = tempfile.TemporaryDirectory(prefix="stock-", dir="/tmp", ignore_cleanup_errors=True)
ray.init(num_cpus=1, include_dashboard=False, logging_level=logging.ERROR, _temp_dir=short.name,
         object_store_memory=100 * 2**20, _node_ip_address="127.0.0.1")
storage = optuna.storages.InMemoryStorage()
aim = {{"metric": "val/loss", "mode": "min"}}
search = OptunaSearch(
    {{"x": optuna.distributions.FloatDistribution(0, 1)}}, **aim,
    points_to_evaluate=[{{"x": x}} for x in points], study_name="stock", storage=storage,
)
tune.Tuner(
    tune.with_resources(curve.stock, {{"cpu": 1}}),
    tune_config=tune.TuneConfig(
        search_alg=search, num_samples={TRIALS}, max_concurrent_trials=1, reuse_actors=True,
        scheduler=ASHAScheduler(**aim, max_t={EPOCHS}, grace_period=1, reduction_factor=2),
    ),
    run_config=tune.RunConfig(storage_path=scratch, verbose=0),
).fit()
study = optuna.load_study(study_name="stock", storage=storage)
ray.shutdown()
told = [[t.state.name, t.value, len(t.intermediate_values)] for t in study.trials]
print(json.dumps({{"told": told, "best": [study.best_trial.number, study.best_value]}}))
"""


def _points() -> list[float]:
    """What our search draws for these trials, whatever becomes of them."""
    found, samplers = [], Samplers(parse_spec(OURS, "ours.yaml"))
    for number in range(TRIALS):
        sampler = samplers.of(number)
        trial = optuna.create_study(sampler=sampler).ask({"x": FloatDistribution(0, 1)})
        found.append(float(trial.params["x"]))
    return found


def _stock(cli: CommandLine, points: list[float]) -> subprocess.Popen[str]:
    settings = {
        "PYTHONPATH": str(cli.directory),
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-c", STOCK, json.dumps(points), str(cli.directory / "stock")],
        env={**cli.environment, **settings},
        cwd=cli.directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def both(module_cli: CommandLine) -> tuple[dict[str, Any], optuna.Study, list[float]]:
    """What the stock search told, our study, and the points; both ran at the same time."""
    points = _points()
    module_cli.write("curve.py", CURVE)
    module_cli.write("ours.yaml", OURS)
    with _stock(module_cli, points) as stock:
        try:
            module_cli.ok("run", "ours.yaml")
            printed, complaints = stock.communicate(timeout=scaled(120))
        finally:
            stock.kill()
    assert stock.returncode == 0, complaints
    ledger = Path(module_cli.root, "ours", "ledger.db")
    study = optuna.load_study(storage=f"sqlite:///{ledger}", study_name="sweep")
    return json.loads(printed.splitlines()[-1]), study, points


@pytest.mark.chaos
def test_ray_optuna_search_records_stopped_as_complete(
    both: tuple[dict[str, Any], optuna.Study, list[float]],
) -> None:
    stock, _, points = both
    assert [state for state, _, _ in stock["told"]] == ["COMPLETE"] * 4 + ["RUNNING"]
    # Of the four, three were stopped: after one epoch, one and two. Each is told by its last loss,
    # as if that were final.
    last = [points[0] + 1.2, points[1], points[2], points[3] + 0.4]
    assert [value for _, value, _ in stock["told"]] == [*map(pytest.approx, last), None]
    # So the study believes in a trial that nobody let train.
    assert stock["best"] == [2, pytest.approx(points[2])]


@pytest.mark.chaos
def test_ours_records_how_each_trial_ended(
    both: tuple[dict[str, Any], optuna.Study, list[float]],
) -> None:
    _, study, points = both
    assert [trial.params["task.x"] for trial in study.trials] == points
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "PRUNED", "PRUNED", "PRUNED", "FAIL"]
    curves = [list(trial.intermediate_values.values()) for trial in study.trials]
    assert [len(curve) for curve in curves] == [4, 1, 1, 2, 0]
    assert not any(math.isnan(value) for curve in curves for value in curve)
    assert "non_finite: val/loss is nan" in study.trials[4].user_attrs["reason"]
    assert (study.best_trial.number, study.best_value) == (0, pytest.approx(points[0]))
