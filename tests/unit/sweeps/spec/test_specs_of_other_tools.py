"""A sweep file of W&B, Optuna or Ray Tune is refused by a sentence that names a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.spec.error_messages import describe_other_tool
from tests.message_parts import assert_parts

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
DOCS = Path(__file__).parents[4]


def _answer(here: Path, monkeypatch: pytest.MonkeyPatch, text: str, command: str) -> str:
    monkeypatch.chdir(here)
    Path("theirs.yaml").write_text(text)
    done = CliRunner().invoke(app, [command, "theirs.yaml"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert [path.name for path in here.iterdir()] == ["theirs.yaml"]
    return done.stderr


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize(
    ("text", "tool", "page"),
    [
        (WANDB, "W&B", "wandb"),
        ("parameters: {lr: {values: [1, 2]}}\n", "W&B", "wandb"),
        ("method: grid\nparameters: {api_key: {value: hunter2hunter2}}\n", "W&B", "wandb"),
        (RAY, "Ray Tune", "ray-tune"),
        ('config: {lr: "tune.uniform(0, 1)"}\n', "Ray Tune", "ray-tune"),
        ("config: {lr: {grid_search: [1, 2]}}\n", "Ray Tune", "ray-tune"),
        (HYDRA, "Optuna", "optuna"),
        (OPTUNA, "Optuna", "optuna"),
        ("direction: minimize\nparameters: {x: {low: 0, high: 1}}\n", "Optuna", "optuna"),
        ("params: {lr: 'interval(1e-4, 1e-1)'}\n", "Optuna", "optuna"),
    ],
)
def test_file_of_another_tool_names_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, tool: str, page: str, command: str
) -> None:
    first, *lines = _answer(tmp_path, monkeypatch, text, command).splitlines()
    assert first.partition(": ")[2] == (
        f"is a sweep of {tool}; `sweep` reads specs of its own form; write it as "
        f'the guide "Coming from {tool}" shows by example'
    )
    assert all(f" is {tool}'s; a spec has `" in line for line in lines)
    title = (DOCS / f"docs/coming-from-{page}.md").read_text().partition("\n")[0]
    assert title == f"# Coming from {tool}"


def test_each_key_of_another_tool_has_its_line_and_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "run_cap: 20\nmethod: grid\nparameters: {api_key: {value: hunter2hunter2}}\n"
    said = _answer(tmp_path, monkeypatch, text, "check")
    assert said.splitlines()[1:] == [
        "theirs.yaml:1:1: run_cap: is W&B's; a spec has `trials`",
        "theirs.yaml:2:1: method: is W&B's; a spec has `search.sampler`",
        "theirs.yaml:3:1: parameters: is W&B's; a spec has `space`",
    ]


def test_python_file_is_told_apart_from_a_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text("def train(lr): return lr\n")
    done = CliRunner().invoke(app, ["check", "loop.py"])
    assert done.exit_code == 2
    assert_parts(done.stderr, "loop.py: is Python", "`loop:NAME`", "sweep init", "Sweep(function")


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
def test_other_files_keep_their_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    said = _answer(tmp_path, monkeypatch, text, "check")
    assert "task: " in said
    assert "is a sweep of" not in said


WORDS = """
parameters method metric param_space tune_config config min max values value distribution low high
choices hydra sweeper params search_space grid_search n_trials direction task space
"""
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["tune.x(", "tag("]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(WORDS.split()) | st.integers(), inner, max_size=5)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(WORDS.split()), ANY))
def test_any_content_is_recognised_or_left(data: dict[str, Any]) -> None:
    issues = describe_other_tool(data)
    assert not issues or "task" not in data
