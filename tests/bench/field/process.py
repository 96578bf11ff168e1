"""Searches of other libraries, each in a process of its own environment.

The protocol is that of `programs/serve.py`. `requirements/NAME.txt` pins what NAME's program
needs; its environment is made under `.field/` when it is first used. What must not live here:
anything of a peer's library, and counting.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
ROOT = _HERE.parents[2]
ENVIRONMENTS = ROOT / ".field"
PATIENCE = 300.0
"""Seconds until an answer, after which a peer has failed."""
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class PeerError(Exception):
    """A peer ended, raised or did not answer."""


def make_environment(name: str) -> Path:
    """Make a peer's environment if it is not there; returns its Python.

    Raises:
        CalledProcessError: The packages could not be installed.
    """
    pinned = (_HERE / "requirements" / f"{name}.txt").read_text()
    directory = ENVIRONMENTS / name
    python, ready = directory / "bin" / "python", directory / "ready"
    if not ready.exists() or ready.read_text() != pinned:
        uv = str(Path(sys.executable).with_name("uv"))
        subprocess.run([uv, "venv", "--quiet", "--clear", str(directory)], check=True)
        install = [uv, "pip", "install", "--quiet", "--python", str(python)]
        if found := os.environ.get("PIP_FIND_LINKS"):
            install += ["--find-links", found]
        file = _HERE / "requirements" / f"{name}.txt"
        subprocess.run([*install, "--requirement", str(file)], check=True)
        ready.write_text(pinned)
    return python


class PeerProcess:
    """A program that answers the questions of the protocol; one search after the other.

    Attributes:
        cpu: Seconds of CPU time that the present search has taken.
    """

    def __init__(self, command: list[str], *, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._directory = tempfile.TemporaryDirectory(prefix="field-")
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._log = Path(self._directory.name, "log.txt")
        log = self._log.open("w")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=self._directory.name,
            env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1"), "PYTHONPATH": path},
        )
        log.close()
        self._unread = b""
        self.cpu = 0.0

    def begin(self, problem: dict[str, Any]) -> None:
        """Start a search over another problem."""
        self._ask("begin", problem)
        self.cpu = 0.0

    def ask(self) -> dict[str, Any] | None:
        """Return the next job; None: nothing before another report."""
        found: dict[str, Any] | None = self._ask("ask", {})
        return found

    def tell(self, **report: Any) -> bool:
        """Tell of a report; returns whether the training goes on."""
        return bool(self._ask("tell", report))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._directory.cleanup()

    def _ask(self, question: str, arguments: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({question: arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise PeerError(f"the process ended: {self._last_words()}") from None
        reply = json.loads(self._line(question))
        self.cpu += reply.get("cpu", 0.0)
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply["answer"]

    def _line(self, question: str) -> bytes:
        """Read an answer; not by the stream's buffer, for which `select` could wait in vain."""
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            file = self._process.stdout.fileno()
            if not select.select([file], [], [], self._patience)[0]:
                raise PeerError(f"no answer to {question} within {self._patience:.0f} s")
            read = os.read(file, 1 << 16)
            if not read:
                raise PeerError(f"the process ended: {self._last_words()}")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._process.wait(timeout=10)
        return self._log.read_text(errors="replace")[-2000:]
