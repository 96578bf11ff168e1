"""A PostgreSQL cluster of a test's own, from the system's binaries.

It is made by `initdb` in a temporary directory, listens on a Unix socket there and on nothing
else, and belongs to an unprivileged user, because PostgreSQL refuses to run as root. What must not
live here: MLflow, or anything about sweeps.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.time_limits import Deadline

INSTALL = "apt-get install postgresql"
_BINARIES = Path("/usr/lib/postgresql")  # where Debian has them, one directory a version
_UNPRIVILEGED = ("postgres", "nobody")
_USER = "gradsweep"


def find_binaries() -> Path | None:
    """The directory of the newest installed `initdb` and `pg_ctl`; None without one."""
    found = [path.parent for path in _BINARIES.glob("*/bin/initdb")]
    if not found and (initdb := shutil.which("initdb")):
        found = [Path(initdb).resolve().parent]
    return max(found, key=lambda path: int(re.sub(r"\D", "", path.parent.name) or 0), default=None)


class Cluster:
    """A running cluster; a context manager that stops it and removes its files.

    Args:
        binaries: What `find_binaries` returned.
        password: What its user must say to be let in; None lets everybody in.
    """

    def __init__(self, binaries: Path, password: str | None = None) -> None:
        self._binaries = binaries
        self._password = password
        # Not below a test's own directory: that one is open to its owner alone, and the address
        # of a Unix socket holds about 100 characters.
        self._directory = Path(tempfile.mkdtemp(prefix="gradsweep-postgres-"))
        self._data = self._directory / "data"
        self._owner = _unprivileged()
        if self._owner is not None:
            os.chown(self._directory, self._owner.pw_uid, self._owner.pw_gid)
        entry = ["-A", "trust"]
        if password is not None:
            said = self._directory / "password"
            said.write_text(password)
            entry = ["-A", "scram-sha-256", f"--pwfile={said}"]
        self._run("initdb", "-U", _USER, *entry, "-E", "UTF8", "--no-locale", "--no-sync")
        self.start()

    @property
    def uri(self) -> str:
        """The address of its database, for SQLAlchemy; without the password."""
        return f"postgresql+psycopg2://{_USER}@/postgres?host={self._directory}"

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """Ask a question of the database."""
        with closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def restart_while_writing(self, table: str, *, seconds: float = 60.0) -> None:
        """Crash in the middle of a transaction that writes to a table, and start again.

        A lock keeps the next writer waiting in its transaction until the crash ends both.
        """
        with closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(f"LOCK TABLE {table} IN EXCLUSIVE MODE")
            deadline = Deadline(seconds)
            while not self.query(
                "SELECT 1 FROM pg_stat_activity "
                f"WHERE wait_event_type = 'Lock' AND query LIKE 'INSERT INTO {table}%'"
            ):
                assert not deadline.passed, f"no process wrote to {table}"
                time.sleep(0.02)
            self._control("restart", "-m", "immediate")

    def stop(self) -> None:
        """Stop it at once, as a crash does; what was committed is there when it starts again."""
        self._control("stop", "-m", "immediate")

    def start(self) -> None:
        """Start it again."""
        self._control("start")

    def close(self) -> None:
        """Stop it and remove its files."""
        if (self._data / "postmaster.pid").exists():
            self.stop()
        shutil.rmtree(self._directory)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> Any:
        """Return a new connection of psycopg2."""
        import psycopg2  # of the extra `postgres`: who has no PostgreSQL needs it not

        return psycopg2.connect(
            user=_USER, password=self._password, dbname="postgres", host=str(self._directory)
        )

    def _control(self, verb: str, *arguments: str) -> None:
        options = f"-c listen_addresses= -c unix_socket_directories={self._directory}"
        log = str(self._directory / "log")
        self._run("pg_ctl", "-w", "-o", options, "-l", log, verb, *arguments)

    def _run(self, program: str, *arguments: str) -> None:
        with (self._directory / "errors").open("w") as errors:
            done = subprocess.run(
                [self._binaries / program, "-D", self._data, *arguments],
                cwd=self._directory,
                user=self._owner and self._owner.pw_uid,
                group=self._owner and self._owner.pw_gid,
                extra_groups=[] if self._owner else None,
                # The server inherits what is left open here: a pipe would wait for its end.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                check=False,
            )
        said = (self._directory / "errors").read_text()
        assert done.returncode == 0, f"{program} {arguments} ended with {done.returncode}: {said}"


def _unprivileged() -> pwd.struct_passwd | None:
    """The user to run it as; None: the present one, who is unprivileged already."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    return next(known[name] for name in _UNPRIVILEGED if name in known)


@contextmanager
def own_cluster(password: str | None = None) -> Iterator[Cluster]:
    """A cluster of a test's own, see `Cluster`; without PostgreSQL the test is left out, and in CI
    it fails.
    """
    binaries = find_binaries()
    if binaries is None:
        assert not os.environ.get("CI"), f"PostgreSQL is missing: {INSTALL}"
        pytest.skip(f"PostgreSQL is not installed; get it with: {INSTALL}")
    with Cluster(binaries, password) as made:
        yield made
