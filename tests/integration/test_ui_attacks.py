"""Attacks of other users of the machine on the server of `sweep ui`.

What must not live here: what its pages show (`test_sweep.py`).
"""

from __future__ import annotations

import itertools
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.cookies import SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from tests.integration.browser import open_page, require_chromium
from tracking.mlflow_server import connect
from tracking.ui import UiServer, runs_page, start_server
from tracking.ui_artifacts import below

pytestmark = pytest.mark.integration

SECRET = "what only the owner may read"
V2 = "/ajax-api/2.0/mlflow"


@dataclass
class Target:
    """A server on a store with one run; `foreign` is a run whose artifacts lie elsewhere."""

    server: UiServer
    root: Path
    outside: Path
    run: Run
    foreign: Run
    cookie: str

    def ask(
        self, path: str, body: object = None, *, method: str | None = None, **headers: str
    ) -> tuple[int, str]:
        """Status and text of an answer, as the owner's browser gets it."""
        return ask(self.server, path, body, method=method, Cookie=self.cookie, **headers)


def ask(
    server: UiServer, path: str, body: object = None, *, method: str | None = None, **headers: str
) -> tuple[int, str]:
    """Status and text of an answer to anybody."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        server.url + path,
        data,
        headers={"Content-Type": "application/json", **headers},
        method=method,
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode(errors="replace")


def _log_in(server: UiServer) -> str:
    link = urlsplit(server.link(server.url))
    with urllib.request.urlopen(f"{server.url}{link.path}?{link.query}") as answer:
        (header,) = answer.headers.get_all("Set-Cookie")
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
    (morsel,) = SimpleCookie(header).values()
    assert morsel["httponly"]
    assert morsel["samesite"] == "Strict"
    return f"{morsel.key}={morsel.value}"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    root, outside = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("outside")
    (outside / "id_rsa").write_text(SECRET)
    uri = f"sqlite:///{root}/mlflow.db"
    client = connect(uri)
    artifacts = root / "mlartifacts"
    runs = []
    for name, place in [("own", artifacts / "own"), ("foreign", outside)]:
        experiment = client.create_experiment(name, artifact_location=place.as_uri())
        runs.append(client.create_run(experiment))
    own, foreign = runs
    client.log_text(own.info.run_id, "read me", "notes/own.txt")
    planted = Path(urlsplit(foreign.info.artifact_uri).path)
    planted.mkdir(parents=True)
    (planted / "planted.txt").write_text(SECRET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DEPLOYMENTS_TARGET", "http://127.0.0.1:1")
        server = start_server(uri, artifacts)
    with server:
        yield Target(server, root, outside, own, foreign, _log_in(server))


PATHS: list[tuple[str, object]] = [
    ("/", None),
    ("/?login=", None),
    ("/?login=wrong", None),
    ("/?login=%C3%A4", None),
    ("/sweep", None),
    ("/sweep?login=wrong", None),
    ("/health", None),
    ("/version", None),
    ("/static-files/manifest.json", None),
    ("/get-artifact?run_uuid=x&path=notes/own.txt", None),
    ("/model-versions/get-artifact?name=m&version=1&path=x", None),
    (f"{V2}/experiments/search?max_results=1", None),
    ("/api/2.0/mlflow/experiments/search?max_results=1", None),
    ("/api/2.0/mlflow-artifacts/artifacts", None),
    ("/ajax-api/3.0/mlflow/server-info", None),
    ("/nowhere", None),
    (f"{V2}/experiments/create", {"name": "a", "artifact_location": "file:///tmp/a"}),
    (f"{V2}/upload-artifact?run_uuid=x&path=authorized_keys", {}),
    ("/api/2.0/mlflow/runs/create", {"experiment_id": "0"}),
    ("/graphql", {"query": "{__typename}"}),
]


def test_client_without_the_link_gets_nothing(target: Target) -> None:
    name = target.cookie.partition("=")[0]
    forged = ["", f"{name}=", f"{name}=wrong", f"other{target.cookie}", f"{target.cookie}x"]
    for (path, body), cookie in itertools.product(PATHS, forged):
        status, text = ask(target.server, path, body, Cookie=cookie)
        assert status == 401, (path, text)
        assert "the link that sweep ui printed" in text


def test_client_without_the_link_changes_nothing(target: Target) -> None:
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
        path = "/api/2.0/mlflow-artifacts/artifacts/own/x"
        assert ask(target.server, path, {}, method=method)[0] == 401


def test_login_is_not_visible_to_others(target: Target, tmp_path: Path) -> None:
    (login,) = parse_qs(urlsplit(target.server.link(target.server.url)).query)["login"]
    assert len(login) >= 43
    server = psutil.Process(target.server.pid)
    for process in (server, *server.children(recursive=True)):
        assert login not in " ".join(process.cmdline())
    assert login not in target.server.output()
    redirect = target.server.redirect_file(tmp_path, target.server.url)
    assert login in redirect.read_text()
    assert redirect.stat().st_mode & 0o777 == 0o600


REFUSED: list[tuple[str, str, object]] = [
    ("POST", "experiments/create", {"name": "b", "artifact_location": "file:///tmp"}),
    ("POST", "experiments/create", {"name": "c"}),
    ("POST", "runs/create", {"experiment_id": "1"}),
    ("POST", "registered-models/create", {"name": "m"}),
    ("POST", "model-versions/create", {"name": "m", "source": "file:///etc"}),
    ("POST", "upload-artifact?run_uuid=x&path=y", {}),
    ("POST", "logged-models", {"experiment_id": "1"}),
    ("POST", "runs/log-batch", {"run_id": "x"}),
    ("POST", "runs/log-model", {"run_id": "x"}),
    ("POST", "gateway-proxy", {"gateway_path": "x"}),
    ("POST", "webhooks", {"url": "http://127.0.0.1:1"}),
    ("POST", "artifacts/presigned-upload-url", {}),
    ("PATCH", "traces/x/tags", {"key": "mlflow.artifactLocation", "value": "file:///etc"}),
    ("PUT", "/ajax-api/2.0/mlflow-artifacts/artifacts/own/x", {}),
    ("DELETE", "/ajax-api/2.0/mlflow-artifacts/artifacts/own", None),
    ("POST", "/ajax-api/2.0/mlflow-artifacts/mpu/create/own/x", {}),
    ("GET", "/api/2.0/mlflow/experiments/search?max_results=1", None),
    ("POST", "/ajax-api/3.0/mlflow/gateway/secrets/create", {}),
    ("POST", "/ajax-api/3.0/mlflow/assistant/message", {}),
    ("POST", "/v1/traces", {}),
    ("DELETE", "/", None),
]


def test_owner_can_only_read_and_edit(target: Target) -> None:
    for method, place, body in REFUSED:
        path = place if place.startswith("/") else f"{V2}/{place}"
        status, text = target.ask(path, body, method=method)
        assert status == 403, (method, path, text)
        assert f"{method} {path.partition('?')[0]} is refused" in text


def test_server_requests_no_other_server(target: Target) -> None:
    path = f"{V2}/gateway-proxy?gateway_path=api%2F2.0%2Fendpoints%2F"
    status, text = target.ask(path)
    assert (status, json.loads(text)) == (200, {"endpoints": []})


def test_edits_of_the_owner_are_kept(target: Target) -> None:
    run_id = target.run.info.run_id
    tag = {"run_id": run_id, "key": "mlflow.note.content", "value": "good"}
    assert target.ask(f"{V2}/runs/set-tag", tag)[0] == 200
    assert target.ask(f"{V2}/runs/update", {"run_id": run_id, "run_name": "renamed"})[0] == 200
    assert target.ask(f"{V2}/runs/delete", {"run_id": run_id})[0] == 200
    assert target.ask(f"{V2}/runs/restore", {"run_id": run_id})[0] == 200
    run = json.loads(target.ask(f"{V2}/runs/get?run_id={run_id}")[1])["run"]
    assert run["info"]["run_name"] == "renamed"
    assert {"key": "mlflow.note.content", "value": "good"} in run["data"]["tags"]


def test_cross_origin_pages_are_refused(target: Target) -> None:
    """The cookie's site is the host; its port does not count."""
    search = f"{V2}/experiments/search?max_results=1"
    own = {"Origin": target.server.url, "Sec-Fetch-Site": "same-origin"}
    assert target.ask(search, **own)[0] == 200
    assert target.ask(search, Origin="http://127.0.0.1:1")[0] == 403
    assert target.ask(search, Origin="null")[0] == 403
    assert target.ask(search, **{"Sec-Fetch-Site": "same-site"})[0] == 403
    assert target.ask(search, **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    for path in (search, "/health", "/sweep"):
        assert target.ask(path, Host="evil.example")[0] == 403


def _listed(target: Target, run: Run, path: str = "") -> tuple[int, list[str]]:
    where = f"&path={path}" if path else ""
    status, text = target.ask(f"{V2}/artifacts/list?run_id={run.info.run_id}{where}")
    found = json.loads(text).get("files", []) if status == 200 else []
    return status, [file["path"] for file in found]


def _read(target: Target, run: Run, path: str) -> tuple[int, str]:
    return target.ask(f"/get-artifact?run_uuid={run.info.run_id}&path={path}")


def test_artifacts_below_the_root_are_served(target: Target) -> None:
    assert "notes" in _listed(target, target.run)[1]
    assert _listed(target, target.run, "notes")[1] == ["notes/own.txt"]
    assert _read(target, target.run, "notes/own.txt") == (200, "read me")
    assert _read(target, target.run, "notes/none.txt")[0] == 404


def test_artifacts_outside_the_root_are_not_served(target: Target) -> None:
    status, text = _read(target, target.foreign, "planted.txt")
    assert status >= 400
    assert SECRET not in text
    assert _listed(target, target.foreign)[1] == []
    assert SECRET not in _read(target, target.run, "../../../../outside/id_rsa")[1]


@pytest.mark.parametrize("place", ["file", "folder", "artifacts"])
def test_symlink_among_artifacts_is_not_followed(target: Target, place: str) -> None:
    artifacts = Path(urlsplit(target.run.info.artifact_uri).path)
    if place == "file":
        planted, path = artifacts / "link.txt", "link.txt"
        planted.symlink_to(target.outside / "id_rsa")
    elif place == "folder":
        planted, path = artifacts / "link", "link/id_rsa"
        planted.symlink_to(target.outside)
    else:
        artifacts.rename(artifacts.with_name("kept"))
        planted, path = artifacts, "id_rsa"
        planted.symlink_to(target.outside)
    try:
        status, text = _read(target, target.run, path)
        assert status >= 400
        assert SECRET not in text
        assert path not in _listed(target, target.run, path.rpartition("/")[0])[1]
        assert planted.name not in _listed(target, target.run)[1]
        query = "query($r: String!){mlflowListArtifacts(input:{runId:$r}){files{path}}}"
        body = {"query": query, "variables": {"r": target.run.info.run_id}}
        assert "id_rsa" not in target.ask("/graphql", body)[1]
    finally:
        planted.unlink()
        if place == "artifacts":
            artifacts.with_name("kept").rename(artifacts)


def test_artifacts_are_served_through_a_linked_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "own").mkdir(parents=True)
    (root / "own/a.txt").write_text("a")
    os.mkfifo(root / "own/fifo")
    (tmp_path / "other name").symlink_to(root)
    (tmp_path / "outside").mkdir()
    reader = below(root)
    for place in (root / "own", tmp_path / "other name/own"):
        assert [file.path for file in reader(place.as_uri()).list_artifacts()] == ["a.txt"]
    own = reader("mlflow-artifacts:/own")
    assert Path(own.download_artifacts("a.txt", str(tmp_path / "outside"))).read_text() == "a"
    with pytest.raises(MlflowException, match="is no regular file"):
        own._download_file("fifo", str(tmp_path / "copy"))
    for away in ("../../outside", "/etc/passwd", "own/../.."):
        with pytest.raises(MlflowException, match="is no path below"):
            own._download_file(away, str(tmp_path / "copy"))
    with pytest.raises(MlflowException, match="only reads"):
        own.log_artifact(str(root / "own/a.txt"), "b")
    for uri in ((tmp_path / "outside").as_uri(), "file:///", f"{root}/../outside", "relative"):
        with pytest.raises(MlflowException, match="is not below"):
            reader(uri)


@pytest.mark.browser
def test_link_opens_its_page_and_drops_the_token(target: Target, tmp_path: Path) -> None:
    require_chromium()
    experiment = target.run.info.experiment_id
    page_of_runs = runs_page(target.server.url, experiment, "loss", ascending=True)
    for address in (
        target.server.link(page_of_runs),
        target.server.redirect_file(
            tmp_path, page_of_runs
        ).as_uri(),  # another site to the browser
    ):
        with open_page(address) as page:
            page.wait_for_url(lambda url: "orderByKey" in url and "login" not in url)
            page.get_by_text("1 matching run").first.wait_for()
            assert "login" not in page.url
            assert "is refused" not in page.inner_text("body"), "what the page needs is allowed"
            assert page.evaluate("document.cookie") == ""
