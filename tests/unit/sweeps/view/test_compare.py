"""`sweep compare`: the best trials of sweeps side by side."""

from __future__ import annotations

import io
import json
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pandas as pd
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import sweeps
from sweeps import Sweep
from sweeps.artifacts.export import ExportedWeights, Standing, model_card
from sweeps.cli import render
from sweeps.cli.app import app
from sweeps.paths import TRIAL_CONFIG
from sweeps.recording.tags import leaders_view
from sweeps.recording.trial_config import load_trial_config
from sweeps.spec.revisions import write_spec
from sweeps.spec.spec import trial_yaml
from sweeps.view.compare import Incomparable, compare
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import MadeSweep
from tracking.outbox import SWEEP, Outbox
from trainable.config import TrialConfig
from trainable.export import Exported
from trainable.store.manifest import Generation
from trainable.store.metrics_file import Row


def _shown(found: dict[str, object], *sweeps: MadeSweep) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=200)
    console.print(render.comparison(found, [sweep.spec for sweep in sweeps]))
    return [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_trials_with_a_result_lead_best_first(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path)
    sweep.add("complete", 0.5, 0.4)
    sweep.add("pruned", 0.3)
    sweep.add("complete", 0.3)
    sweep.add("failed", 0.1)
    sweep.add("pruned", 0.05)
    found = compare([sweep.view], top=5)
    assert [(one["number"], one["state"], one["value"]) for one in found["leaders"]] == [
        (4, "pruned", 0.05),
        (2, "complete", 0.3),  # of equals a complete one first
        (1, "pruned", 0.3),
        (0, "complete", 0.4),
        (3, "failed", 0.1),
    ]
    assert found["differing"] == ["train.optimizer.lr"]
    assert [line[0] for line in _shown(found)] == ["trial", "4", "2", "1", "0", "3"]
    assert len(compare([sweep.view], top=1)["leaders"]) == 1


def test_several_sweeps_share_one_order(tmp_path: Path) -> None:
    first = MadeSweep(tmp_path, "first")
    first.add("complete", 0.5)
    first.add("complete", 0.2)
    second = MadeSweep(tmp_path, "second", space="{train.batch_size: {choice: [32]}}")
    second.add("complete", 0.3)
    found = compare([first.view, second.view], top=5)
    assert [(one["sweep"], one["number"]) for one in found["leaders"]] == [
        ("first", 1),
        ("second", 0),
        ("first", 0),
    ]
    assert found["differing"] == ["train.batch_size", "train.optimizer.lr"]
    assert [one["params"]["train.batch_size"] for one in found["leaders"]] == [64, 32, 64]
    # what was not searched is what the spec says
    assert found["leaders"][1]["params"]["train.optimizer.lr"] == second.spec.train.optimizer.lr
    assert _shown(found)[0] == [
        "sweep", "trial", "state", "val/loss", "epoch", "attempts", "clipped", "batch_size", "lr",
    ]  # fmt: skip


def test_each_trial_has_its_trained_configuration(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path)
    for size in (64, 128):
        spec = with_overrides(sweep.spec, [f"train.batch_size={size}"])
        sweep.paths.spec.unlink()
        write_spec(sweep.paths.spec, spec)
        number = sweep.add("complete", 0.3 + size)
        sweep.paths.trial(number).mkdir(parents=True)
        text = trial_yaml(spec.trial_config(number, sweep.view.records[number].best_params))
        (sweep.paths.trial(number) / TRIAL_CONFIG).write_text(text)
    found = compare([sweep.view], top=5)
    assert [one["params"]["train.batch_size"] for one in found["leaders"]] == [64, 128]
    assert found["differing"] == ["train.batch_size", "train.optimizer.lr"]
    first = sweep.view.records[0]
    config = load_trial_config(sweep.paths, sweep.view.spec, first)
    assert TrialConfig.model_validate(config) == sweep.spec.trial_config(0, first.best_params)
    generation = Generation("", 0, 1, 1, "val/loss", "min", 0.3, 1, "ab")
    assert "| `train.batch_size` | 64 | fixed |" in model_card(
        sweep.view.spec,
        first,
        config,
        ExportedWeights(generation, Exported([])),
        Standing({}, 2),
    )


@pytest.mark.parametrize(
    ("ended", "among"),
    [
        (3, "a sweep of 3 trials"),
        (2, "the 2 trials that had ended, of a sweep of 3 trials"),
        (4, "a sweep of 4 trials"),  # fewer were asked for later
    ],
)
def test_model_card_names_only_known_samples(tmp_path: Path, ended: int, among: str) -> None:
    sweep = MadeSweep(tmp_path, metric="train/loss")
    sweep.add("complete", 0.3)
    (record,) = sweep.view.records
    generation = Generation("", 0, 1, 1, "train/loss", "min", 0.3, 1, "ab")
    config = load_trial_config(sweep.paths, sweep.spec, record)
    weights, standing = ExportedWeights(generation, Exported([])), Standing({}, ended)
    card = model_card(sweep.spec, record, config, weights, standing)
    assert f"\nThe best of {among}, by the min of train/loss.\n" in card
    assert "average" not in card
    contents = Exported(["teacher"], averaged=7, left_out=3, files={"base.pt": "12ab"})
    card = model_card(sweep.spec, record, config, weights._replace(contents=contents), standing)
    assert "`trained_parameters.safetensors` has only what was trained" in card
    assert "`base.pt` (sha256 `12ab`)" in card
    assert "The weights are an average" in card
    assert "`teacher`" in card
    assert "\ntrain/loss 0.3, after epoch 1 (step 1)." in card


def test_null_and_true_differ_from_missing_and_one(tmp_path: Path) -> None:
    first = MadeSweep(tmp_path, "first", space="{task.a: {choice: [null]}, task.b: {choice: [1]}}")
    first.add("complete", 0.3)
    second = MadeSweep(tmp_path, "second", space="{task.b: {choice: [true]}}")
    second.add("complete", 0.4)
    found = compare([first.view, second.view], top=5)
    assert (found["differing"], found["same"]) == (["task.a", "task.b"], {})
    assert [line[-2:] for line in _shown(found)[1:3]] == [["null", "1"], ["-", "true"]]


def test_shared_values_are_shown_once(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path, space="{train.batch_size: {choice: [32]}}")
    sweep.add("complete", 0.3)
    sweep.add("complete", 0.4)
    found = compare([sweep.view], top=5)
    assert (found["differing"], found["same"]) == ([], {"train.batch_size": 32})
    assert " ".join(_shown(found)[-1]) == "the same for all: train.batch_size 32"


def test_clip_fraction_is_that_of_the_whole_run(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path)
    sweep.add("complete", 0.3, 0.2)
    sweep.add("complete", 0.4)
    sweep.log(
        0,
        Row(1, 0, {"train/loss": 1.0}),
        Row(2, 0, {"train/clip_fraction": 1.0, "epoch": 1.0}),
        Row(4, 0, {"train/clip_fraction": 0.5, "epoch": 2.0}),
    )
    found = compare([sweep.view], top=5)
    assert [one["clip_fraction"] for one in found["leaders"]] == [0.75, None]
    assert [line[5] for line in _shown(found)[1:]] == ["75%", "-"]


def test_pages_name_runs_and_experiments(tmp_path: Path) -> None:
    sweeps = [MadeSweep(tmp_path, name) for name in ("first", "second")]
    assert compare([s.view for s in sweeps], top=5)["mlflow_compare_page"] is None
    for number, sweep in enumerate(sweeps):
        sweep.add("complete", 0.5 - 0.1 * number)
        outbox = Outbox(sweep.paths.outbox)
        outbox.found(str(number + 1))
        outbox.set_run_id(SWEEP, f"parent{number}", recorded=None)
        outbox.set_run_id(0, f"run{number}", recorded=None)
        outbox.close()
    found = compare([s.view for s in sweeps], top=5)
    for page, path in (("compare", "/compare-runs"), ("metric", "/metric")):
        url = urlsplit(found[f"mlflow_{page}_page"])
        assert (url.netloc, url.fragment.split("?")[0]) == ("127.0.0.1:5000", path)
        query = parse_qs(url.fragment.split("?")[1])
        assert json.loads(query["runs"][0]) == ["run1", "run0"]
        assert json.loads(query["experiments"][0]) == ["1", "2"]
    assert json.loads(query["plot_metric_keys"][0]) == ["val/loss", "train/loss"]


def test_charts_link_appears_once_the_view_is_delivered(tmp_path: Path) -> None:
    """The page's address holds a key alone; without its tag MLflow shows an error."""
    sweeps = [MadeSweep(tmp_path, name) for name in ("first", "second")]
    views = []
    for number, sweep in enumerate(sweeps):
        sweep.add("complete", 0.5)
        outbox = Outbox(sweep.paths.outbox)
        outbox.found(str(number + 1))
        outbox.set_run_id(0, f"run{number}", recorded=None)
        assert compare([s.view for s in sweeps], top=5)["mlflow_charts_page"] is None
        view = leaders_view(sweep.spec)
        outbox.append(SWEEP, "experiment", {view.tag: view.state})
        batch = outbox.next_batch(SWEEP)
        assert batch is not None
        outbox.delivered(batch)
        outbox.close()
        views.append(view)
    assert views[0] == views[1]
    for chosen, path in ((sweeps[:1], "/experiments/1/runs"), (sweeps, "/compare-experiments/s")):
        found = compare([s.view for s in chosen], top=5)
        url = urlsplit(found["mlflow_charts_page"])
        assert url.fragment.split("?")[0] == path
        query = parse_qs(url.fragment.split("?")[1])
        assert query["viewStateShareKey"] == [views[0].key]
    assert json.loads(query["experiments"][0]) == ["1", "2"]
    state = json.loads(views[0].state)
    parallel, *curves = state["compareRunCharts"]
    assert parallel["selectedParams"] == ["train.optimizer.lr"]
    assert parallel["selectedMetrics"] == ["best/val/loss"]
    assert [one["metricKey"] for one in curves] == ["val/loss", "train/loss"]
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`best/val/loss`", True)
    other = MadeSweep(tmp_path, "other", space="{train.batch_size: {choice: [32]}}")
    assert compare([sweeps[0].view, other.view], top=5)["mlflow_charts_page"] is None


def test_sweeps_with_other_metrics_are_not_compared(tmp_path: Path) -> None:
    first = MadeSweep(tmp_path, "first")
    second = MadeSweep(tmp_path, "second", metric="val/accuracy")
    with pytest.raises(Incomparable, match="only values of one metric have an order"):
        compare([first.view, second.view], top=5)


def test_diff_prints_metric_and_differing_parameters(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path)
    for value in (0.5, 0.4):
        sweep.add("complete", value)

    def shown(first: str, second: str) -> Result:
        words = ["show", "small", first, "--diff", second, "--root", str(tmp_path)]
        return CliRunner().invoke(app, words)

    lines = shown("0", "1").stdout.splitlines()
    assert lines[0].split() == ["trial", "0", "trial", "1"]
    assert lines[1].split() == ["val/loss", "0.5", "0.4"]
    assert {line.split()[0] for line in lines[2:]} == set(sweep.spec.space)
    same = shown("1", "1").stdout.splitlines()
    assert same[-1] == "their parameters are the same"
    wrong = shown("0", "9")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "has no trial 9; its trials are 0 to 1" in wrong.stderr


SPACE = "{train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}, train.batch_size: {choice: [32]}}"


def _made(root: Path, name: str, *values: float, metric: str = "val/loss") -> Sweep:
    made = MadeSweep(root, name, space=SPACE, metric=metric)
    for value in values:
        made.add("complete", value)
    return Sweep.open(name, root=root)


def test_leaders_are_those_of_the_command(tmp_path: Path) -> None:
    names = ("first", "second")
    found = sweeps.compare(
        _made(tmp_path, "first", 0.5, 0.2), _made(tmp_path, "second", 0.4), top=1
    )
    line = ["compare", *names, "--top", "1", "--json", "--root", str(tmp_path)]
    printed = json.loads(CliRunner().invoke(app, line).stdout)
    assert list(found.leaders.index) == [("first", 1), ("second", 0)]
    assert list(found.leaders["val/loss"]) == [0.2, 0.4]
    for leader, (_, row) in zip(printed["leaders"], found.leaders.iterrows(), strict=True):
        assert [row[name] for name in printed["differing"]] == [
            leader["params"][name] for name in printed["differing"]
        ]
    assert found.same == printed["same"] == {"train.batch_size": 32}


def test_several_metrics_have_a_column_each(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, metric="[val/loss, val/accuracy]", mode="[min, max]")
    made.add("complete", (0.5, 0.9))
    made.add("complete", (0.6, 0.8))
    made.add("failed")
    leaders = sweeps.compare(Sweep.open("small", root=tmp_path)).leaders
    assert list(leaders["pareto"]) == [True, False]
    assert leaders.loc[("small", 0), ["val/loss", "val/accuracy"]].tolist() == [0.5, 0.9]


def test_sweeps_without_a_common_order_are_refused(tmp_path: Path) -> None:
    first = _made(tmp_path, "first", 0.5)
    with pytest.raises(Incomparable):
        sweeps.compare(first, _made(tmp_path, "other", 0.5, metric="val/perplexity"))
    with pytest.raises(ValueError, match="at least one sweep"):
        sweeps.compare()
    pd.testing.assert_frame_equal(
        sweeps.compare(first, first).leaders, sweeps.compare(first).leaders
    )
