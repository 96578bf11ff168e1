"""Configure, start and stop Ray on one machine; Ray keeps no state that must last.

What must not live here: what a trial means (`run`), a cluster that runs already (`cluster`), and
private parts of Ray (`ray_compat`).
"""

from __future__ import annotations

import logging
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from subprocess import Popen
from threading import Timer
from typing import IO, Any

import psutil

from sweeps.engine import fork_server
from sweeps.engine.cluster_address import tcp_probe
from sweeps.engine.process_cleanup import (
    claim_scratch,
    end_orphans,
    kill_children,
    scratch_directory,
    tag_child_processes,
)
from sweeps.engine.ray_compat.environment import configure_tune, set_ray_env
from sweeps.engine.ray_compat.ray_internals import (
    AGENTS,
    find_agents,
    job_without_sys_path,
    node_options,
    patch_ray_node,
    preserve_signal_handlers,
)
from sweeps.engine.ray_watch import PATIENCE_SECONDS, Loss, LossHandler, watched
from sweeps.engine.resources import Machine
from sweeps.engine.signals import Interruption
from sweeps.engine.system_limits import shortages
from sweeps.engine.worker_end import in_words

_OBJECT_STORE_BYTES = (
    100 * 2**20
)  # results are small and checkpoints bypass Ray; Ray's default takes 30 % of memory

_PROBE_SECONDS = 3.0

_alive: dict[str, IO[str]] = {}
"""By token, the locked file that proves that the driver is alive; held while its Ray runs."""


_PURPOSES = {
    "gcs_server": "which keeps the list of Ray's processes",
    "raylet": "which starts the trials' processes",
    "DashboardAgent": "without which raylet ends",
    "RuntimeEnvAgent": "which prepares the trials' processes",
}


class NoRay(OSError):
    """Ray could not be started."""


def configure(token: str) -> None:
    """Set the environment variables of a local Ray and its workers; must precede its start."""
    set_ray_env()
    # Ray accepts every client with this token. A token that Ray generates itself would be stored
    # in a file that other users may read. Set once, because Ray keeps the first token it reads.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    tag_child_processes(token)


@contextmanager
def running(
    token: str,
    machine: Machine,
    *,
    concurrency: int,
    interruption: Interruption,
    lost: LossHandler,
    hidden_env: Iterable[str] = (),
) -> Iterator[Callable[[Exception | None], bool]]:
    """Run a local Ray while the context is open; signals are handled while it starts."""
    node, ours = _Node(), True

    def end() -> None:
        node.ends = True
        if not ours:
            return
        if interruption.trial_grace_remaining <= 0:
            kill_children(token)  # no time is left for a clean shutdown, which takes seconds
        killing = Timer(PATIENCE_SECONDS, node.kill)
        killing.start()
        try:
            stop(token)
        finally:
            killing.cancel()

    with watched(node.find_loss, lost, end) as exit_if_lost:
        ours = start(
            token, machine, concurrency=concurrency, hidden_env=hidden_env, started=node.started
        )
        import ray

        node.address = ray.get_runtime_context().gcs_address

        def node_died(_: Exception | None) -> bool:
            exit_if_lost()
            return False

        yield node_died


class _Node:
    """The processes of a local Ray.

    Attributes:
        address: The address of its `gcs_server`, once Ray has started.
        ends: Whether they are to end.
    """

    def __init__(self) -> None:
        self._processes: dict[str, Popen[bytes]] = {}
        self._agents: dict[str, psutil.Process] = {}
        self.address: str | None = None
        self.ends = False

    def started(self, kind: str, process: Popen[bytes]) -> None:
        """Watch a process of the node."""
        if kind in _PURPOSES:
            self._processes[kind] = process

    def kill(self) -> None:
        """Kill the processes: they do not end, and the sweep needs them no longer."""
        for process in self._processes.values():
            process.kill()

    def find_loss(self) -> Loss | None:
        """Return which process has ended, or does not run."""
        loss = self._find_loss()
        if (
            self.ends
        ):  # also if that began meanwhile; Ray needs 10 s after its processes are killed
            return Loss("Ray is lost: its processes did not end", 3 * PATIENCE_SECONDS)
        if loss and self.address is None and (found := shortages()):  # why it could not start
            return loss._replace(cause=f"{loss.cause}; {'; '.join(found)}")
        return loss

    def _find_loss(self) -> Loss | None:
        codes = {kind: process.poll() for kind, process in self._processes.items()}
        if codes.get("raylet", 0) is None and len(self._agents) < len(AGENTS):
            self._agents |= find_agents(self._processes["raylet"].pid)
        ended = {kind: code for kind, code in codes.items() if code is not None}
        # A raylet and its agents end together: the one that was killed is the cause.
        if any(map(_has_ended, self._agents.values())) and min(ended.values(), default=0) >= 0:
            return Loss(f"Ray is lost: its process {_describe('raylet')} or an agent of it ended")
        for kind in sorted(ended, key=ended.__getitem__):
            how = in_words(ended[kind])
            return Loss(f"Ray is lost: its process {_describe(kind)} ended {how}")
        pids = {kind: process.pid for kind, process in self._processes.items()}
        for kind, pid in (pids | {kind: each.pid for kind, each in self._agents.items()}).items():
            with suppress(psutil.Error):
                if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                    cause = f"Ray is lost: its process {_describe(kind)} was stopped (SIGSTOP)"
                    return Loss(cause, PATIENCE_SECONDS)
        if self.address and (error := tcp_probe(self.address, _PROBE_SECONDS)):
            cause = f"Ray is lost: its process {_describe('gcs_server')} does not answer ({error})"
            return Loss(cause, PATIENCE_SECONDS)
        return None


def _describe(kind: str) -> str:
    return f"{kind}, {_PURPOSES[kind]},"


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def start(
    token: str,
    machine: Machine,
    *,
    concurrency: int,
    hidden_env: Iterable[str] = (),
    started: Callable[[str, Popen[bytes]], None] = lambda *_: None,
) -> bool:
    """Start a local Ray, unless this process has one already."""
    configure_tune(concurrency)
    import ray

    if ray.is_initialized():
        return False
    try:
        _alive[token] = claim_scratch(token)
    except OSError as error:
        if found := shortages():
            raise NoRay(f"Ray could not be started: {'; '.join(found)}") from error
        raise
    withheld = {name: "" for name in hidden_env if name in os.environ}
    options: dict[str, Any] = {
        "address": "local",  # even if RAY_ADDRESS is set
        "num_cpus": machine.cpus,
        "num_gpus": len(machine.gpus),
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "runtime_env": {"env_vars": withheld} if withheld else None,
        # A subdirectory of the driver's directory, because Ray makes it writable for every user.
        **node_options(scratch_directory(token) / "ray"),
    }
    node = patch_ray_node(fork_server.WORKER_START, started)
    with warnings.catch_warnings(), preserve_signal_handlers(), node:
        warnings.simplefilter("ignore", FutureWarning)
        try:
            # `trainable.user_code.task_import` makes a user's task module importable in a worker.
            ray.init(**options, job_config=job_without_sys_path())
        except Exception as error:  # Ray documents no narrower type, such as for its timeouts
            if found := shortages():
                raise NoRay(f"Ray could not be started: {'; '.join(found)}") from error
            raise NoRay(
                f"Ray could not be started: {error}; its processes must come up within 30 s, for "
                "which the machine is short of memory or of time; free some, then resume"
            ) from error
    return True


def stop(token: str) -> None:
    """Stop this process' Ray, end its remaining processes and remove its files."""
    import ray

    ray.shutdown()
    end_orphans(token)
    if alive := _alive.pop(token, None):
        alive.close()
