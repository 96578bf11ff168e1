"""A sweep file of W&B, Optuna or Ray Tune is answered with an equivalent and valid spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.errors import SpecError
from sweeps.spec.foreign_space import translate_distribution
from sweeps.spec.foreign_specs import recognise
from sweeps.spec.spec import SweepSpec, parse_spec

WANDB = """
program: ./src/train.py
method: bayes
name: first try!
metric: {name: val_loss, goal: maximize, target: 0.05}
run_cap: 50
parameters:
  lr: {distribution: log_uniform_values, min: 1e-4, max: 1e-1}
  batch_size: {values: [32, 64]}
  optimizer: {values: [Adam, SGD]}
  epochs: {value: 20}
  seed: {value: 3}
  weight_decay: {value: 0.1}
  dropout: {min: 0.0, max: 0.5}
  width: {distribution: q_uniform, min: 16, max: 250, q: 16}
  activation: {value: relu}
  model:
    parameters:
      depth: {min: 1, max: 4}
early_terminate: {type: hyperband, min_iter: 3, eta: 2}
command: [python]
"""
RAY = """
param_space:
  lr: tune.loguniform(1e-4, 1e-1)
  batch_size: "tune.choice([32, 64])"
  train_loop_config: {depth: "tune.randint(1, 5)"}
  wd: 0.1
  odd: "tune.sample_from(lambda spec: 1)"
tune_config:
  metric: loss
  mode: max
  num_samples: 24
  max_concurrent_trials: 2
  time_budget_s: 5400
  scheduler: ASHAScheduler(grace_period=2, reduction_factor=4)
  search_alg: OptunaSearch()
"""
HYDRA = """
hydra:
  sweeper:
    _target_: hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper
    sampler: {_target_: optuna.samplers.TPESampler, seed: 7, n_startup_trials: 5}
    direction: maximize
    study_name: mnist
    n_trials: 30
    n_jobs: 2
    params:
      optimizer.name: choice(adam, sgd)
      optimizer.lr: tag(log, interval(1e-4, 1e-1))
      model.width: range(16, 256, step=16)
"""
OPTUNA = """
directions: [minimize, maximize]
n_trials: 10
sampler: RandomSampler
pruner: {type: MedianPruner, n_startup_trials: 4, n_warmup_steps: 2}
search_space:
  lr: {type: float, low: 1e-4, high: 0.1, log: true}
  layers: {type: int, low: 1, high: 4}
"""
LR = "train.optimizer.lr"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _equivalent(text: str) -> tuple[str, SweepSpec]:
    """The message about a file, and the spec that it shows, as the user would save it."""
    Path("theirs.yaml").write_text(text)
    done = CliRunner().invoke(app, ["check", "theirs.yaml"])
    assert (done.exit_code, done.stdout) == (2, "")
    head, spec, *_ = done.stderr.split("\n\n")
    assert head.startswith("theirs.yaml: is a sweep of ")
    return done.stderr, parse_spec(spec, "ours.yaml")


@pytest.mark.usefixtures("here")
def test_file_of_wandb_is_translated() -> None:
    message, spec = _equivalent(WANDB)
    assert (spec.name, spec.task.name, spec.metric, spec.mode) == (
        "first_try", "src.train:run", "val_loss", "max"
    )  # fmt: skip
    assert (spec.trials, spec.seed, spec.budget.epochs) == (50, 3, 20)
    assert {key: one.to_data() for key, one in spec.space.items()} == {
        LR: {"loguniform": [1e-4, 0.1]},
        "train.batch_size": {"choice": [32, 64]},
        "train.optimizer.name": {"choice": ["adam", "sgd"]},
        "task.dropout": {"uniform": [0.0, 0.5]},
        "task.width": {"int": [16, 240], "step": 16},
        "task.model_depth": {"int": [1, 4]},
    }
    assert spec.task.model_dump()["activation"] == "relu"
    assert spec.train.optimizer.weight_decay == 0.1
    assert spec.search.sampler == "tpe"
    assert spec.early_stopping.model_dump()["scheduler"] == "asha"
    assert (spec.early_stopping.rule.grace_epochs, spec.early_stopping.rule.reduction) == (3, 2)
    assert spec.stop.value == 0.05
    assert "save it as first_try.yaml, then: sweep check first_try.yaml" in message
    assert "command: has no equivalent" in message


@pytest.mark.usefixtures("here")
def test_file_of_ray_tune_is_translated() -> None:
    message, spec = _equivalent(RAY)
    assert (spec.metric, spec.mode, spec.trials) == ("loss", "max", 24)
    assert (spec.concurrency, spec.stop.hours) == (2, 1.5)
    assert {key: one.to_data() for key, one in spec.space.items()} == {
        LR: {"loguniform": [1e-4, 0.1]},
        "train.batch_size": {"choice": [32, 64]},
        "task.depth": {"int": [1, 4]},  # Ray Tune leaves the end out
    }
    assert spec.train.optimizer.weight_decay == 0.1
    assert spec.search.sampler == "tpe"
    assert (spec.early_stopping.rule.grace_epochs, spec.early_stopping.rule.reduction) == (2, 4)
    assert "task.odd: a function" in message
    assert "task: name your training code" in message


@pytest.mark.usefixtures("here")
def test_file_of_optuna_is_translated() -> None:
    _, spec = _equivalent(HYDRA)
    assert (spec.name, spec.mode, spec.trials) == ("mnist", "max", 30)
    assert (spec.seed, spec.concurrency) == (7, 2)
    assert {key: one.to_data() for key, one in spec.space.items()} == {
        "train.optimizer.name": {"choice": ["adam", "sgd"]},
        LR: {"loguniform": [1e-4, 0.1]},
        "task.model_width": {"int": [16, 256], "step": 16},
    }
    assert (spec.search.sampler, spec.search.startup_trials) == ("tpe", 5)
    without_pruner = "\n".join(x for x in OPTUNA.splitlines() if not x.startswith("pruner"))
    message, spec = _equivalent(without_pruner)
    assert "metric: name the metrics in the order of the directions" in message
    assert (spec.modes, len(spec.metrics)) == (("min", "max"), 2)
    assert spec.search.sampler == "random"
    assert list(spec.space) == [LR, "task.layers"]


def test_stopping_rule_of_optuna_is_translated() -> None:
    text = OPTUNA.replace("directions: [minimize, maximize]", "direction: minimize")
    found = recognise(YAML(typ="safe").load(text))
    assert found is not None
    rule = parse_spec(found.to_yaml(), "ours.yaml").early_stopping
    assert (rule.scheduler, rule.rule.grace_epochs, rule.rule.min_trials) == ("median", 2, 4)


@pytest.mark.parametrize(
    ("data", "trials"),
    [
        ({"method": "grid", "parameters": {"lr": {"values": [1, 2]}, "x": {"values": [3, 4]}}}, 4),
        ({"param_space": {"lr": {"grid_search": [0.1, 0.2, 0.3]}}}, 3),
    ],
)
def test_grid_has_a_trial_for_each_point(data: dict[str, Any], trials: int) -> None:
    found = recognise(data)
    assert found is not None
    spec = parse_spec(found.to_yaml(), "ours.yaml")
    assert (spec.search.sampler, spec.trials) == ("grid", trials)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"min": 1, "max": 4}, {"int": [1, 4]}),
        ({"min": 1, "max": 4.5}, {"uniform": [1, 4.5]}),
        ({"distribution": "int_uniform", "min": 1, "max": 4}, {"int": [1, 4]}),
        ({"distribution": "log_uniform", "min": -2, "max": 0}, {"loguniform": [0.135335, 1.0]}),
        (
            {"distribution": "q_log_uniform_values", "min": 16, "max": 99, "q": 1},
            {"logint": [16, 99]},
        ),
        ({"distribution": "normal", "mu": 1, "sigma": 0.5}, {"uniform": [-0.5, 2.5]}),
        ("tune.quniform(0, 1, 0.3)", {"quniform": [0, 0.9, 0.3]}),
        ("ray.tune.lograndint(1, 1000)", {"logint": [1, 999]}),
        ("tune.qrandint(16, 256, 16)", {"int": [16, 256], "step": 16}),
        ("tune.uniform(lower=0, upper=1)", {"uniform": [0, 1]}),
        ('trial.suggest_float("lr", 1e-4, 0.1, log=True)', {"loguniform": [1e-4, 0.1]}),
        ('trial.suggest_float("x", 0, 1, step=0.1)', {"quniform": [0.0, 1.0, 0.1]}),
        ('trial.suggest_int("n", 1, 1000, log=True)', {"logint": [1, 1000]}),
        ('trial.suggest_categorical("o", ["a", "b"])', {"choice": ["a", "b"]}),
        ("FloatDistribution(high=0.1, log=True, low=1e-4)", {"loguniform": [1e-4, 0.1]}),
        ({"name": "IntDistribution", "attributes": {"low": 1, "high": 4}}, {"int": [1, 4]}),
        ({"type": "categorical", "choices": [1, 2]}, {"choice": [1, 2]}),
    ],
    ids=str,
)
def test_distribution_is_translated(theirs: object, ours: dict[str, Any]) -> None:
    found = translate_distribution(theirs)
    assert found is not None
    assert found.data == ours


@pytest.mark.parametrize(
    "text", ["__import__('os').mkdir('made')", "tune.choice(open('made', 'w'))", "uniform(" * 3000]
)
def test_text_is_never_evaluated(here: Path, text: str) -> None:
    translate_distribution(text)
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    "theirs", ["tune.loguniform(1e-4, 1e-1)", "{min: 0.0001, max: 0.1}", "{value: 3}"]
)
def test_single_foreign_distribution_names_ours(theirs: str) -> None:
    text = (
        "name: x\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 2\n"
        f"space: {{{LR}: {theirs!r}}}\n".replace("'{", "{").replace("}'", "}")
    )
    with pytest.raises(SpecError) as refused:
        parse_spec(text, "ours.yaml")
    (message,) = str(refused.value).splitlines()
    assert message.startswith(f"ours.yaml:6:{message.split(':')[2]}: space.{LR}: ")
    expected = {"t": "{loguniform: [0.0001, 0.1]}", "{m": "{uniform: [0.0001, 0.1]}"}
    assert (
        f"write {expected.get(theirs[:1], expected.get(theirs[:2], '3 outside of `space`'))}"
        in message
    )


@pytest.mark.parametrize(
    "text",
    [
        "name: x\ntrials: 2\n",
        "method: bayes\n",
        "config: {lr: 0.1}\n",
        "hydra: 3\n",
        "params: {a: 1}\n",
    ],
)
@pytest.mark.usefixtures("here")
def test_other_files_keep_their_messages(text: str) -> None:
    Path("s.yaml").write_text(text)
    done = CliRunner().invoke(app, ["check", "s.yaml"])
    assert done.exit_code == 2
    assert "task: " in done.stderr
    assert "is a sweep of" not in done.stderr


@pytest.mark.usefixtures("here")
def test_secret_in_a_file_is_not_shown() -> None:
    text = "method: random\nparameters:\n  api_key: {value: hunter2hunter2}\n"
    Path("theirs.yaml").write_text(text)
    done = CliRunner().invoke(app, ["check", "theirs.yaml"])
    assert "is a sweep of W&B" in done.stderr
    assert "hunter2" not in done.stderr
    assert "task.api_key: api_key looks like a secret" in done.stderr


WORDS = """
parameters method metric param_space tune_config config min max q values value sampler distribution
type low high choices hydra sweeper params early_terminate eta s max_iter lr epochs seed optimizer
grid_search name attributes FloatDistribution n_trials direction scheduler run_cap time_budget_s
"""
TEXTS = [
    "tune.uniform(0, 1)",
    "choice()",
    "tag(log)",
    "tag(log, choice(1, 2))",
    "uniform",
    "bayes",
]
KEYS = st.sampled_from(WORDS.split())
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(KEYS, ANY))
def test_any_file_is_translated_or_left(data: dict[str, Any]) -> None:
    found = recognise(data)
    if found is not None:
        found.to_yaml()
