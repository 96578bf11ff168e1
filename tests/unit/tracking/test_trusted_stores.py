"""Which stores get credentials, and who grants that trust."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tracking.address import is_file, is_local, origin_of
from tracking.trusted_stores import (
    StoreUntrusted,
    TrustFileRefused,
    add_trusted,
    check_artifacts,
    check_trusted,
    remove_trusted,
    secured,
    trust_file,
    trusted,
)

DB = "postgresql://db.example/sweeps"


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("PG", "MLFLOW_", "AWS_", "NETRC")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:////home/ada/mlflow.db",
        "/home/ada/mlruns",
        "http://127.0.0.1:5000",
        "http://[::1]:5000/mlflow",
        "https://localhost",
        "postgresql://127.0.0.1:5433,localhost/sweeps",
        "postgresql+psycopg2://ada@/sweeps?host=/run/postgresql",
        "postgresql://%2Frun%2Fpostgresql/sweeps?connect_timeout=3",
        "postgresql:///sweeps",
        "postgresql+psycopg2://ada@/sweeps?host=127.0.0.1:1&host=/run/postgresql:5432",
    ],
)
def test_local_stores_need_no_trust(uri: str) -> None:
    assert is_local(uri)
    check_trusted(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "https://mlflow.example",
        "https://127.0.0.1.evil.example",
        "https://127.0.0.1@evil.example",
        "https://127.0.0.1#@evil.example",
        "https://evil.example\\@127.0.0.1",
        "https://evil.example?@127.0.0.1",
        "http://127.1",
        "http://0.0.0.0",
        "http://localhost.evil.example",
        "http://%2Fx.evil.example",
        "http://localhost%3A80",
        "http://,localhost",
        "http://localhost,127.0.0.1",
        "mysql+pymysql://%2fx.evil.example/x",
        "postgresql://%2Fx.evil.example/x",
        "HTTP://evil.example",
        "postgresql://127.0.0.1:1,evil.example:2/x",
        "postgresql://127.0.0.1,evil.example/x",
        "postgresql://127.0.0.1/x?host=evil.example",
        "postgresql://127.0.0.1/x?%68ost=evil.example",
        "postgresql://127.0.0.1/x?hostaddr=192.0.2.1",
        "postgresql://127.0.0.1/x?service=production",
        "postgresql://127.0.0.1/x?require_auth=password",
        "postgresql://127.0.0.1#@evil.example/x",
        "postgresql://a@127.0.0.1@evil.example/x",
        "mysql+pymysql://127.0.0.1/x?host=evil.example",
        "mssql+pyodbc:///?odbc_connect=Server%3Devil.example",
        "sqlite+libsql:///x.db?sync_url=https://evil.example",
        "plugin://evil.example",
        "plugin:evil.example",
        "s3://bucket/sweeps",
    ],
)
def test_no_remote_address_passes_as_local(uri: str) -> None:
    assert not is_local(uri)
    with pytest.raises(StoreUntrusted, match=r"nothing was connected to; "):
        check_trusted(uri)


@pytest.mark.parametrize("uri", ["databricks", "databricks-uc", "uc"])
def test_pg_service_is_no_file(uri: str) -> None:
    assert not is_file(uri)
    assert not is_local(uri)


def test_trust_covers_host_port_and_options() -> None:
    add_trusted("postgresql+psycopg2://ada@DB.example/sweeps")
    check_trusted("postgresql://eve@db.example:5432/others")
    for other in ("db.example:5433/x", "db.example/x?sslmode=disable", "db.example.evil/x"):
        with pytest.raises(StoreUntrusted):
            check_trusted(f"postgresql://{other}")
    with pytest.raises(StoreUntrusted):
        check_trusted("https://db.example:5432")
    assert remove_trusted(DB)
    assert not remove_trusted(DB)
    with pytest.raises(StoreUntrusted):
        check_trusted(DB)


def test_environment_variable_grants_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://ada:x@mlflow.example")
    check_trusted("https://mlflow.example/")
    monkeypatch.setenv("SWEEP_TRUSTED_STORES", f"http://mlflow:5000 {DB}")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "canary")
    check_trusted("http://mlflow:5000")
    check_trusted(DB)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://minio.example")
    check_trusted("s3://bucket/sweeps")
    monkeypatch.setenv("PGHOST", "other.example")
    check_trusted("postgresql:///sweeps")


def test_password_goes_over_http_only_if_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    uri = "http://mlflow.example:5000"
    add_trusted(uri)
    check_trusted(uri)  # nothing to send
    refused = pytest.raises(StoreUntrusted, match="no password or token goes over http://")
    for name in ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"):
        with monkeypatch.context() as patch, refused:
            patch.setenv(name, "canary")
            check_trusted(uri)
    file = tmp_path / ".netrc"
    file.write_text("machine mlflow.example login ada password canary\n")
    file.chmod(0o600)
    with refused:
        check_trusted(uri)
    file.unlink()
    (tmp_path / ".mlflow").mkdir()
    (tmp_path / ".mlflow/credentials").write_text("[mlflow]\n")
    with refused:
        check_trusted(uri)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with refused:
        check_trusted(uri)
    add_trusted(uri, explicit=True)
    check_trusted(uri)
    assert trusted() == [f"{uri} unencrypted"]


def test_trust_file_is_private(tmp_path: Path) -> None:
    add_trusted(DB)
    path = trust_file()
    assert path == tmp_path / "config/gradsweep/trusted-stores"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    for one, mode in ((path, 0o620), (path, 0o602), (path.parent, 0o720)):
        before = one.stat().st_mode & 0o777
        one.chmod(mode)
        with pytest.raises(TrustFileRefused, match=r"chmod [67]00"):
            check_trusted(DB)
        with pytest.raises(TrustFileRefused):
            add_trusted("https://other.example")
        one.chmod(before)
    check_trusted(DB)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(TrustFileRefused):
        check_trusted(DB)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("of", ["file", "directory"])
def test_trust_file_of_another_user_is_ignored(of: str) -> None:
    add_trusted(DB)
    path = trust_file()
    os.chown(path if of == "file" else path.parent, 54321, 54321)
    with pytest.raises(TrustFileRefused, match="owner 54321"):
        check_trusted(DB)


def test_user_without_home_trusts_no_file_in_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CONFIG_HOME")
    for home in ("~", "."):
        monkeypatch.setenv("HOME", home)
        for there in (".config", "~/.config"):
            (tmp_path / there / "gradsweep").mkdir(parents=True, exist_ok=True, mode=0o700)
            (tmp_path / there / "gradsweep/trusted-stores").write_text(f"{DB}\n")
            (tmp_path / there / "gradsweep").chmod(0o700)
            (tmp_path / there / "gradsweep/trusted-stores").chmod(0o600)
        with pytest.raises(StoreUntrusted):
            check_trusted(DB)
        with pytest.raises(TrustFileRefused, match="SWEEP_TRUSTED_STORES="):
            add_trusted("https://other.example")


def test_unwritable_trust_file_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("in the way")
    with pytest.raises(TrustFileRefused, match=r"SWEEP_TRUSTED_STORES=postgresql://db.example"):
        add_trusted(DB)


def test_remote_postgresql_needs_tls_and_no_clear_password(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def options(uri: str) -> dict[str, list[str]]:
        return parse_qs(urlsplit(secured(uri)).query)

    asked = "scram-sha-256,gss,sspi,none"
    assert options(DB) == {"require_auth": [asked], "sslmode": ["require"]}
    assert options("postgresql+psycopg2://u@127.0.0.1/x") == {"require_auth": [asked]}
    assert options(f"{DB}?sslmode=disable&require_auth=md5") == {
        "sslmode": ["disable"],
        "require_auth": ["md5"],
    }
    monkeypatch.setenv("PGHOST", "db.example")
    assert options("postgresql:///x")["sslmode"] == ["require"]
    (tmp_path / ".postgresql").mkdir()
    (tmp_path / ".postgresql/root.crt").touch()
    assert options(DB)["sslmode"] == ["verify-full"]
    monkeypatch.setenv("PGSSLMODE", "prefer")
    assert "sslmode" not in options(DB)
    assert secured("sqlite:///x.db") == "sqlite:///x.db"


def test_postgresql_driver_accepts_the_added_options() -> None:
    psycopg2 = pytest.importorskip("psycopg2")
    with pytest.raises(psycopg2.OperationalError, match="Connection refused"):
        psycopg2.connect(secured("postgresql://u@127.0.0.1:1/x"))


def test_artifact_root_is_taken_from_servers_only() -> None:
    check_artifacts("https://mlflow.example", "s3://bucket/artifacts")
    check_artifacts("sqlite:///x.db", "file:///tmp/artifacts")
    check_artifacts("sqlite:///x.db", "mlflow-artifacts:/1/x")
    for place in ("s3://bucket/x", "http://evil.example/x", "mlflow-artifacts://evil.example/x"):
        with pytest.raises(StoreUntrusted):
            check_artifacts("sqlite:///x.db", place)


def test_address_adds_no_line_to_the_file() -> None:
    for uri in ("https://a.example/\nhttps://evil.example", "https://a.example https://b.example"):
        add_trusted(uri)
    assert trusted() == []


def test_message_contains_no_control_characters() -> None:
    with pytest.raises(StoreUntrusted) as caught:
        check_trusted("https://evil\x1b[2J.example")
    assert "\x1b" not in str(caught.value)


def test_ambiguous_address_is_trusted_only_literally() -> None:
    assert origin_of("https://a.example/x") == "https://a.example:443"
    assert origin_of("https://a.example#@b.example/x") == "https://a.example#@b.example/x"
