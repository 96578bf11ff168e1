"""Build and run the image and the stack of docker/: access, confinement, secrets, and a sweep that
loses a worker and its tracking server.

It takes an engine (`engine.INSTALL`), some 15 GB of disk and a quarter of an hour.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.engine import Engine
from tests.chaos.stack import SECRETS, Stack, up
from tests.time_limits import scaled

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(2400),
    pytest.mark.xdist_group("containers"),  # one stack for all
]

_WORKERS = 2
_EPOCHS = 40
_SWEEP = ("sweep", "run", "digits.yaml", "--name", "survivor", "--address", "gcs:6379")
_SETTINGS = ("trials=2", f"budget.epochs={_EPOCHS}", "early_stopping.scheduler=none")
_POINTS = """
import json, mlflow
client = mlflow.MlflowClient("http://mlflow:5000")
found = client.search_runs([client.get_experiment_by_name("survivor").experiment_id])
history = client.get_metric_history
print(json.dumps([
    [one.info.status, sorted(m.step for m in history(one.info.run_id, "val/loss"))]
    for one in found
]))
"""


@pytest.fixture(scope="module")
def stack(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with up(engine, tmp_path_factory.mktemp("stack"), _WORKERS) as it:
        yield it


def _ask(
    stack: Stack, path: str, *, method: str = "GET", password: str = "", **headers: str
) -> int:
    """The status of MLflow's answer."""
    if password:
        who = base64.b64encode(f"sweep:{password}".encode()).decode()
        headers["Authorization"] = f"Basic {who}"
    request = urllib.request.Request(
        f"http://127.0.0.1:{stack.port}{path}",
        method=method,
        headers={"Content-Type": "application/json", **headers},
        data=b'{"name": "made by a stranger"}' if method == "POST" else None,
    )
    try:
        with urllib.request.urlopen(request, timeout=scaled(20)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


_SEARCH = "/api/2.0/mlflow/experiments/search?max_results=1"
_CREATE = "/api/2.0/mlflow/experiments/create"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/version",
        "/metrics",
        "/signup",
        "/graphql",
        "/docs",
        "/openapi.json",
        _SEARCH,
        _SEARCH.replace("/api", "/ajax-api"),
        "/get-artifact?path=x&run_uuid=y",
        "/api/2.0/mlflow-artifacts/artifacts",
        "/api/3.0/jobs/",
        "/v1/traces",
    ],
)
def test_client_without_password_gets_nothing(stack: Stack, path: str) -> None:
    assert _ask(stack, path) == 401
    assert _ask(stack, path, method="POST") == 401
    assert _ask(stack, path, password="not the password") == 401


def test_client_with_password_connects_from_this_host_only(stack: Stack) -> None:
    password = stack.secrets["mlflow_password"]
    assert _ask(stack, _SEARCH, password=password) == 200
    assert _ask(stack, _SEARCH, password=password, Host="evil.example") == 403
    asked = _ask(stack, _CREATE, method="POST", password=password, Origin="http://evil.example")
    assert asked == 403


@pytest.mark.parametrize("mode", ["disabled", "token"])
def test_ray_refuses_clients_without_token(stack: Stack, mode: str) -> None:
    (head,) = stack.containers("ray-head")
    wrong = (f"RAY_AUTH_MODE={mode}", "RAY_AUTH_TOKEN=0123456789abcdef")
    asked = stack.inside(
        head, "ray", "health-check", "--address", "gcs:6379", environment=wrong, check=False
    )
    assert asked.returncode != 0
    assert "InvalidAuthToken" in asked.stderr
    stack.inside(head, "ray", "health-check", "--address", "gcs:6379")


def test_container_is_confined(stack: Stack) -> None:
    for container in stack.containers():
        status = stack.inside(container, "cat", "/proc/self/status").stdout
        facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert int(facts["Uid"].split()[0]) > 0
        assert int(facts["CapEff"], 16) == int(facts["CapBnd"], 16) == 0
        assert facts["NoNewPrivs"] == "1"
        for place in ("/written", "/usr/written", "/opt/written"):
            written = stack.inside(container, "touch", place, check=False)
            assert "Read-only file system" in written.stderr, container["Name"]
        assert container["HostConfig"]["Memory"] > 0
        published = container["NetworkSettings"]["Ports"] or {}
        assert {one["HostIp"] for bound in published.values() for one in bound or []} <= {
            "127.0.0.1"
        }


def test_worker_reaches_no_tracking_server_or_database(stack: Stack) -> None:
    worker, *_ = stack.containers("ray-worker")
    (head,) = stack.containers("ray-head")
    for service, port in (("mlflow", 5000), ("postgres", 5432)):
        (container,) = stack.containers(service)
        (network,) = container["NetworkSettings"]["Networks"].values()
        connect = f"import socket; socket.create_connection(({network['IPAddress']!r}, {port}), 5)"
        stack.inside(head, "python", "-c", connect)
        refused = stack.inside(worker, "python", "-c", connect, check=False)
        assert re.search("timed out|unreachable|refused", refused.stderr)
    assert stack.inside(worker, "ls", "/run/secrets").stdout.split() == ["ray_token"]


def test_database_role_reaches_its_own_databases_only(stack: Stack) -> None:
    (container,) = stack.containers("mlflow")
    for database in ("mlflow", "mlflow_auth", "postgres"):
        asked = f"import psycopg2; psycopg2.connect('postgresql://mlflow@postgres/{database}')"
        said = stack.inside(container, "python", "-c", asked, check=False)
        assert (said.returncode == 0) is (database != "postgres"), (database, said.stderr)


def test_sweep_survives_loss_of_worker_and_tracking_server(stack: Stack) -> None:
    settings = [word for setting in _SETTINGS for word in ("-s", setting)]
    tracking = ("--tracking-uri", "http://mlflow:5000")
    lines: list[str] = []
    halfway = threading.Event()

    def read() -> None:
        assert sweep.stdout is not None
        for line in sweep.stdout:
            lines.append(line)
            if re.match(r"trial \d epoch 4/", line):
                halfway.set()
        halfway.set()

    with stack.start("ray-head", *_SWEEP, *settings, *tracking) as sweep:
        reader = threading.Thread(target=read)
        reader.start()
        assert halfway.wait(180), "".join(lines)
        worker, *_ = _busy(stack)
        stack.kill(worker)
        (server,) = stack.containers("mlflow")
        stack.kill(server)
        code = sweep.wait(600)
        reader.join(30)
    said = "".join(lines)
    assert code == 0, said
    (head,) = stack.containers("ray-head")
    trials = json.loads(stack.inside(head, "sweep", "trials", "survivor", "--json").stdout)
    assert [trial["state"] for trial in trials] == ["complete", "complete"]
    assert sum(trial["attempts"] for trial in trials) == 3, said
    stack.await_health()
    for killed in (worker, server):
        (again,) = json.loads(stack.engine.run("inspect", killed["Id"]).stdout)
        assert again["RestartCount"] == killed["RestartCount"] + 1
    stack.inside(head, "sweep", "sync", "survivor")
    runs = json.loads(stack.inside(head, "python", "-c", _POINTS).stdout)
    every = len(trials) * [["FINISHED", _steps(trials)]]
    assert sorted(run for run in runs if run[1]) == every


def _busy(stack: Stack) -> list[Any]:
    """The workers on which a trial runs."""
    listed = ("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    return [
        worker
        for worker in stack.containers("ray-worker")
        if "ray::" in stack.inside(worker, *listed).stdout
    ]


def _steps(trials: list[Any]) -> list[int]:
    """The steps at which a trial of these reports, once an epoch."""
    (last,) = {trial["step"] for trial in trials}
    return list(range(last // _EPOCHS, last + 1, last // _EPOCHS))


def test_no_secret_is_visible(stack: Stack) -> None:
    """After the sweep: in what the engine tells, in processes, logs, and files but their own."""
    shown = {"image": stack.engine.run("history", "--no-trunc", _image(stack)).stdout}
    shown["its settings"] = stack.engine.run("image", "inspect", _image(stack)).stdout
    for container in stack.containers():
        name = container["Name"]
        shown[f"{name}: settings"] = json.dumps(container)
        logs = stack.engine.run("logs", container["Id"])
        shown[f"{name}: log"] = logs.stdout + logs.stderr
        seen = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null"
        shown[f"{name}: processes"] = stack.inside(
            container, "sh", "-c", f"{seen} | tr '\\0' '\\n'", check=False
        ).stdout
        assert "PATH=" in shown[f"{name}: processes"]
    (head,) = stack.containers("ray-head")
    for name in SECRETS:
        value = stack.secrets[name]
        assert [place for place, text in shown.items() if value in text] == []
        written = ("grep", "--recursive", "--files-with-matches", value, "/runs", "/tmp")
        assert stack.inside(head, *written, check=False).stdout == ""


def _image(stack: Stack) -> str:
    (server,) = stack.containers("mlflow")
    return str(server["Config"]["Image"])
