"""The contract of every recorder; the real one is read back from a real store."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sweeps.run.sync import deliver
from tests.memory_recorder import MemoryRecorder, MemoryRun
from tests.unit.sweeps.sweep_factory import MadeSweep
from tracking import trackers
from tracking.outbox_status import read_outbox
from tracking.recorder import Recorder
from tracking.tracker import TrackedSweep


class Line(NamedTuple):
    step: int
    timestamp_ms: int
    metrics: dict[str, float]


@dataclass
class Case:
    """A recorder, and how to see what it kept of a run."""

    recorder: Recorder | MemoryRecorder
    look: Callable[[int | None], MemoryRun]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of one tracking store: making its tables takes seconds."""
    root = tmp_path_factory.mktemp("store")
    yield root
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    if engine := SqlAlchemyStore._engine_map.get(f"sqlite:///{root}/mlflow.db"):
        engine.dispose()  # its pool would warn of open connections


@pytest.fixture(params=["memory", "guide", pytest.param("mlflow", marks=pytest.mark.integration)])
def case(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Case]:
    if request.param == "memory":
        memory = MemoryRecorder(outbox=tmp_path / "outbox")
        yield Case(memory, lambda trial: memory.runs[trial])
    elif request.param == "guide":
        monkeypatch.setattr(trackers, "TRACKERS", [_guide()["JsonTracker"], *trackers.TRACKERS])
        runs, outbox = tmp_path / "runs", tmp_path / "outbox"
        sweep = TrackedSweep(experiment="contract", sweep_id="guide", outbox=outbox)
        delivered = Recorder(f"json://{runs}", None, sweep)

        def look_into_file(trial: int | None) -> MemoryRun:
            assert delivered.flush(60) == 0
            known = read_outbox(outbox)
            run_id = known.sweep_run_id if trial is None else known.run_ids[trial]
            return _read_file(runs / "contract" / f"{run_id}.json")

        yield Case(delivered, look_into_file)
        assert delivered.close(60) == 0
    else:
        root = request.getfixturevalue("store")
        uri = f"sqlite:///{root}/mlflow.db"
        sweep = TrackedSweep(
            experiment="contract", sweep_id=tmp_path.name, outbox=tmp_path / "outbox"
        )
        recorder = Recorder(uri, root / "artifacts", sweep)

        def look(trial: int | None) -> MemoryRun:
            assert recorder.flush(120) == 0
            known = read_outbox(tmp_path / "outbox")
            return _read(uri, known.sweep_run_id if trial is None else known.run_ids[trial])

        yield Case(recorder, look)
        assert recorder.close(60) == 0


def _guide() -> dict[str, Any]:
    """Run the module that the guide shows."""
    text = (Path(__file__).parents[2] / "docs/guides/extending.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(\"\"\"A tracker for .*?)^```", text, re.DOTALL | re.M)
    module: dict[str, Any] = {"__name__": "json_tracker"}
    exec(compile(block, "json_tracker.py", "exec"), module)
    return module


def _read_file(file: Path) -> MemoryRun:
    run = json.loads(file.read_text(encoding="utf-8"))
    points: dict[tuple[str, int], float] = {}
    for key, value, step, _ in run["points"]:
        assert (key, step) not in points, "recorded twice"
        points[key, step] = value
    root = file.with_suffix("")
    artifacts = {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }
    return MemoryRun(run["params"], run["tags"], points, artifacts, run["status"])


def _read(uri: str, run_id: str | None) -> MemoryRun:
    from mlflow import MlflowClient

    assert run_id is not None
    client = MlflowClient(tracking_uri=uri)
    run = client.get_run(run_id)
    points: dict[tuple[str, int], float] = {}
    for key in run.data.metrics:
        for metric in client.get_metric_history(run_id, key):
            assert (key, metric.step) not in points, "recorded twice"
            points[key, metric.step] = metric.value
    artifacts = {}
    root = Path(run.info.artifact_uri.removeprefix("file://"))
    for path in root.rglob("*") if root.exists() else ():
        if path.is_file():
            artifacts[str(path.relative_to(root))] = path.read_bytes()
    return MemoryRun(run.data.params, run.data.tags, points, artifacts, run.info.status)


def test_trial_from_start_to_finish(case: Case) -> None:
    case.recorder.start(0, {"train.lr": 0.1, "task": None, "flag": True}, {"node": "a"})
    case.recorder.log(0, [Line(1, 1000, {"loss": 2.0}), Line(2, 2000, {"loss": 1.0, "acc": 0.5})])
    case.recorder.tag(0, {"node": "b"})
    case.recorder.finish(0, "FINISHED", {"reason": "done"})
    run = case.look(0)
    assert run.params == {"train.lr": "0.1", "task": "None", "flag": "True"}
    assert run.points == {("loss", 1): 2.0, ("loss", 2): 1.0, ("acc", 2): 0.5}
    assert {"node": "b", "reason": "done"}.items() <= run.tags.items()
    assert run.status == "FINISHED"


def test_replayed_steps_change_nothing(case: Case) -> None:
    case.recorder.start(0, {}, {})
    case.recorder.log(0, [Line(1, 1000, {"loss": 2.0}), Line(2, 2000, {"loss": 1.0})])
    case.recorder.start(0, {}, {})
    case.recorder.log(0, [Line(2, 9000, {"loss": 7.0, "new": 1.0}), Line(3, 9001, {"loss": 0.5})])
    expected = {("loss", 1): 2.0, ("loss", 2): 1.0, ("loss", 3): 0.5, ("new", 2): 1.0}
    assert case.look(0).points == expected


def test_log_of_a_trial_is_followed_up_to_its_last_report(case: Case, tmp_path: Path) -> None:
    log = tmp_path / "trials" / "0000" / "metrics.jsonl"
    log.parent.mkdir(parents=True)
    rows = ({"step": step, "time": step, "metrics": {"loss": 1 / step}} for step in (1, 2, 3))
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    case.recorder.start(0, {}, {})
    case.recorder.follow(0, 2)
    assert case.look(0).points == {("loss", 1): 1.0, ("loss", 2): 0.5}
    case.recorder.follow(0, 2, ended=True)
    assert case.look(0).points == {("loss", step): 1 / step for step in (1, 2, 3)}


def test_non_finite_values(case: Case) -> None:
    values = (math.inf, math.nan, -math.inf)
    case.recorder.log(0, [Line(step, step, {"loss": v}) for step, v in enumerate(values)])
    points = case.look(0).points
    assert math.isnan(points.pop(("loss", 1)))
    assert points == {("num_infinite/loss", 0): 1.0, ("num_infinite/loss", 2): 2.0}


def test_parameters_stay_and_changes_become_tags(case: Case) -> None:
    case.recorder.start(0, {"lr": 0.1, "wd": 0}, {})
    case.recorder.finish(0, "KILLED", {})
    case.recorder.start(0, {"lr": 0.2, "wd": 0, "more": 1}, {})
    run = case.look(0)
    assert run.params == {"lr": "0.1", "wd": "0", "more": "1"}
    assert run.tags["param_changed.lr"] == "0.2"
    assert "param_changed.wd" not in run.tags
    assert run.status == "RUNNING"


def test_parameter_that_changes_back_becomes_a_curve(case: Case) -> None:
    for rate, step in ((0.1, 1), (0.2, 2), (0.1, 3), (0.1, 4)):
        case.recorder.start(0, {"lr": rate, "name": f"n{rate}"}, {})
        case.recorder.log(0, [Line(step, 1000 * step, {"loss": 2.0})])
    run = case.look(0)
    assert run.params == {"lr": "0.1", "name": "n0.1"}
    assert run.tags["param_changed.lr"] == "0.1"
    assert run.tags["param_changed.name"] == "n0.1"
    changes = {point: v for point, v in run.points.items() if point[0].startswith("param/")}
    assert changes == {("param/lr", 1): 0.2, ("param/lr", 2): 0.1}


def test_sweep_has_its_own_run(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text("seed: 0")
    case.recorder.tag(None, {"best": "3"})
    case.recorder.artifact(None, file, "sweep.yaml")
    case.recorder.finish(None, "FAILED", {"reason": "no trial succeeded"})
    run = case.look(None)
    assert {"best": "3", "reason": "no trial succeeded"}.items() <= run.tags.items()
    assert (run.status, run.artifacts) == ("FAILED", {"sweep.yaml": b"seed: 0"})


def test_artifacts_are_copies(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "now.txt"
    file.write_text("then")
    case.recorder.start(0, {}, {})
    case.recorder.artifact(0, file, "notes/a.txt")
    file.unlink()
    assert case.look(0).artifacts == {"notes/a.txt": b"then"}


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../../x"])
def test_artifact_names_stay_below_the_run(case: Case, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"artifact name is .*; it must be a relative path"):
        case.recorder.artifact(0, tmp_path, name)


def test_odd_metric_names_are_kept_apart(case: Case) -> None:
    case.recorder.log(0, [Line(1, 1, {"a?": 1.0, "a!": 2.0, "x" * 300: 3.0, "ok/name": 4.0})])
    points = case.look(0).points
    assert sorted(points.values()) == [1.0, 2.0, 3.0, 4.0]
    assert points["ok/name", 1] == 4.0


def test_sync_delivers_to_a_store_that_cannot_be_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "TRACKERS", [_guide()["JsonTracker"], *trackers.TRACKERS])
    uri = f"json://{tmp_path}/store"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)  # or the user would be asked to trust it
    made = MadeSweep(tmp_path, more=f"tracking: {{uri: '{uri}'}}")
    made.add("complete", 0.5)
    delivered = deliver(made.view)
    assert (delivered.left, delivered.num_runs) == (0, 2)
    assert len(list(tmp_path.glob("store/small/*.json"))) == 2
