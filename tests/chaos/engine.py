"""A Docker engine for tests: one that runs already, or one of a test's own.

Where no registry can be reached, base images are made here, from Debian's packages, under names
of their own. What must not live here: anything about the stack that is run on it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.time_limits import Deadline, scaled

INSTALL = "apt-get install docker.io docker-compose debootstrap"
_STAND_INS = Path(__file__).parent / "stand_ins"
_STAND_IN = "gradsweep-test"
_BASE = f"{_STAND_IN}-base:bookworm"
_PACKAGES = "python3,python3-venv,ca-certificates"
# Debian's own first: another client may lack the plug-ins that it builds and composes with.
_CLIENTS = ("/usr/bin/docker", "docker")
_START_SECONDS = 60.0
_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")


class Engine:
    """Commands for an engine.

    Args:
        client: The `docker` program.
        host: Where the engine listens; None: where the client looks by itself.
    """

    def __init__(self, client: str, host: str | None = None) -> None:
        self._client = client
        self._made: list[str] = []
        self.environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
        if host is not None:
            self.environment["DOCKER_HOST"] = host

    def run(
        self, *words: str | Path, check: bool = True, seconds: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run `docker WORDS`, and return what it said."""
        return self._call([self._client, *words], check=check, seconds=seconds)

    def compose(
        self, *words: str | Path, environment: dict[str, str], check: bool = True, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run `docker compose WORDS`, or what was there before it was one command."""
        return self._call(
            [*self.composer(), *words], check=check, seconds=seconds, environment=environment
        )

    def composer(self) -> list[str]:
        """How compose is called here."""
        plugin = self.run("compose", "version", check=False).returncode == 0
        return [self._client, "compose"] if plugin else ["docker-compose"]

    def answers(self) -> bool:
        """Whether an engine is there."""
        return self.run("info", check=False).returncode == 0

    def build(self, *words: str | Path, seconds: float = 1500) -> None:
        """Run `docker build WORDS` with this machine's way to the package index."""
        authority = os.environ.get("SSL_CERT_FILE") or os.environ.get("PIP_CERT")
        secret = [f"--secret=id=ca,src={authority}"] if authority else []
        self.run("build", "--network=host", *secret, *words, seconds=seconds)

    def base(self) -> list[str]:
        """What `build` is told of the base image; makes one if the public one is not to be had."""
        public = "python:3.11-slim-bookworm"
        if self._has(public) or self.run("pull", public, check=False).returncode == 0:
            return []
        if not self._has(_BASE):
            with tempfile.TemporaryDirectory() as directory:
                root, tar = Path(directory) / "root", Path(directory) / "root.tar"
                self._call(
                    [
                        "debootstrap",
                        "--variant=minbase",
                        f"--include={_PACKAGES}",
                        "bookworm",
                        root,
                    ],
                    seconds=600,
                )
                leave_out = [f"--exclude=./{name}/*" for name in ("proc", "sys", "dev")]
                self._call(["tar", "-C", root, *leave_out, "-cf", tar, "."], seconds=120)
                self.run("import", tar, _BASE)
            self._made.append(_BASE)
        return [f"--build-arg=BASE={_BASE}"]

    def postgres(self, version: str) -> str:
        """The version of the image `postgres` to use: the one asked for, or a stand-in's."""
        if f"postgres:{_STAND_IN}" in self._made:
            return _STAND_IN
        public = f"postgres:{version}"
        if self._has(public) or self.run("pull", public, check=False).returncode == 0:
            return version
        argument = self.base() or ["--build-arg=BASE=python:3.11-slim-bookworm"]
        recipe = _STAND_INS / "postgres.Dockerfile"
        self.build(*argument, "-f", recipe, "-t", f"postgres:{_STAND_IN}", _STAND_INS)
        self._made.append(f"postgres:{_STAND_IN}")
        return _STAND_IN

    def forget(self) -> None:
        """Remove the stand-ins that were made here; the cache of builds is the engine's own."""
        while self._made:
            self.run("image", "rm", self._made.pop())

    def _has(self, image: str) -> bool:
        return self.run("image", "inspect", image, check=False).returncode == 0

    def _call(
        self,
        words: list[str | Path],
        *,
        check: bool = True,
        seconds: float,
        environment: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        ended = subprocess.run(
            words,
            env={**self.environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=scaled(seconds),
            check=False,
        )
        said = f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
        assert not check or ended.returncode == 0, f"{words} ended with {ended.returncode}: {said}"
        return ended


@contextmanager
def own_or_running() -> Iterator[Engine]:
    """The engine that answers, or else one of this test's own; skips the test without either."""
    client = next((found for name in _CLIENTS if (found := shutil.which(name))), None)
    if client is None:
        _leave_out("docker")
    assert client is not None
    running = Engine(client)
    if running.answers():
        try:
            yield running
        finally:
            running.forget()
        return
    for program in ("dockerd", "debootstrap"):
        if not shutil.which(program):
            _leave_out(program)
    if os.geteuid() != 0:
        _leave_out("a Docker engine that runs, or the right to start one")
    with _own(client) as engine:
        yield engine


def _leave_out(what: str) -> None:
    message = f"{what} is missing: {INSTALL}"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


@contextmanager
def _own(client: str) -> Iterator[Engine]:
    directory = Path(tempfile.mkdtemp(prefix="gradsweep-engine-"))
    before, forwarding = _rules(), _FORWARDING.read_text()
    socket = f"unix://{directory}/socket"
    places = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
    with (directory / "log").open("w") as log:
        daemon = subprocess.Popen(
            [
                "dockerd",
                "--host",
                socket,
                *(f"--{option}={directory / name}" for option, name in places.items()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        engine = Engine(client, socket)
        deadline = Deadline(_START_SECONDS)
        while not engine.answers():
            written = (directory / "log").read_text()[-2000:]
            assert daemon.poll() is None, f"dockerd ended: {written}"
            assert not deadline.passed, f"dockerd does not answer: {written}"
            time.sleep(0.5)
        # It forbids what the machine forwards for others; between its own networks it still does.
        for rule in before["filter"]:
            if rule.startswith("-P FORWARD"):
                subprocess.run(["iptables", *rule.split()], check=True)
        yield engine
    finally:
        daemon.terminate()
        daemon.wait(60)
        for mount in reversed(
            psutil.disk_partitions(all=True)
        ):  # what it may leave, innermost first
            if Path(mount.mountpoint).is_relative_to(directory):
                subprocess.run(["umount", "--lazy", mount.mountpoint], check=True)
        shutil.rmtree(directory)
        _take_back(before)
        _FORWARDING.write_text(forwarding)


def _rules() -> dict[str, list[str]]:
    """The packet filter's rules, by table."""
    return {
        table: subprocess.run(
            ["iptables", "-t", table, "-S"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for table in ("filter", "nat")
    }


def _take_back(before: dict[str, list[str]]) -> None:
    """Remove what an engine has left in the network: its rules, its chains, its bridge."""
    for table, rules in _rules().items():
        left = [rule for rule in rules if rule not in before[table]]
        own = [shlex.split(rule) for rule in left if re.search(r"DOCKER|docker0|\bbr-", rule)]
        for verb, change in (("-A", "-D"), ("-N", "-X")):
            for words in own:
                if words[0] == verb:
                    subprocess.run(["iptables", "-t", table, change, *words[1:]], check=True)
    if not any("docker0" in rule for rules in before.values() for rule in rules):
        subprocess.run(["ip", "link", "delete", "docker0"], capture_output=True, check=False)
