"""Observe a running sweep from outside: command lines, servers, and files of Ray."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil

from sweeps.engine.process_cleanup import scratch_directory
from tests.time_limits import scaled

_ASK = """
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, 30)
    print("answered")
except Exception as error:
    print(type(error).__name__)
"""
"""Asks Ray for something, as whoever knows its address can."""


class Watcher(threading.Thread):
    """Looks at a driver and all that it started, a few times a second, until it is told to stop.

    Args:
        driver: Its process id.
        lock: The sweep's, which names the driver's token.
        canary: What must be found nowhere.
    """

    def __init__(self, driver: int, lock: Path, canary: str) -> None:
        super().__init__(daemon=True)
        self._driver = psutil.Process(driver)
        self._lock = lock
        self._canary = canary.encode()
        self._over = threading.Event()
        self.command_lines: set[str] = set()
        self.listening: set[str] = set()
        """The addresses that any of the processes listens on."""
        self.open_to: set[int] = set()
        """Who may enter Ray's directory: the last bits of its mode."""
        self.num_files = 0
        """How many of Ray's files were read in one look, at most."""
        self.leaks: set[str] = set()
        """Those that held the canary."""
        self.ray = ""
        """The address of Ray's head."""

    def run(self) -> None:
        while not self._over.wait(0.3):
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in [self._driver, *self._driver.children(recursive=True)]:
                    self._look_at(process)
            self._read_scratch()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        self.join()

    def _look_at(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            command = process.cmdline()
            self.command_lines.add(" ".join(command))
            for word in command:
                if word.startswith("--gcs-address="):
                    self.ray = word.partition("=")[2]
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    self.listening.add(connection.laddr.ip.removeprefix("::ffff:"))

    def _read_scratch(self) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            token = self._lock.read_text().partition('"token": "')[2][:32]
            scratch = scratch_directory(token)
            self.open_to.add(scratch.stat().st_mode & 0o077)
            files = [path for path in scratch.rglob("*") if path.is_file()]
            self.num_files = max(self.num_files, len(files))
            for file in files:
                with contextlib.suppress(OSError):  # gone meanwhile
                    if self._canary in file.read_bytes():
                        self.leaks.add(str(file))


def ask_ray(address: str, mode: str, token: str) -> str:
    """Ask Ray's head for something; returns `answered`, or the error's name."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK, address],
        env={**os.environ, "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=True,
    )
    return done.stdout.strip()
