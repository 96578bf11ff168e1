"""An unusable tracking address is refused before anything exists; an offline sweep ignores it, and
`sweep sync` delivers later.
"""

from __future__ import annotations

import base64
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from mlflow import MlflowClient

from sweeps.sweep_lock import SweepLock
from tests.integration.commandline import TINY, CommandLine
from tests.message_parts import assert_parts
from tracking.probe import TrackingUnusable, probe

ROOT = Path(__file__).parents[2]


@contextmanager
def _server(answer: Callable[[str, str], tuple[int, str]]) -> Iterator[str]:
    """A server that answers as scripted, given the path and the `Authorization` header."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, text = answer(self.path, self.headers.get("Authorization", ""))
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None:
            del arguments

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _mlflow(version: str, path: str) -> tuple[int, str]:
    return (200, version) if path == "/version" else (200, "{}")


@pytest.fixture
def nowhere() -> str:
    """An address at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_server_with_login_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "right")
    known = "Basic " + base64.b64encode(b"ada:right").decode()
    with _server(lambda path, who: _mlflow("2.8.0", path) if who == known else (401, "")) as url:
        probe(url)
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong")
        with pytest.raises(TrackingUnusable, match=r"refuses the credentials \(HTTP 401\); set"):
            probe(url)


def test_server_with_token_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "right")
    with _server(
        lambda path, who: _mlflow("2.8.0", path) if who == "Bearer right" else (403, "")
    ) as url:
        probe(url)
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "wrong")
        with pytest.raises(TrackingUnusable, match=r"\(HTTP 403\); set .* MLFLOW_TRACKING_TOKEN"):
            probe(url)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda path, _: _mlflow("<html>", path), r"is MLflow of unknown version"),
        (lambda *_: (404, "no such page"), r"does not answer as an MLflow server does"),
        (
            lambda path, _: _mlflow("2.7.1", path),
            r"is MLflow 2\.7\.1; a sweep needs at least 2\.8; upgrade the server",
        ),
    ],
)
def test_unusable_server(answer: Callable[[str, str], tuple[int, str]], message: str) -> None:
    with _server(answer) as url, pytest.raises(TrackingUnusable, match=message):
        probe(url)


@pytest.mark.parametrize(
    ("uri", "remedy"),
    [
        ("localhost:5000", "write http://localhost:5000"),
        ("mlflow.lab:80/team", "write http://mlflow.lab:80/team"),
        ("mlflow.example", "write for example"),
        ("http//localhost:5000", "write for example"),
        ("http:/127.0.0.1:5000", "write for example"),
        ("https://", "write for example"),
        ("runs.db", "write for example"),
        ("mlruns", "write for example"),
        ("file:///tmp/mlruns", "write for example"),
        ("sqlite:runs.db", "write for example"),
        ("sqlite://", "write for example"),
        ("postgres://db/mlflow", "write for example"),
        ("databricks-uc", "write for example"),
        ("ftp://mlflow.lab", "write for example"),
    ],
)
def test_address_without_a_store(uri: str, remedy: str) -> None:
    with pytest.raises(TrackingUnusable) as refused:
        probe(uri, known=True)
    said = str(refused.value)
    assert said.startswith(f"tracking.uri: {uri} names no tracking store; it must begin with http")
    assert f"; {remedy}" in said
    assert "--offline" not in said


@pytest.mark.parametrize(
    ("uri", "cause"),
    [
        ("http://[::1", "Invalid IPv6 URL"),
        ("https://mlflow.example:80800", "Port out of range 0-65535"),
        (
            "postgresql+psycopg2://db:abc/mlflow",
            "Port could not be cast to integer value as 'abc'",
        ),
    ],
)
def test_address_that_cannot_be_parsed(uri: str, cause: str) -> None:
    with pytest.raises(TrackingUnusable) as refused:
        probe(uri, known=True)
    parts = (f"tracking.uri: {uri}", f"({cause})", "HOST:PORT", "https://mlflow.example")
    assert_parts(str(refused.value), *parts)


@pytest.mark.parametrize(
    "uri",
    [
        "databricks",
        "databricks://work",
        "databricks://scope:prefix",
        "mlruns",
        "file:///x",
        "lab:x",
        "lab://x",
    ],
)
def test_address_known_to_mlflow_but_not_probed(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    plugin = EntryPoint("lab", "lab:Store", "mlflow.tracking_store")
    monkeypatch.setattr("tracking.address.entry_points", lambda **_: EntryPoints([plugin]))
    probe(uri)


def test_no_command_accepts_an_address_without_a_store(cli: CommandLine) -> None:
    cli.write("tiny.yaml", TINY)
    for said in (
        cli("check", "tiny.yaml", "-s", "tracking.uri=localhost:5000"),
        cli("run", "tiny.yaml", "--offline", "--tracking-uri", "localhost:5000"),
    ):
        assert said.returncode == 2, said.stdout + said.stderr
        assert said.stderr.endswith(
            ": tracking.uri: localhost:5000 names no tracking store; it must begin with http://, "
            "https://, sqlite:///, postgresql://, mysql://, mssql:// or databricks; write "
            "http://localhost:5000\n"
        )
    assert not cli.root.exists()


def test_unusable_databases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrackingUnusable, match=r"does not exist; mkdir -p "):
        probe(f"sqlite:///{tmp_path}/missing/mlflow.db")
    probe(f"sqlite:///{tmp_path}/mlflow.db")
    assert not list(tmp_path.iterdir())
    with pytest.raises(TrackingUnusable) as refused:
        probe("mysql+nodriver://ada:hunter2@127.0.0.1:1/mlflow")
    assert "hunter2" not in str(refused.value)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(
        TrackingUnusable, match=r"import of psycopg.*; write postgresql\+psycopg2://, whose driver"
    ):
        probe("postgresql://127.0.0.1:1/mlflow")


def test_refused_connection_ends_run_before_it_starts(cli: CommandLine, nowhere: str) -> None:
    cli.write("tiny.yaml", TINY)
    done = cli("run", "tiny.yaml", "--tracking-uri", nowhere)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    place = f"--tracking-uri {nowhere}: tracking.uri: {nowhere}"
    cause = "([Errno 111] Connection refused); start the server"
    assert_parts(done.stderr, place, cause, "--offline", "`sweep sync`\n")
    assert not cli.root.exists()


def test_refusing_server_ends_run_before_it_starts(cli: CommandLine) -> None:
    cli.write("tiny.yaml", TINY)
    with _server(lambda *_: (401, "")) as url:
        done = cli("run", "tiny.yaml", "--tracking-uri", url)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr == (
        f"--tracking-uri {url}: tracking.uri: {url} refuses the credentials (HTTP 401); set "
        "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN in the "
        "environment, or run with --offline and deliver later with `sweep sync`\n"
    )
    assert not cli.root.exists()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tracking store, made by MLflow."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    make = f"from tracking.mlflow_server import connect; connect('sqlite:///{path}')"
    subprocess.run([sys.executable, "-c", make], cwd=ROOT, check=True, capture_output=True)
    return path


@pytest.mark.parametrize(
    ("revision", "remedy"),
    [
        pytest.param(
            "451aebb31d03",
            "take a backup of it and run: mlflow db upgrade 'sqlite:///{path}'",
            id="older",
        ),
        pytest.param("f" * 12, "install the MLflow version that created it", id="newer"),
    ],
)
def test_other_schema_version_is_unusable(
    store: Path, tmp_path: Path, revision: str, remedy: str
) -> None:
    """That `run` refuses it, too: `test_sweep_on_postgresql_and_after_mlflow_upgrade`."""
    path = tmp_path / "mlflow.db"
    shutil.copyfile(store, path)
    probe(f"sqlite:///{path}")  # as MLflow made it, it is usable
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE alembic_version SET version_num = ?", (revision,))
    with pytest.raises(TrackingUnusable) as refused:
        probe(f"sqlite:///{path}")
    parts = (f"its tables have revision {revision}, and MLflow ", f"; {remedy.format(path=path)}")
    assert_parts(str(refused.value), *parts)


@pytest.mark.chaos
def test_sync_delivers_an_offline_sweep_once(cli: CommandLine, nowhere: str) -> None:
    cli.write("tiny.yaml", TINY)
    done = cli("run", "tiny.yaml", "--offline", "--tracking-uri", nowhere)
    assert done.returncode == 0, done.stderr
    pending = cli.json("status", "small")["outbox_pending"]
    assert pending > 0
    assert "tracking does not have all of it yet; deliver the rest with: sweep sync" in done.stderr
    assert f"{pending} records are not delivered" in cli.ok("status", "small")
    no_effect_warning = cli("sync", "small")
    assert no_effect_warning.returncode == 2
    assert f"tracking.uri: {nowhere} does not answer" in no_effect_warning.stderr
    # The address was wrong: the records go elsewhere.
    no_store = cli("resume", "small", "--offline", "-s", "tracking.uri=localhost:5000")
    assert no_store.returncode == 2
    assert "tracking.uri: localhost:5000 names no tracking store" in no_store.stderr
    elsewhere = cli("resume", "small", "--offline", "-s", "tracking.uri=null")
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert f"changed: tracking.uri: {nowhere} -> null\n" in elsewhere.stderr
    assert cli.json("status", "small")["outbox_pending"] >= pending
    assert not (cli.root / "mlflow.db").exists()

    spec = (cli.root / "small/sweep.yaml").read_bytes()
    moved = cli("resume", "small", "-s", f"tracking.uri={nowhere}")
    assert moved.returncode == 2
    assert f"tracking.uri: {nowhere} does not answer" in moved.stderr
    assert (cli.root / "small/sweep.yaml").read_bytes() == spec

    lock = SweepLock(cli.root / "small/lock")
    lock.acquire()
    refused = cli("sync", "small")
    lock.release()
    assert refused.returncode == 4
    assert "already being run by process" in refused.stderr

    pending = cli.json("status", "small")["outbox_pending"]
    told = re.search(r"\bdelivered (\d+) records; 0 wait\n$", cli.ok("sync", "small"))
    assert told is not None
    assert int(told[1]) >= pending  # and the figures
    client = MlflowClient(f"sqlite:///{cli.root / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None

    def everything() -> dict[str, object]:
        return {
            str(run.info.run_name): (
                run.info.status,
                sorted(run.data.tags.items()),
                [
                    (m.key, m.step, m.value)
                    for key in sorted(run.data.metrics)
                    for m in client.get_metric_history(run.info.run_id, key)
                ],
            )
            for run in client.search_runs([experiment.experiment_id])
        }

    delivered = everything()
    assert sorted(delivered) == ["small", "trial-0000", "trial-0001"]
    assert cli.ok("sync", "small") == "delivered 0 records; 0 wait\n"
    assert everything() == delivered


def _recorded(store: Path, name: str) -> dict[str, object]:
    """What a store holds of a sweep, by the trial's number or its role."""
    client = MlflowClient(f"sqlite:///{store}")
    experiment = client.get_experiment_by_name(name)
    assert experiment is not None
    found: dict[str, object] = {}
    for run in client.search_runs([experiment.experiment_id]):
        points = {
            key: [
                (point.step, point.value)
                for point in client.get_metric_history(run.info.run_id, key)
            ]
            for key in run.data.metrics
        }
        files = {file.path for file in client.list_artifacts(run.info.run_id, "figures")}
        which = run.data.tags.get("gradsweep.trial", "sweep")
        assert which not in found, "a trial has one run"
        found[which] = run.info.status, points, run.data.params, files
    return found


@pytest.mark.chaos
def test_missing_or_replaced_store_receives_everything(cli: CommandLine) -> None:
    store, teams = cli.root / "mlflow.db", cli.directory / "team.db"
    cli.write("tiny.yaml", TINY)
    cli.ok("run", "tiny.yaml")
    cli.ok("sync", "small")
    before = _recorded(store, "small")
    assert before.keys() == {"sweep", "0", "1"}
    assert all(figures for _, _, _, figures in before.values())  # type: ignore[misc]

    store.unlink()
    cli.ok("resume", "small")
    cli.ok("sync", "small")
    assert store.exists()  # else this process' MLflow would go on reading the one that it knew
    assert _recorded(store, "small") == before

    MlflowClient(f"sqlite:///{teams}").create_experiment("of-somebody-else")
    cli.ok("resume", "small", "-s", f"tracking.uri=sqlite:///{teams}", "-s", "trials=3")
    cli.ok("sync", "small")
    found = _recorded(teams, "small")
    assert found.keys() == {"sweep", "0", "1", "2"}
    assert {number: found[number] for number in ("0", "1")} == {n: before[n] for n in ("0", "1")}
    assert _recorded(store, "small") == before
