"""An unusable tracking address is refused before anything exists; an offline sweep ignores it, and
`sweep sync` delivers later.
"""

from __future__ import annotations

import base64
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


def test_address_without_a_store() -> None:
    for uri, remedy in (
        ("localhost:5000", "write http://localhost:5000"),
        ("mlflow.lab:80/team", "write http://mlflow.lab:80/team"),
        ("http//localhost:5000", "write for example"),
        ("http:/127.0.0.1:5000", "write for example"),
        ("https://", "write for example"),
        ("mlruns", "write for example"),
        ("file:///tmp/mlruns", "write for example"),
        ("sqlite:runs.db", "write for example"),
        ("sqlite://", "write for example"),
        ("postgres://db/mlflow", "write for example"),
        ("databricks-uc", "write for example"),
    ):
        with pytest.raises(TrackingUnusable) as refused:
            probe(uri, known=True)
        said = str(refused.value)
        assert said.startswith(
            f"tracking.uri: {uri} names no tracking store; it must begin with http"
        )
        assert f"; {remedy}" in said
        assert "--offline" not in said


def test_address_that_cannot_be_parsed() -> None:
    number = "Port could not be cast to integer value as 'abc'"
    for uri, cause in (
        ("http://[::1", "Invalid IPv6 URL"),
        ("https://mlflow.example:80800", "Port out of range 0-65535"),
        ("postgresql+psycopg2://db:abc/mlflow", number),
    ):
        with pytest.raises(TrackingUnusable) as refused:
            probe(uri, known=True)
        parts = (f"tracking.uri: {uri}", f"({cause})", "HOST:PORT", "https://mlflow.example")
        assert_parts(str(refused.value), *parts)


def test_address_known_to_mlflow_but_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    plugin = EntryPoint("lab", "lab:Store", "mlflow.tracking_store")
    monkeypatch.setattr("tracking.address.entry_points", lambda **_: EntryPoints([plugin]))
    for uri in ("databricks", "databricks://scope:prefix", "mlruns", "file:///x", "lab://x"):
        probe(uri)


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
