"""A small sweep through the real command line, with a real Ray and a real MLflow store."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from mlflow import MlflowClient
from mlflow.entities import Run, ViewType
from ruamel.yaml import YAML
from safetensors.torch import load_file

from sweeps.view.mlflow_pages import page_of
from sweeps.view.sweep_view import SweepView
from tests.integration.browser import open_page, photograph, require_chromium
from tests.integration.commandline import SMALL, CommandLine
from tests.integration.mlflow_pages import compared, curves, parallel_axes, runs_table
from tests.integration.report_reader import named, open_report
from tests.message_parts import assert_parts
from tests.time_limits import scaled
from tracking.ui import DEFAULT_ADDRESS
from trainable.checkpoint import CheckpointStore
from trainable.find_task import load_task
from trainable.store.metrics_file import read_rows

STATES = {"waiting", "running", "complete", "pruned", "failed"}


@pytest.fixture(scope="module")
def finished(module_cli: CommandLine) -> subprocess.CompletedProcess[str]:
    """The sweep, run to its end."""
    module_cli.write("small.yaml", SMALL)
    done = module_cli("run", "small.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    words = r"drew the figures of [1-9]\d* trials; delivered [1-9]\d* records; 0 wait\n"
    assert re.fullmatch(words, module_cli.ok("sync", "small"))
    return done


@pytest.fixture(scope="module")
def trials(finished: object, module_cli: CommandLine) -> list[dict[str, Any]]:
    del finished
    found: list[dict[str, Any]] = module_cli.json("trials", "small")
    return found


@pytest.fixture(scope="module")
def client(finished: object, module_cli: CommandLine) -> MlflowClient:
    del finished
    return MlflowClient(f"sqlite:///{module_cli.root / 'mlflow.db'}")


@pytest.fixture(scope="module")
def runs(client: MlflowClient) -> list[Run]:
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], run_view_type=ViewType.ALL))


@pytest.fixture(scope="module")
def parent(runs: list[Run]) -> Run:
    (found,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    return found


@pytest.fixture(scope="module")
def children(runs: list[Run]) -> dict[int, Run]:
    return {
        int(r.data.tags["gradsweep.trial"]): r for r in runs if "mlflow.parentRunId" in r.data.tags
    }


@pytest.mark.seeds("S27")
def test_memory_is_printed_before_the_first_trial(
    finished: subprocess.CompletedProcess[str],
) -> None:
    """An MLP of 64 x 32, 32 x 32 and 32 x 10 weights, and AdamW."""
    ways, takes, *_ = finished.stderr.splitlines()
    assert ways == "  2 trials at a time, each with 1 CPU"
    assert_parts(takes, "3,466 parameters", "54.16 KiB", "gradients", "optimizer")


def test_plain_lines_and_next_commands_are_printed(
    finished: subprocess.CompletedProcess[str],
) -> None:
    lines = finished.stdout.splitlines()
    assert any(re.match(r"trial 0 started: train\.optimizer\.lr ", line) for line in lines)
    assert any(re.match(r"trial \d epoch 1/4: val/loss ", line) for line in lines)
    assert any(line.startswith("best: trial ") for line in lines)
    assert "open its page, and MLflow: sweep ui small" in lines
    assert "\x1b[" not in finished.stdout


def test_status_counts_every_trial_once(
    module_cli: CommandLine, trials: list[dict[str, Any]]
) -> None:
    status = module_cli.json("status", "small")
    assert status["name"] == "small"
    assert status["state"] == "finished"
    assert status["trials"].keys() == STATES
    assert sum(status["trials"].values()) == status["num_trials"] == 4
    assert status["outbox_pending"] == 0
    best = min((t for t in trials if t["state"] == "complete"), key=lambda t: t["value"])
    assert status["best"] == {key: best[key] for key in ("number", "value", "params")}


def test_every_trial_has_one_end_and_its_progress(trials: list[dict[str, Any]]) -> None:
    assert [trial["number"] for trial in trials] == [0, 1, 2, 3]
    assert {trial["state"] for trial in trials} <= {"complete", "pruned"}
    for trial in trials:
        assert trial["attempts"] == 1
        assert trial["step"] == trial["epoch"] * 23
        assert (trial["epoch"] == 4) == (trial["state"] == "complete") or trial["epoch"] == 4
        assert Path(trial["best_checkpoint"]).is_dir()
        assert len(trial["params"]) == 3


def test_trials_differ_in_seed_and_parameters(
    trials: list[dict[str, Any]], module_cli: CommandLine
) -> None:
    assert len({json.dumps(trial["params"]) for trial in trials}) == 4
    configs = [
        (module_cli.root / f"small/trials/{n:04d}/config.yaml").read_text() for n in range(4)
    ]
    seeds = {re.search(r"^seed: (\d+)$", text, re.MULTILINE)[1] for text in configs}  # type: ignore[index]
    assert len(seeds) == 4


def test_one_run_per_trial_below_one_parent(
    parent: Run, children: dict[int, Run], trials: list[dict[str, Any]], module_cli: CommandLine
) -> None:
    assert sorted(children) == [0, 1, 2, 3]
    assert {run.data.tags["mlflow.parentRunId"] for run in children.values()} == {
        parent.info.run_id
    }
    assert {t["number"]: t["mlflow_run_id"] for t in trials} == {
        n: r.info.run_id for n, r in children.items()
    }
    assert module_cli.json("status", "small")["mlflow_run_id"] == parent.info.run_id


def test_mlflow_status_matches_each_trial(
    parent: Run, children: dict[int, Run], trials: list[dict[str, Any]]
) -> None:
    assert parent.info.status == "FINISHED"
    for trial in trials:
        run = children[trial["number"]]
        if trial["state"] == "complete":
            assert not run.data.tags.get("stopped_by")
        else:
            assert run.data.tags["stopped_by"] == "asha"
            assert trial["reason"] == run.data.tags["reason"]
            assert re.fullmatch(
                r"asha at epoch \d: val/loss \S+, needed at most \S+ to be in the best 1/\d "
                r"so far, rank \d+ of \d+",
                trial["reason"],
            )
        assert run.info.status == "FINISHED"
        assert run.data.tags["outcome"] == trial["state"]


def test_every_row_is_recorded_exactly_once(
    client: MlflowClient, children: dict[int, Run], module_cli: CommandLine
) -> None:
    for number, run in children.items():
        rows = read_rows(module_cli.root / f"small/trials/{number:04d}")
        wanted: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            for key, value in row.metrics.items():
                wanted.setdefault(key, []).append((row.step, value))
        assert {
            "train/loss",
            "train/grad_norm",
            "train/lr",
            "train/clip_fraction",
            "train/samples_per_second",
            "val/loss",
            "val/accuracy",
            "best/val/loss",
            "epoch",
        } <= wanted.keys()
        for key, points in wanted.items():
            history = client.get_metric_history(run.info.run_id, key)
            assert sorted((m.step, m.value) for m in history) == points, key


def test_parameters_seeds_and_precision_are_recorded_of_each_trial(
    children: dict[int, Run], trials: list[dict[str, Any]]
) -> None:
    for trial in trials:
        recorded = children[trial["number"]].data
        searched = {key: float(recorded.params[key]) for key in trial["params"]}
        assert searched == trial["params"]
        assert recorded.params["train.precision"] == "auto"
        tags = recorded.tags
        assert (tags["gradsweep.precision"], tags["gradsweep.device"]) == ("fp32", "cpu")
    seeds = {one.data.tags["gradsweep.seed"] for one in children.values()}
    assert len(seeds) == len(trials)
    assert len({one.data.tags["gradsweep.data_seed"] for one in children.values()}) == 1


def test_each_trial_run_holds_its_figures(
    client: MlflowClient, children: dict[int, Run], module_cli: CommandLine
) -> None:
    """Also a trial whose figures are removed, once the sweep is synced again."""
    best = module_cli.json("best", "small")["number"]
    folders = {n: module_cli.root / f"small/trials/{n:04d}/figures" for n in children}
    removed = (best + 1) % len(children)
    run = children[removed]
    for folder in (folders[removed], Path(urlsplit(run.info.artifact_uri).path, "figures")):
        shutil.rmtree(folder)
    client.set_tag(run.info.run_id, "figures", "missing")
    assert client.list_artifacts(run.info.run_id, "figures") == []

    words = r"drew the figures of 1 trial; delivered [1-9]\d* records; 0 wait\n"
    assert re.fullmatch(words, module_cli.ok("sync", "small"))
    for number, run in children.items():
        assert client.get_run(run.info.run_id).data.tags["figures"] == "drawn", number
        found = client.list_artifacts(run.info.run_id, "figures")
        assert {Path(f.path).name for f in found} == {f.name for f in folders[number].iterdir()}
        assert len(found) == 4
    assert module_cli.ok("sync", "small") == "delivered 0 records; 0 wait\n"


def test_parent_run_holds_best_weights_and_config(
    client: MlflowClient, parent: Run, tmp_path: Path, module_cli: CommandLine
) -> None:
    best = module_cli.json("best", "small")
    for tag in (
        "gradsweep.version.torch",
        "gradsweep.version.ray",
        "gradsweep.command",
        "gradsweep.sweep_id",
    ):
        assert parent.data.tags[tag]
    assert {f.path for f in client.list_artifacts(parent.info.run_id, "best")} == {
        "best/model.safetensors",
        "best/config.yaml",
        "best/model_card.md",
    }
    report = client.download_artifacts(parent.info.run_id, "report.html", str(tmp_path))
    assert f"best: trial {best['number']} with " in Path(report).read_text()
    assert {f.path for f in client.list_artifacts(parent.info.run_id, "figures")} == {
        "figures/grad_norm.png",
        "figures/learning_rate.png",
        "figures/train_loss.png",
        "figures/val_loss.png",
    }
    assert_published(client, parent.info.run_id, best, module_cli, tmp_path)


def weights_of(best: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The model in the best checkpoint."""
    store = CheckpointStore(Path(best["best_checkpoint"]).parents[1])
    generation = store.best()
    assert generation is not None
    found: dict[str, torch.Tensor] = store.load(generation)["model"]
    return found


def config_of(best: dict[str, Any], cli: CommandLine) -> str:
    """The resolved configuration in the best trial's directory, with what was drawn for it."""
    text = (cli.root / f"small/trials/{best['number']:04d}/config.yaml").read_text()
    optimizer = YAML(typ="safe").load(text)["train"]["optimizer"]
    assert optimizer["lr"] == best["params"]["train.optimizer.lr"]
    return text


def assert_published(
    client: MlflowClient, run_id: str, best: dict[str, Any], cli: CommandLine, directory: Path
) -> None:
    """The sweep's own run names the best trial and holds its weights and configuration."""
    assert client.get_run(run_id).data.tags["best_trial"] == str(best["number"])
    published = Path(client.download_artifacts(run_id, "best", str(directory)))
    assert_equal(load_file(published / "model.safetensors"), weights_of(best))
    assert (published / "config.yaml").read_text() == config_of(best, cli)
    card = (published / "model_card.md").read_text()
    assert card.startswith(f"# small, trial {best['number']}\n")


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_best_exports_the_checkpoint_weights(
    module_cli: CommandLine, client: MlflowClient, parent: Run, tmp_path: Path
) -> None:
    out = tmp_path / "export"
    module_cli.ok("best", "small", "--export", str(out))
    assert {path.name for path in out.iterdir()} == {
        "model.safetensors",
        "config.yaml",
        "model_card.md",
    }
    best = module_cli.json("best", "small")
    assert_equal(load_file(out / "model.safetensors"), weights_of(best))
    assert (out / "config.yaml").read_text() == config_of(best, module_cli)
    card = (out / "model_card.md").read_text()
    assert card.startswith(f"# small, trial {best['number']}\n")
    assert f"val/loss {best['value']!r} on the validation samples" in card
    told = dict(re.findall(r"^- ([\w.]+): (.+)$", card, re.MULTILINE))
    assert told["gradsweep.command"].endswith("sweep run small.yaml")
    for digest in ("gradsweep.code", "gradsweep.data"):
        assert told[digest] == parent.data.tags[digest]
    published = client.download_artifacts(parent.info.run_id, "best/model_card.md", str(tmp_path))
    assert Path(published).read_text() == card
    again = module_cli("best", "small", "--export", str(out))
    assert again.returncode == 2
    assert "is not empty" in again.stderr


def test_best_registers_a_self_contained_model(module_cli: CommandLine, finished: object) -> None:
    del finished
    for _ in range(2):  # the second time there is nothing new to register
        found = module_cli.json("best", "small", "--register", "digits-mlp")
        assert found["registered"] == {"model": "digits-mlp", "version": "1"}
    program = (
        "import json, sys, mlflow, torch\n"
        "mlflow.set_tracking_uri(sys.argv[1])\n"
        "model = mlflow.pytorch.load_model('models:/digits-mlp@best')\n"
        "inputs = torch.linspace(-1, 1, 192).reshape(3, 1, 8, 8)\n"
        "print(json.dumps(model(inputs).tolist()))\n"
        "assert not {'sweeps', 'trainable', 'tracking'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, f"sqlite:///{module_cli.root / 'mlflow.db'}"],
        cwd=module_cli.directory,
        env={**os.environ, "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    model = load_task("digits", {"model": "mlp", "width": 32}).build_model()
    model.load_state_dict(weights_of(module_cli.json("best", "small")))
    with torch.no_grad():
        wanted = model.eval()(torch.linspace(-1, 1, 192).reshape(3, 1, 8, 8))
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout)), wanted)


def test_report_is_written_on_request(
    module_cli: CommandLine, trials: list[dict[str, Any]]
) -> None:
    written = module_cli.ok("report", "small").strip()
    assert written == "wrote small-report.html"
    text = (module_cli.directory / "small-report.html").read_text()
    best = min(trials, key=lambda trial: trial["value"])
    assert f"best: trial {best['number']} with " in text


def test_no_process_or_scratch_file_remains(module_cli: CommandLine, finished: object) -> None:
    del finished
    sweep = module_cli.root / "small"
    assert {path.name for path in sweep.iterdir()} == {
        "sweep.yaml",
        "ledger.db",
        "report.html",
        "lock",
        "outbox",
        "trials",
    }
    outside = sum(
        path.stat().st_size
        for path in sweep.rglob("*")
        if path.is_file() and "checkpoints" not in path.parts
    )
    assert outside < 10 * 2**20  # half of it is the report


def test_second_run_with_same_name_is_refused(module_cli: CommandLine, finished: object) -> None:
    del finished
    again = module_cli("run", "small.yaml")
    assert again.returncode == 2
    assert_parts(again.stderr, "sweep 'small' exists", "sweep status small", "--name\n")


@pytest.fixture(scope="module")
def ui(finished: object, module_cli: CommandLine) -> Iterator[str]:
    """The charts of `sweep ui`, with the login that it prints; its server ends with it."""
    del finished
    require_chromium()
    server = module_cli.start("ui", "small", "--no-open", "--port", "0")
    assert server.stdout is not None
    lines = iter(server.stdout.readline, "")
    link = next(line for line in lines if line.startswith("http://127.0.0.1:")).strip()
    place = page_of("", SweepView.open("small", module_cli.root))
    yield link.replace("/sweep?", "/?") + place[1:]
    server.send_signal(signal.SIGINT)
    server.communicate(timeout=scaled(20))
    assert server.returncode == 0


@pytest.mark.browser
def test_ui_orders_trials_by_metric(ui: str, trials: list[dict[str, Any]]) -> None:
    columns = {"name": "attributes.`Run Name`", "value": "metrics.`best/val/loss`"}
    columns |= {key: f"params.`{key}`" for key in trials[0]["params"]}
    table_page = ui.replace("&compareRunsMode=CHART", "")
    assert table_page != ui
    with open_page(table_page, width=1900) as page:
        table = runs_table(page, columns)
        page.get_by_text("4 matching runs").wait_for()
        photograph(page, "mlflow-runs")
    ranked = sorted(trials, key=lambda trial: trial["value"])
    assert [row["name"] for row in table] == [f"trial-{one['number']:04d}" for one in ranked]
    assert [float(row["value"]) for row in table] == [one["value"] for one in ranked]
    for row, trial in zip(table, ranked, strict=True):
        assert {key: float(row[key]) for key in trial["params"]} == trial["params"]


@pytest.mark.browser
def test_ui_opens_on_searched_parameters_and_best(ui: str, trials: list[dict[str, Any]]) -> None:
    with open_page(ui) as page:
        axes = parallel_axes(page)
        drawn = curves(page)
        names = runs_table(page, {"name": "3"})  # beside charts, columns have numbers
        photograph(page, "mlflow-ui")
        assert page.get_by_text("Welcome to MLflow Assistant").count() == 0
    assert axes == [*trials[0]["params"], "best/val/loss"]
    ranked = sorted(trials, key=lambda trial: trial["value"])
    assert [row["name"] for row in names] == [f"trial-{one['number']:04d}" for one in ranked]
    for trial in trials:
        name = f"trial-{trial['number']:04d}"
        assert any(run == name and trial["value"] in curve.values() for run, curve in drawn)


@pytest.mark.chaos
@pytest.mark.browser
def test_compare_links_show_the_leaders(
    ui: str, module_cli: CommandLine, trials: list[dict[str, Any]]
) -> None:
    found = module_cli.json("compare", "small", "--top", "3")
    base = ui.partition("#")[0]  # with the login, which each new browser needs
    leaders = {f"trial-{one['number']:04d}": one for one in found["leaders"]}

    def curve(number: int, metric: str) -> dict[float, float]:
        rows = read_rows(module_cli.root / f"small/trials/{number:04d}")
        return {row.step: row.metrics[metric] for row in rows if metric in row.metrics}

    with open_page(found["mlflow_compare_page"].replace(f"{DEFAULT_ADDRESS}/", base)) as page:
        rows = compared(page)
        chosen = page.locator(".axis-title")
        chosen.first.wait_for(state="attached")
        axes = chosen.all_text_contents()
        photograph(page, "mlflow-compare")
    assert axes[:-1] == sorted(trials[0]["params"])
    assert rows["Run Name:"] == list(leaders)
    for key in trials[0]["params"]:
        shown = [float(value) for value in rows[key]]
        assert shown == [one["params"][key] for one in leaders.values()], key

    with open_page(found["mlflow_metric_page"].replace(f"{DEFAULT_ADDRESS}/", base)) as page:
        for name in leaders:
            for metric in ("val/loss", "train/loss"):
                page.get_by_text(f"{name} ({metric})").first.wait_for()
        drawn = curves(page)
        photograph(page, "mlflow-metric")
    for name, one in leaders.items():
        for metric in ("val/loss", "train/loss"):
            assert (name, curve(one["number"], metric)) in drawn

    with open_page(found["mlflow_charts_page"].replace(f"{DEFAULT_ADDRESS}/", base)) as page:
        page.get_by_text("Leaders").first.wait_for()
        for axis in (*trials[0]["params"], "best/val/loss"):
            page.locator("svg").get_by_text(axis).first.wait_for(state="attached")
        drawn = curves(page)
        photograph(page, "mlflow-charts")
    for trial in trials:
        assert (f"trial-{trial['number']:04d}", curve(trial["number"], "val/loss")) in drawn


@pytest.mark.browser
def test_report_artifact_describes_the_sweep(
    module_cli: CommandLine,
    trials: list[dict[str, Any]],
    client: MlflowClient,
    parent: Run,
    tmp_path: Path,
) -> None:
    """The file that `sync` recorded, taken from the tracking store."""
    require_chromium()
    file = Path(client.download_artifacts(parent.info.run_id, "report.html", str(tmp_path)))
    counts = {state: sum(t["state"] == state for t in trials) for state in ("complete", "pruned")}
    best = min(trials, key=lambda trial: trial["value"])
    with open_report(file) as page:
        photograph(page, "report-real")
        told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        words = page.locator("header").inner_text()
        assert f"4 of 4 trials: {told}" in words
        assert f"best: trial {best['number']} with val/loss {best['value']:.4g} (" in words
        rows = [row.split("\t") for row in page.locator("#trials tr").all_inner_texts()[1:]]
        wanted = module_cli.json("compare", "small", "--top", "10")["leaders"]
        assert [row[:4] for row in rows] == [
            [str(one["number"]), one["state"], f"{one['value']:.4g}", str(one["epoch"])]
            for one in wanted
        ]
        history = named(page, "History")
        for state in filter(counts.get, counts):
            mine = [trial for trial in trials if trial["state"] == state]
            assert history[state]["x"] == [trial["number"] for trial in mine]
            assert history[state]["y"] == [trial["value"] for trial in mine]
        assert history["best so far"]["y"][-1] == best["value"]
        assert "No trial failed." in page.locator("#failures").inner_text()


def test_extending_keeps_earlier_trials_unchanged(
    module_cli: CommandLine, client: MlflowClient, parent: Run, tmp_path: Path
) -> None:
    before = module_cli.json("trials", "small")
    # The best trial may well stay the best: what names and holds it is made another one's first.
    client.set_tag(parent.info.run_id, "best_trial", "7")
    for name in ("model.safetensors", "config.yaml", "model_card.md"):
        (tmp_path / name).write_text("of trial 7")
        client.log_artifact(parent.info.run_id, str(tmp_path / name), "best")
    done = module_cli("resume", "small", "-s", "trials=6", "-s", "tracking.every=2")
    assert done.returncode == 0, done.stderr
    after = module_cli.json("trials", "small")
    assert after[:4] == before
    assert [trial["number"] for trial in after] == [0, 1, 2, 3, 4, 5]
    assert module_cli.json("status", "small")["num_trials"] == 6
    best = module_cli.json("best", "small")
    assert_published(client, parent.info.run_id, best, module_cli, tmp_path)
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    runs = {r.info.run_name: r.data.tags for r in client.search_runs([experiment.experiment_id])}
    assert sorted(runs) == ["small", *(f"trial-{number:04d}" for number in range(6))]
    ran, resumed = "sweep run small.yaml", "resume small -s trials=6 -s tracking.every=2"
    assert runs["small"]["gradsweep.command"].endswith(ran)
    assert runs["small"]["gradsweep.command.2"].endswith(resumed)
    assert "gradsweep.code.2" not in runs["small"], "it is the same code"
    assert runs["small"]["curves"].startswith("every step, then the first step, every 2 steps, ")
    assert runs["trial-0003"]["gradsweep.command"].endswith(ran)
    assert runs["trial-0004"]["gradsweep.command"].endswith(resumed)
    assert runs["trial-0004"]["gradsweep.code"] == runs["small"]["gradsweep.code"]
