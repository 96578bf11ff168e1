"""The stack of docker/compose.yaml with its own secrets and names, for one test session.

What must not live here: the engine (`engine.py`), and what must be true of the stack.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.chaos.engine import Engine
from tests.time_limits import Deadline

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker" / "compose.yaml"
TLS = COMPOSE.with_name("compose.tls.yaml")
SECRETS = (
    "postgres_password",
    "mlflow_db_password",
    "mlflow_password",
    "ray_token",
)
_HEALTHY_SECONDS = 300.0


class Stack:
    """Containers, networks and volumes of one compose project.

    Args:
        engine: Where it runs.
        image: The version of the image `gradsweep`.
        postgres: The version of the image `postgres`.
        directory: Where its secrets lie.
        tls: With `compose.tls.yaml`, and certificates made as README.md shows.
    """

    def __init__(
        self, engine: Engine, image: str, postgres: str, directory: Path, *, tls: bool = False
    ) -> None:
        self.engine = engine
        self.directory = directory
        self._files = [COMPOSE, TLS] if tls else [COMPOSE]
        self.project = f"gradsweep-test-{uuid.uuid4().hex[:8]}"
        self.secrets = {name: secrets.token_hex(24) for name in SECRETS}
        directory.mkdir(mode=0o700)
        for name, value in self.secrets.items():
            (directory / name).write_text(f"{value}\n")
            (directory / name).chmod(0o444)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._environment = {
            "GRADSWEEP_VERSION": image,
            "POSTGRES_VERSION": postgres,
            "SECRETS": str(directory),
            "MLFLOW_PORT": str(self.port),
            "WORKER_CPUS": "1",
            # Beside a stack, or a network, that is there already.
            "CLUSTER_PREFIX": f"10.213.{secrets.randbelow(256)}",
        }
        if tls:
            self.make_certificates(directory)

    def make_certificates(self, directory: Path) -> None:
        """Make a certificate authority and its certificates for this stack's names."""
        made = subprocess.run(
            [COMPOSE.with_name("make-certificates.sh")],
            env={**os.environ, **self._environment, "SECRETS": str(directory)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stderr

    def compose(
        self, *words: str, check: bool = True, seconds: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run `docker compose WORDS` on it."""
        return self.engine.compose(
            *self._named(),
            *words,
            environment=self._environment,
            check=check,
            seconds=seconds,
        )

    def start(self, service: str, *words: str) -> subprocess.Popen[str]:
        """Start a command inside a service's container; its output is one pipe."""
        return subprocess.Popen(
            [*self.engine.composer(), *self._named(), "exec", "-T", service, *words],
            env={**self.engine.environment, **self._environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def containers(self, service: str | None = None) -> list[Any]:
        """What the engine knows of the containers, of one service or of all."""
        filters = [f"--filter=label=com.docker.compose.project={self.project}"]
        if service is not None:
            filters.append(f"--filter=label=com.docker.compose.service={service}")
        ids = self.engine.run("ps", "--all", "--quiet", *filters).stdout.split()
        return json.loads(self.engine.run("inspect", *ids).stdout) if ids else []

    def inside(
        self, container: Any, *words: str, environment: tuple[str, ...] = (), check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a container."""
        given = [word for one in environment for word in ("--env", one)]
        return self.engine.run("exec", *given, container["Id"], *words, check=check)

    def await_health(self, service: str | None = None) -> None:
        """Wait until all containers, or those of a service, say that they are well."""
        deadline = Deadline(_HEALTHY_SECONDS)
        while ill := {
            one["Name"]: (one["State"]["Status"], one["State"]["Health"]["Status"])
            for one in self.containers(service)
            if one["State"]["Health"]["Status"] != "healthy"
        }:
            logs = self.compose("logs", "--tail=20", check=False).stdout
            assert not deadline.passed, f"not healthy: {ill}\n{logs}"
            time.sleep(2)

    def kill(self, container: Any) -> None:
        """Kill a container's first process, as a machine short of memory would."""
        os.kill(container["State"]["Pid"], signal.SIGKILL)

    def _named(self) -> list[str]:
        """Return compose's options for this project."""
        files = [word for file in self._files for word in ("--file", str(file))]
        return ["--project-name", self.project, *files]

    def remains(self) -> list[str]:
        """What of it the engine still has."""
        label = f"--filter=label=com.docker.compose.project={self.project}"
        kinds = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
        found = (self.engine.run(*kind, "--quiet", label).stdout.split() for kind in kinds)
        return [name for names in found for name in names]


@contextmanager
def up(engine: Engine, directory: Path, workers: int, *, tls: bool = False) -> Iterator[Stack]:
    """Build the image and run the stack; afterwards nothing of either is there.

    Args:
        engine: Where it runs.
        directory: An empty directory for its secrets.
        workers: How many Ray workers it has.
        tls: Encrypt between the containers, by `compose.tls.yaml`.
    """
    version = f"test-{uuid.uuid4().hex[:8]}"
    image = f"gradsweep:{version}"
    asked = re.search(r"POSTGRES_VERSION:-([\w.-]+)", COMPOSE.read_text(encoding="utf-8"))
    assert asked is not None
    postgres = engine.postgres(asked[1])
    engine.build(*engine.base(), "-f", ROOT / "docker" / "Dockerfile", "-t", image, ROOT)
    stack = Stack(engine, version, postgres, directory / "secrets", tls=tls)
    try:
        stack.compose("up", "--detach", "--scale", f"ray-worker={workers}", seconds=600)
        stack.await_health()
        yield stack
    finally:
        stack.compose("down", "--volumes", "--timeout", "5")
        engine.run("image", "rm", image)
    assert stack.remains() == []
