"""The plain MLflow API inside a trial: logging is forwarded, and everything else refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
import sys
from pathlib import Path
from tracking.trial_redirect import redirect

class Taker:
    def __init__(self): self.got = []
    def metrics(self, points): self.got += [point[:3] for point in points]
    def params(self, params): self.got += sorted(params.items())
    def tags(self, tags): self.got += sorted(tags.items())
    def directory(self): return Path.cwd() / "artifacts"

taker = Taker()
redirect(taker)
assert "mlflow" not in sys.modules
import mlflow
with mlflow.start_run(nested=True):
    mlflow.log_metric("a", 1.0, step=3)
    mlflow.log_metrics({"b": 2.0}, step=4)
    mlflow.log_param("p", 1)
    mlflow.log_params({"q": "x"})
    mlflow.set_tags({"t": "y"})
    mlflow.log_text("hello", "notes/hello.txt")
    mlflow.log_dict({"a": 1}, "a.json")
mlflow.log_metric("c", 1.0)
assert mlflow.active_run() is not None
from mlflow.tracking import MlflowClient
mlflow.set_experiment("another")
mlflow.log_metric("d", 1.0)
for call in (
    lambda: mlflow.search_runs(),
    lambda: MlflowClient().create_experiment("x"),
    lambda: MlflowClient().get_run("1" * 32),
    lambda: MlflowClient().get_metric_history(mlflow.active_run().info.run_id, "a"),
):
    try:
        call()
    except mlflow.exceptions.MlflowException as error:
        assert "own run and nothing else" in str(error), error
    else:
        raise AssertionError(call)
redirect(taker)  # the next trial of this process
assert mlflow.active_run() is None
mlflow.log_metric("e", 1.0, step=1)
print(taker.got)
"""


@pytest.mark.timeout(120)
def test_logging_calls_are_forwarded_and_queries_refused(tmp_path):
    """Relies on `mlflow.tracking._tracking_service.utils._register`."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = [
        *(("a", 1.0, 3), ("b", 2.0, 4), ("p", "1"), ("q", "x"), ("t", "y"), ("c", 1.0, 0)),
        *(("d", 1.0, 0), ("e", 1.0, 1)),
    ]
    assert done.stdout.strip().splitlines()[-1] == str(expected)
    assert (tmp_path / "artifacts" / "notes" / "hello.txt").read_text() == "hello"
    assert not (tmp_path / "mlflow.db").exists()
    assert not (tmp_path / "mlruns").exists()
