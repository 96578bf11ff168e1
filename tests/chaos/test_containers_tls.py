"""The stack of docker/ with `compose.tls.yaml`: a capture of the network is unreadable, and each
port refuses clients without TLS.

It takes what `test_containers.py` takes. What must not live here: what holds without TLS, too.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.engine import Engine
from tests.chaos.stack import Stack, up
from tests.time_limits import Deadline, scaled

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(2400),
    pytest.mark.xdist_group("containers"),  # one engine for all
]

_WORKERS = 2
_SWEEP = ("digits.yaml", "--address", "gcs:6379", "--tracking-uri", "https://mlflow:5000")
_SETTINGS = (
    "trials=2",
    "budget.epochs=3",
    "early_stopping.scheduler=none",
)
_CAPTURE = """
import socket
read = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
read.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
with open("/captured/packets", "wb") as file:
    while True:
        packet, source = read.recvfrom(1 << 17)
        if source[0].startswith("veth"):
            file.write(packet)
            file.flush()
"""
_HTTP2 = r'b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"'
_HANDSHAKE = f"""
import socket, ssl, sys
host, port, *certificate = sys.argv[1:]
context = ssl.create_default_context(cafile="/run/secrets/tls_ca")
context.set_alpn_protocols(["h2"])
if certificate:
    context.load_cert_chain(*certificate)
with socket.create_connection((host, int(port)), 20) as plain:
    with context.wrap_socket(plain, server_hostname=host) as made:
        try:
            made.send({_HTTP2})
            print(len(made.recv(1)))
        except (ConnectionError, ssl.SSLError):
            print(0)
"""
_PLAIN = """
import socket, sys
for port in sys.argv[2:]:
    with socket.create_connection((sys.argv[1], int(port)), 20) as made:
        try:
            made.send(b"GET /health HTTP/1.0\\r\\n\\r\\n")
            print(made.recv(100).partition(b"\\r")[0].decode("ascii", "replace"))
        except ConnectionError:
            print()
"""
_LISTENING = """
for name in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{name}").readlines()[1:]:
        _, local, _, state, *_ = line.split()
        address, port = local.split(":")
        if state == "0A" and not address.endswith("7F"):
            print(int(port, 16))
"""
_MLFLOW = """
import mlflow
print(len(mlflow.MlflowClient("https://mlflow:5000").search_experiments()))
"""
_POSTGRES = """
import psycopg2
made = psycopg2.connect("postgresql://mlflow@postgres/mlflow")
asked = made.cursor()
asked.execute("SELECT version FROM pg_stat_ssl WHERE pid = pg_backend_pid()")
print(asked.fetchone()[0])
"""
_QUICKLY = ("MLFLOW_HTTP_REQUEST_MAX_RETRIES=0", "MLFLOW_HTTP_REQUEST_TIMEOUT=20")


@pytest.fixture(scope="module")
def stack(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with up(engine, tmp_path_factory.mktemp("stack"), _WORKERS, tls=True) as it:
        yield it


@pytest.fixture(scope="module")
def head(stack: Stack) -> Any:
    (found,) = stack.containers("ray-head")
    return found


@pytest.fixture(scope="module")
def foreign(stack: Stack, head: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory on the head with certificates for the same names, of another authority."""
    directory = tmp_path_factory.mktemp("foreign")
    stack.make_certificates(directory)
    for name in ("tls_ca", "tls_ray_head_cert", "tls_ray_head_key"):
        _put(stack, head, f"/tmp/foreign-{name}", directory / name)
    return "/tmp/foreign-"


def _address(node: Any) -> str:
    """Return a Ray node's address on the network `cluster`."""
    networks = node["NetworkSettings"]["Networks"].items()
    (found,) = (one["IPAddress"] for name, one in networks if name.endswith("_cluster"))
    return str(found)


def _put(stack: Stack, container: Any, place: str, file: Path) -> None:
    write = ("sh", "-c", f'printf "%s\\n" "$TEXT" > {place}')
    stack.inside(container, *write, environment=(f"TEXT={file.read_text()}",))


@contextmanager
def _captured(stack: Stack, head: Any, directory: Path) -> Iterator[None]:
    """Capture what passes between containers into `directory / "packets"`."""
    directory.chmod(0o777)
    started = stack.engine.run(
        *("run", "--detach", "--network=host", "--user=0", "--cap-add=NET_RAW"),
        *("--cap-add=NET_ADMIN", f"--volume={directory}:/captured", "--entrypoint=python"),
        *(head["Config"]["Image"], "-u", "-c", _CAPTURE),
    )
    try:
        deadline = Deadline(60)
        while not (directory / "packets").exists():
            assert not deadline.passed
            time.sleep(0.5)
        yield
        time.sleep(2)  # what was sent last is read
    finally:
        stack.engine.run("rm", "--force", started.stdout.strip())


def _send_in_clear(stack: Stack, head: Any, text: str) -> None:
    """Send a text from the head to a worker without TLS."""
    worker, *_ = stack.containers("ray-worker")
    listen = (
        "import socket; made = socket.create_server(('', 9999)); print('ready', flush=True); "
        "made.accept()[0].recv(100)"
    )
    (address,) = (one["IPAddress"] for one in worker["NetworkSettings"]["Networks"].values())
    send = (
        f"import socket; socket.create_connection(({address!r}, 9999), 20).send({text!r}.encode())"
    )
    stack.engine.run("exec", "--detach", worker["Id"], "python", "-c", listen)
    time.sleep(3)
    stack.inside(head, "python", "-c", send)


def test_sweep_finishes_and_network_capture_is_unreadable(
    stack: Stack, head: Any, tmp_path: Path
) -> None:
    """The capture sees what is sent in clear, and neither the sweep's name nor a secret."""
    name, control = (f"canary-{secrets.token_hex(12)}" for _ in range(2))
    settings = [word for setting in _SETTINGS for word in ("-s", setting)]
    with _captured(stack, head, tmp_path):
        _send_in_clear(stack, head, control)
        with stack.start("ray-head", "sweep", "run", *_SWEEP, "--name", name, *settings) as sweep:
            said, _ = sweep.communicate(timeout=scaled(600))
        assert sweep.returncode == 0, said
    trials = json.loads(stack.inside(head, "sweep", "trials", name, "--json").stdout)
    assert [trial["state"] for trial in trials] == ["complete", "complete"]
    packets = (tmp_path / "packets").read_bytes()
    password = stack.secrets["mlflow_password"]
    unreadable = {
        name,
        stack.secrets["ray_token"],
        base64.b64encode(f"sweep:{password}".encode()).decode(),
        *stack.secrets.values(),
    }
    assert control.encode() in packets
    assert [text for text in unreadable if text.encode() in packets] == []


def test_tracking_server_accepts_tls_only(stack: Stack, head: Any, foreign: str) -> None:
    assert int(stack.inside(head, "python", "-c", _MLFLOW, environment=_QUICKLY).stdout) > 0
    said = stack.inside(head, "python", "-c", _PLAIN, "mlflow", "5000").stdout
    assert "HTTP/" not in said
    other = (f"MLFLOW_TRACKING_SERVER_CERT_PATH={foreign}tls_ca", *_QUICKLY)
    refused = stack.inside(head, "python", "-c", _MLFLOW, environment=other, check=False)
    assert refused.returncode != 0
    assert "CERTIFICATE_VERIFY_FAILED" in refused.stderr


def test_postgresql_accepts_tls_only(stack: Stack, tmp_path: Path) -> None:
    (mlflow,) = stack.containers("mlflow")
    assert stack.inside(mlflow, "python", "-c", _POSTGRES).stdout.startswith("TLSv1.")
    stack.make_certificates(tmp_path)
    _put(stack, mlflow, "/tmp/foreign-tls_ca", tmp_path / "tls_ca")
    for setting, cause in (
        ("PGSSLMODE=disable", "no encryption"),
        ("PGSSLROOTCERT=/tmp/foreign-tls_ca", "certificate verify failed"),
    ):
        refused = stack.inside(
            mlflow, "python", "-c", _POSTGRES, environment=(setting,), check=False
        )
        assert refused.returncode != 0
        assert cause in refused.stderr


def test_ray_refuses_clients_without_stack_certificate(
    stack: Stack, head: Any, foreign: str
) -> None:
    """Each of these clients has the right token."""
    asked = ("timeout", "90", "ray", "health-check", "--address", "gcs:6379")
    stack.inside(head, *asked)
    for settings in (
        ("RAY_USE_TLS=0",),
        (f"RAY_TLS_CA_CERT={foreign}tls_ca",),
        (
            f"RAY_TLS_SERVER_CERT={foreign}tls_ray_head_cert",
            f"RAY_TLS_SERVER_KEY={foreign}tls_ray_head_key",
        ),
    ):
        assert stack.inside(head, *asked, environment=settings, check=False).returncode != 0


def test_each_ray_node_requires_a_certificate(stack: Stack, head: Any, foreign: str) -> None:
    own = [f"/run/secrets/tls_ray_head_{kind}" for kind in ("cert", "key")]
    other = [f"{foreign}tls_ray_head_{kind}" for kind in ("cert", "key")]
    for kind in ("cert", "key"):  # of the authority, but a server's
        _put(stack, head, f"/tmp/mlflow-{kind}", stack.directory / f"tls_mlflow_{kind}")
    server = [f"/tmp/mlflow-{kind}" for kind in ("cert", "key")]
    workers = [_address(worker) for worker in stack.containers("ray-worker")]
    for place in (("gcs", "6379"), *((worker, "8076") for worker in workers)):
        for certificate, answered in ((own, True), ([], False), (other, False), (server, False)):
            said = stack.inside(head, "python", "-c", _HANDSHAKE, *place, *certificate)
            assert (int(said.stdout) > 0) is answered, (place, certificate)


def test_ray_ports_in_clear_only_ask_for_the_token(stack: Stack, head: Any) -> None:
    """Each node has an agent that its own processes alone ask, over HTTP and with the token."""
    for node in (head, *stack.containers("ray-worker")):
        ports = stack.inside(node, "python", "-c", _LISTENING).stdout.split()
        assert {"6379", "8076"} & set(ports)
        said = stack.inside(head, "python", "-c", _PLAIN, _address(node), *ports).stdout
        answers = said.splitlines()
        assert len(answers) == len(ports)
        assert sorted(filter(None, answers)) == ["HTTP/1.0 401 Unauthorized"]


def test_worker_holds_its_own_key_only(stack: Stack) -> None:
    for worker in stack.containers("ray-worker"):
        assert stack.inside(worker, "ls", "/run/secrets").stdout.split() == [
            "ray_token",
            "tls_ca",
            "tls_ray_worker_cert",
            "tls_ray_worker_key",
        ]
