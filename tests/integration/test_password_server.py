"""A real MLflow server with a login, configured like that of docker/."""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from ruamel.yaml import YAML

from tests.integration.commandline import wait_until
from tests.time_limits import scaled

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
_USER = "sweep"
_ROUTES = """
import json
from mlflow.server import app
from mlflow.server.auth import create_app
asgi = create_app()
print(json.dumps(sorted({
    *((method, rule.rule) for rule in app.url_map.iter_rules() for method in rule.methods),
    *((verb.upper(), path) for path, verbs in asgi.openapi()["paths"].items() for verb in verbs),
})))
"""
_PUBLIC = re.compile(r"/health|/static-files/.*|(/ajax-api|/api)/\d\.0/mlflow/server-info")
"""What docker/README.md says: whether it lives, its pages' files, and what this MLflow can do."""


class _Server(NamedTuple):
    url: str
    password: str
    environment: dict[str, str]

    def ask(self, path: str, method: str = "GET", password: str = "") -> int:
        """The status of the answer."""
        headers = {"Content-Type": "application/json"}
        if password:
            who = base64.b64encode(f"{_USER}:{password}".encode()).decode()
            headers["Authorization"] = f"Basic {who}"
        data = b"{}" if method in ("POST", "PUT", "PATCH") else None
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=scaled(20)) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Server]:
    directory = tmp_path_factory.mktemp("server")
    compose = YAML(typ="safe").load((ROOT / "docker" / "compose.yaml").read_text("utf-8"))
    password = secrets.token_hex(16)
    settings = directory / "auth.ini"
    settings.write_text(
        "[mlflow]\n"
        "default_permission = NO_PERMISSIONS\n"
        f"database_uri = sqlite:///{directory}/auth.db\n"
        f"admin_username = {_USER}\n"
        f"admin_password = {password}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    environment = {
        **os.environ,
        **compose["services"]["mlflow"]["environment"],
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32),
        "MLFLOW_AUTH_CONFIG_PATH": str(settings),
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{directory}/mlflow.db",
    }
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    kept = ["--serve-artifacts", "--artifacts-destination", str(directory / "artifacts")]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", *place, *kept],
        env=environment,
        cwd=directory,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    running = _Server(f"http://127.0.0.1:{port}", password, environment)

    def answers() -> bool:
        try:
            return running.ask("/health") == 200
        except OSError:
            return False

    try:
        wait_until(answers, seconds=120)
        yield running
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_only_public_routes_answer_without_password(server: _Server) -> None:
    printed = subprocess.run(
        [sys.executable, "-c", _ROUTES],
        env=server.environment | {"_MLFLOW_SGI_NAME": "uvicorn"},  # else Flask's part alone
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    routes = [
        (method, re.sub(r"<[^>]*>|{[^}]*}", "1", path))
        for method, path in json.loads(printed.splitlines()[-1])
        if method not in ("HEAD", "OPTIONS") and not _PUBLIC.fullmatch(path)
    ]
    assert len(routes) > 100
    open_to_all = {
        route: status for route in routes if (status := server.ask(route[1], route[0])) != 401
    }
    assert not open_to_all
    search = "/api/2.0/mlflow/experiments/search?max_results=1"
    assert server.ask(search, password="another") == 401
    assert server.ask(search, password=server.password) == 200
