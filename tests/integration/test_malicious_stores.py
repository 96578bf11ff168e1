"""A sweep directory of an attacker names the attacker's stores: no command connects, and each
names the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sweeps.cli.app import app
from tests.integration.malicious_store import FOREIGN, MaliciousStore
from tests.slices import sliced
from tests.unit.sweeps.sweep_factory import MadeSweep

PASSWORD = "canary-of-a-password"
LOOKING = {
    "list": (["list"], 0),
    "status": (["status", "small"], 2),
    "trials": (["trials", "small"], 2),
    "show": (["show", "small", "0"], 2),
    "best": (["best", "small"], 2),
    "compare": (["compare", "small"], 2),
    "report": (["report", "small"], 2),
    "sync": (["sync", "small"], 2),
    "stop": (["stop", "small"], 2),
    "resume": (["resume", "small"], 2),
    "resume --offline": (["resume", "small", "--offline"], 2),
    "register": (["best", "small", "--register", "model"], 2),
    "ui": (["ui", "small", "--no-open"], 2),
}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MaliciousStore]:
    monkeypatch.chdir(tmp_path)
    for name in ("PGPASSWORD", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.setenv(name, PASSWORD)
    monkeypatch.setenv("PGUSER", "ada")
    with MaliciousStore() as store:
        yield store


def invoke(root: Path, *line: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*line, "--root", str(root)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


def tracked_by(store: MaliciousStore, form: str = "postgresql+psycopg2://{0}/x") -> str:
    return f'tracking: {{uri: "{form.format(f"{FOREIGN}:{store.port}", port=store.port)}"}}'


FORMS = {
    "plain": "postgresql+psycopg2://{0}/x",
    "user": "postgresql+psycopg2://ada@{0}/x",
    "after a loopback": "postgresql+psycopg2://127.0.0.1:1,{0}/x",
    "option": "postgresql+psycopg2://127.0.0.1:{port}/x?host=127.1",
    "address": "postgresql+psycopg2://localhost:{port}/x?hostaddr=0.0.0.0",
    "escaped": "postgresql+psycopg2://127%2e1:{port}/x",
    "loopback, in clear": "postgresql+psycopg2://127.0.0.1:{port}/x?require_auth=password",
}


@pytest.mark.parametrize("form", sliced(FORMS, ("option", "escaped").__contains__))
def test_no_form_of_address_hides_a_host(
    planted: MaliciousStore, tmp_path: Path, form: str
) -> None:
    MadeSweep(tmp_path, more=tracked_by(planted, FORMS[form])).add("complete", 0.5)
    done, said = invoke(tmp_path, "sync", "small")
    assert planted.heard == []
    assert (done, "have not named" in said) == (2, True), said


def test_local_server_gets_no_password_in_clear(planted: MaliciousStore, tmp_path: Path) -> None:
    uri = f"postgresql+psycopg2://127.0.0.1:{planted.port}/x"
    MadeSweep(tmp_path, more=f"tracking: {{uri: '{uri}'}}").add("complete", 0.5)
    assert invoke(tmp_path, "sync", "small")[0] != 0
    assert planted.heard
    assert not any(PASSWORD.encode() in heard for heard in planted.heard)


@pytest.mark.parametrize("foreign", ["sweep.yaml", "directory"])
@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_other_users_sweep_reaches_no_trusted_store(
    planted: MaliciousStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: str
) -> None:
    for host in (FOREIGN, "127.0.0.1"):
        uri = f"postgresql+psycopg2://{host}:{planted.port}/x"
        monkeypatch.setenv("SWEEP_TRUSTED_STORES", uri)
        sweep = MadeSweep(tmp_path / host, more=f'tracking: {{uri: "{uri}"}}')
        sweep.add("complete", 0.5)
        theirs = sweep.paths.spec if foreign == "sweep.yaml" else sweep.paths.directory
        os.chown(theirs, 54321, 54321)
        done, said = invoke(tmp_path / host, "sync", "small")
        assert planted.heard == []
        assert (done, "belongs to user 54321" in said) == (2, True), said


@pytest.mark.parametrize(
    "command", sliced(["sync", "resume", "register", "ui", "doctor"], ("sync", "ui").__contains__)
)
def test_no_command_connects_to_planted_tracking_server(
    planted: MaliciousStore, tmp_path: Path, command: str
) -> None:
    uri = f"http://{FOREIGN}:{planted.port}"
    MadeSweep(tmp_path, more=f"tracking: {{uri: '{uri}'}}").add("complete", 0.5)
    line, code = LOOKING.get(command, (["doctor"], None))
    done, said = invoke(tmp_path, *line)
    assert planted.heard == []
    assert code is None or done == code
    assert f"{uri} is a store that you have not named" in said


@pytest.mark.parametrize("scheme", ["http", "postgresql+psycopg2"])
def test_no_process_opens_a_planted_tracking_store(planted: MaliciousStore, scheme: str) -> None:
    """Whatever came before: an address in a child's input is checked where it is opened."""
    from tracking.mlflow_server import connect
    from tracking.store_reader import open_reader
    from tracking.trusted_stores import StoreUntrusted

    uri = f"{scheme}://{FOREIGN}:{planted.port}/x"
    with pytest.raises(StoreUntrusted):
        open_reader(uri, "digits", None).runs("5f3a")
    with pytest.raises(StoreUntrusted):
        connect(uri).search_experiments()
    assert planted.heard == []


def test_planted_database_sends_no_artifacts_to_its_hosts(
    planted: MaliciousStore, tmp_path: Path
) -> None:
    from tracking.mlflow_server import MlflowServer, connect
    from tracking.trusted_stores import StoreUntrusted

    uri, file = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "figure.png"
    file.write_bytes(b"x")
    client = connect(uri)
    for scheme in ("http", "mlflow-artifacts"):
        where = f"{scheme}://{FOREIGN}:{planted.port}/api/2.0/mlflow-artifacts/artifacts/x"
        experiment = client.create_experiment(scheme, artifact_location=where)
        run = client.create_run(experiment).info.run_id
        server = MlflowServer(uri, None, scheme, "id")
        with pytest.raises(StoreUntrusted):
            server.upload(run, file, "")
    assert planted.heard == []


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_spec_file_names_stores_if_owned_by_the_user(
    planted: MaliciousStore, tmp_path: Path
) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(MadeSweep(tmp_path / "made", more=tracked_by(planted)).spec.to_yaml())
    for owner, mode in ((54321, 0o644), (0, 0o666)):
        os.chown(file, owner, owner)
        file.chmod(mode)
        done, said = invoke(tmp_path, "run", str(file))
        assert planted.heard == []
        assert (done, "have not named" in said) == (2, True), said
    file.chmod(0o644)
    done, said = invoke(tmp_path, "run", str(file))
    assert (done, "does not support SSL" in said) == (2, True), said
    assert planted.heard
    assert not any(PASSWORD.encode() in heard for heard in planted.heard)
    before = len(planted.heard)
    invoke(tmp_path / "made", "sync", "small")
    assert len(planted.heard) > before, "what was named is remembered"


def test_no_token_is_sent_over_http_to_a_named_server(
    planted: MaliciousStore, tmp_path: Path
) -> None:
    spec = MadeSweep(tmp_path / "made").spec
    file = tmp_path / "own.yaml"
    file.write_text(spec.to_yaml())
    uri = f"http://{FOREIGN}:{planted.port}"
    done, said = invoke(tmp_path, "run", str(file), "--tracking-uri", uri)
    assert planted.heard == []
    assert (done, "no password or token goes over http://" in said) == (2, True), said
    assert not (tmp_path / "small").exists()
    assert CliRunner().invoke(app, ["doctor", "--trust", uri]).exit_code == 0
    assert invoke(tmp_path, "run", str(file), "--tracking-uri", uri)[0] == 2
    assert any(PASSWORD.encode() in heard for heard in planted.heard)  # as was allowed


def test_planted_object_store_is_not_contacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sweeps.stores import probe_store, trial_files
    from tracking.trusted_stores import StoreUntrusted

    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    sweep = MadeSweep(tmp_path, more="storage: {checkpoints: 's3://attacker/x'}")
    for ask in (
        lambda: probe_store(sweep.paths, sweep.spec, new=False),
        lambda: trial_files(sweep.paths, sweep.spec, 0),
    ):
        with pytest.raises(StoreUntrusted, match="sweep doctor --trust s3://attacker"):
            ask()
