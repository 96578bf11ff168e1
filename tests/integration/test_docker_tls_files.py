"""The TLS files of docker/ without an engine: certificates, and the services that get them.

The stack itself is built and run by `tests/chaos/test_containers_tls.py`.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from ruamel.yaml import YAML

DOCKER = Path(__file__).parents[2] / "docker"
PREFIX = "10.20.30"
CLIENTS_TOO = {"ray_head", "ray_worker"}


def _load(name: str) -> Any:
    text = (DOCKER / name).read_text(encoding="utf-8")
    return YAML(typ="safe").load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


def _make(directory: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [DOCKER / "make-certificates.sh"],
        env={"PATH": os.environ["PATH"], "SECRETS": str(directory), **settings},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("secrets")
    ended = _make(directory, CLUSTER_PREFIX=PREFIX)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return directory


def _certificate(directory: Path, service: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((directory / f"tls_{service}_cert").read_bytes())


def _names(certificate: x509.Certificate) -> set[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


@pytest.fixture(scope="module")
def override() -> Any:
    return _load("compose.tls.yaml")


def test_authority_key_is_not_kept(made: Path) -> None:
    services = ("mlflow", "postgres", "ray_head", "ray_worker")
    expected = {f"tls_{service}_{kind}" for service in services for kind in ("cert", "key")}
    assert {path.name for path in made.iterdir()} == {"tls_ca", *expected}
    assert {stat.S_IMODE(path.stat().st_mode) for path in made.iterdir()} == {0o444}
    authority = ssl.create_default_context(cafile=made / "tls_ca")
    for service in services:  # no other key belongs to the authority's certificate
        with pytest.raises(ssl.SSLError, match="KEY_VALUES_MISMATCH"):
            authority.load_cert_chain(made / "tls_ca", made / f"tls_{service}_key")


def test_certificate_is_short_lived_and_for_one_service(made: Path) -> None:
    names = {
        "mlflow": {"mlflow"},
        "postgres": {"postgres"},
        "ray_head": {"gcs", f"{PREFIX}.2"},
        "ray_worker": set(),
    }
    for service, own in names.items():
        certificate = _certificate(made, service)
        lasts = certificate.not_valid_after_utc - certificate.not_valid_before_utc
        assert lasts == datetime.timedelta(days=90), service
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert (ExtendedKeyUsageOID.CLIENT_AUTH in usage) is (service in CLIENTS_TOO)
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        assert not constraints.value.ca, service
        assert set.union(*names.values()) & _names(certificate) == own


def test_ray_nodes_have_certificates_for_their_addresses(made: Path, override: Any) -> None:
    (network,) = override["networks"]["cluster"]["ipam"]["config"]
    written = (DOCKER / "compose.tls.yaml").read_text(encoding="utf-8")
    (default,) = set(re.findall(r"\$\{CLUSTER_PREFIX:-([\d.]+)\}", written))
    script = (DOCKER / "make-certificates.sh").read_text(encoding="utf-8")
    assert f"setting CLUSTER_PREFIX {default})" in script
    moved = {key: value.replace(default, PREFIX) for key, value in network.items()}
    subnet, workers = (ipaddress.ip_network(moved[key]) for key in ("subnet", "ip_range"))
    assert workers.subnet_of(subnet)  # type: ignore[arg-type]
    free = {str(one) for one in workers if one in list(subnet.hosts())}
    assert free <= _names(_certificate(made, "ray_worker"))
    fixed = override["services"]["ray-head"]["networks"]["cluster"]["ipv4_address"]
    head = fixed.replace(default, PREFIX)
    assert head in _names(_certificate(made, "ray_head"))
    assert ipaddress.ip_address(head) in list(subnet.hosts())
    assert head not in free
    assert moved["gateway"] not in free | {head}


@contextlib.contextmanager
def _answering(context: ssl.SSLContext) -> Iterator[Any]:
    """Serve one TLS connection, and yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connected, _ = listening.accept()
            with connected, contextlib.suppress(OSError):
                context.wrap_socket(connected, server_side=True).close()

        thread = threading.Thread(target=answer)
        thread.start()
        yield listening.getsockname()
        thread.join(10)


@pytest.mark.parametrize("other", [False, True])
def test_client_with_authority_accepts_its_servers_only(
    made: Path, tmp_path: Path, *, other: bool
) -> None:
    if other:
        assert _make(tmp_path).returncode == 0
    shown = tmp_path if other else made
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(shown / "tls_mlflow_cert", shown / "tls_mlflow_key")
    client = ssl.create_default_context(cafile=made / "tls_ca")
    for name, accepted in (("mlflow", not other), ("postgres", False)):
        with _answering(server) as address, socket.create_connection(address, 10) as plain:
            try:
                client.wrap_socket(plain, server_hostname=name).close()
                trusted = True
            except ssl.SSLCertVerificationError:
                trusted = False
        assert trusted is accepted


def test_certificates_are_renewed_together(tmp_path: Path) -> None:
    def read() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    assert _make(tmp_path, TLS_DAYS="7").returncode == 0
    before = read()
    assert _make(tmp_path).returncode == 0
    after = read()
    assert set(before) == set(after)
    assert [name for name in before if before[name] == after[name]] == []


def test_settings_come_from_environment_or_env_file(tmp_path: Path) -> None:
    copy = tmp_path / "docker"
    (copy / "mine").mkdir(parents=True)
    shutil.copy(DOCKER / "make-certificates.sh", copy)
    (copy / ".env").write_text("SECRETS=./mine\nCLUSTER_PREFIX=10.1.2\nTLS_DAYS=7\n")
    environment = {"PATH": os.environ["PATH"], "CLUSTER_PREFIX": "10.9.9"}
    subprocess.run([copy / "make-certificates.sh"], env=environment, check=True)
    certificate = _certificate(copy / "mine", "ray_head")
    assert "10.9.9.2" in _names(certificate)  # the environment wins
    lasts = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    assert lasts == datetime.timedelta(days=7)


def test_invalid_setting_leaves_no_files(tmp_path: Path) -> None:
    for name, value in (
        ("CLUSTER_PREFIX", "10.20"),
        ("CLUSTER_PREFIX", "10.20.30.0/26"),
        ("CLUSTER_PREFIX", "10.20.300"),
        ("TLS_DAYS", "0"),
        ("TLS_DAYS", "90 days"),
        ("SECRETS", "/nowhere"),
    ):
        ended = _make(tmp_path, **{name: value})
        assert ended.returncode == 2
        assert ended.stderr.startswith(f"{name} {value}: ")
        assert list(tmp_path.iterdir()) == []


def test_each_service_gets_its_own_key_only(override: Any) -> None:
    for service, changes in override["services"].items():
        own = f"tls_{service.replace('-', '_')}"
        assert {f"{own}_cert", f"{own}_key"} <= set(changes["secrets"])
        assert set(changes["secrets"]) <= {"tls_ca", f"{own}_cert", f"{own}_key"}
        for value in changes.get("environment", {}).values():
            if value.startswith("/run/secrets/"):
                assert Path(value).name in changes["secrets"]
    given = {name for one in override["services"].values() for name in one["secrets"]}
    assert given == set(override["secrets"])
    assert all(set(secret) == {"file"} for secret in override["secrets"].values())


def test_every_service_of_the_stack_encrypts(override: Any) -> None:
    services = override["services"]
    assert set(services) == set(_load("compose.yaml")["services"])
    verified = {"PGSSLMODE": "verify-full", "PGSSLROOTCERT": "/run/secrets/tls_ca"}
    for client in ("mlflow",):
        assert verified.items() <= services[client]["environment"].items()
    for node in ("ray-head", "ray-worker"):
        assert services[node]["environment"]["RAY_USE_TLS"] == "1"
    trusted = services["ray-head"]["environment"]["SWEEP_TRUSTED_STORES"].split()
    assert [address for address in trusted if address.startswith("http:")] == []


def test_tls_override_loosens_nothing(override: Any) -> None:
    allowed = {"environment", "secrets", "healthcheck", "networks", "entrypoint", "volumes"}
    for changes in override["services"].values():
        assert set(changes) <= allowed
