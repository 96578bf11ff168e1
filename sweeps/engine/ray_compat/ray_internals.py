"""Private parts of Ray itself: its start, its nodes, its log files and its errors.

Functions import Ray: most commands never need it. What must not live here: Ray Tune
(`tune_internals`), when Ray starts or counts as lost (`local_ray`, `cluster`).
"""

from __future__ import annotations

import functools
import glob
import logging
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

import psutil

from sweeps.engine.ray_compat import replaced
from sweeps.engine.ray_compat.environment import obeys_gitignore

AGENTS = ("DashboardAgent", "RuntimeEnvAgent")
"""The processes that a raylet starts for itself. It ends its workers and itself when one ends."""
_POLL_SECONDS = 0.1
_PID = re.compile(r"^\s*pid: (\d+)", re.MULTILINE)
_DETAIL = re.compile(r"Worker exit detail: (.*?)(?:\. |\.?$)", re.MULTILINE)


class LostWorker(NamedTuple):
    """The process of a lost actor, and how Ray explains its end: empty when it does not."""

    pid: int
    detail: str


def node_options(directory: Path) -> dict[str, Any]:
    """Return the private arguments of `ray.init` for a local node."""
    return {
        "_temp_dir": str(directory),
        "_node_ip_address": "127.0.0.1",  # needed with `_LISTEN_ON_LOOPBACK` of `environment`
    }


def job_without_sys_path() -> Any:
    """Return a Ray job that adds no directory of the driver to its workers' `sys.path`.

    Ray puts these directories first, so a user's `queue.py` would shadow Python's.
    """
    from ray.job_config import JobConfig

    kind: Any = JobConfig

    class Job(kind):  # type: ignore[misc]
        def _serialize(self) -> Any:
            self._py_driver_sys_path.clear()  # `ray.init` fills it between the two
            return super()._serialize()

    return Job()


@contextmanager
def preserve_signal_handlers() -> Iterator[None]:
    """Keep this process' SIGTERM handler and standard output while Ray starts.

    Ray's Python handler raises SystemExit anywhere, even where Python can only print and drop it.
    That of its C++ library calls the driver's handler, and aborts the process three seconds later.
    Ray's processes inherit the blocked SIGHUP: a closed terminal must not end workers before
    trials have saved. A trial's reason describes lost workers, so Ray's thread that prints them is
    off.
    """
    from ray._private import utils, worker

    alarm = signal.getitimer(signal.ITIMER_REAL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # children inherit it
    with (
        replaced(utils, "set_sigterm_handler", lambda _: None),  # the driver has its own
        replaced(worker, "listen_error_messages", lambda *_: None),  # prints to standard output
    ):
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            if not any(alarm):  # otherwise the alarm is not Ray's
                signal.alarm(0)


@contextmanager
def patch_ray_node(
    setup_worker: Path, started: Callable[[str, Popen[bytes]], None]
) -> Iterator[None]:
    """Skip processes of a Ray node that no sweep uses and that no option of Ray disables.

    The API server, for whose start Ray waits, the log monitor, the autoscaler's monitor, and the
    agent's reports for a dashboard.
    """
    from ray._private import node as node_module
    from ray._private import parameter, services, utils

    complete: Any = parameter.RayParams
    start: Any = services.start_ray_process

    def start_process(command: Any, process_type: str, *arguments: Any, **options: Any) -> Any:
        made = start(command, process_type, *arguments, **options)
        started(process_type, made.process)
        return made

    ray_node: Any = node_module  # Ray has no types for the function that it imports there
    wait = ray_node.wait_for_persisted_port

    def wait_for_port(*arguments: Any, timeout_ms: int) -> Any:
        """Wait without the GIL, which Ray's own wait holds: a thread watches the processes."""
        end = time.monotonic() + timeout_ms / 1000
        while True:
            try:
                return wait(*arguments, timeout_ms=1, poll_interval_ms=1)
            except RuntimeError:
                if time.monotonic() >= end:
                    raise
            time.sleep(_POLL_SECONDS)

    node = functools.partial(
        complete,
        no_monitor=True,  # no node is added or removed
        include_log_monitor=False,  # no worker's output is printed
        setup_worker_path=str(setup_worker),  # workers start by way of the fork server
    )
    with (
        replaced(parameter, "RayParams", node),  # `ray.init` has no arguments for these three
        replaced(ray_node, "wait_for_persisted_port", wait_for_port),
        replaced(services, "start_ray_process", start_process),  # `init` returns no processes
        replaced(services, "start_api_server", lambda *_, **__: ("", None)),  # `init` waits for it
        # because of this error, the node's agent reports to no dashboard
        replaced(utils, "get_dashboard_dependency_error", lambda: ImportError("not asked for")),
    ):
        yield


def find_agents(raylet: int) -> dict[str, psutil.Process]:
    """Return those of `AGENTS` that a raylet has started; they get their titles a moment later."""
    found: dict[str, psutil.Process] = {}
    with suppress(psutil.Error):  # a process has ended
        for process in psutil.Process(raylet).children():
            titles = [word.strip() for word in process.cmdline()]
            found |= {name: process for name in AGENTS if f"ray::{name}" in titles}
    return found


def query_head(address: str, seconds: float) -> None:
    """Send one request to a cluster's head."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    # `ray.init` repeats a request with a wrong token for 20 s; this one fails at once.
    GcsClient(address=address).internal_kv_keys(b"", None, seconds)


def raylet_socket() -> str:
    """Return the socket of this process' node; it refuses connections once the node is gone."""
    import ray

    node: Any = ray._private.worker._global_node
    return str(node.raylet_socket_name)


def node_of_lost_actor(error: Exception | None) -> str | None:
    """Return the id of the node on which an actor ran, by Ray's error; None if it is unknown."""
    import ray

    actor = getattr(error, "actor_id", None)
    if actor is None:
        return None
    # The public state API needs the dashboard, which a cluster may lack.
    node: str | None = ray._private.state.actors(actor).get("Address", {}).get("NodeID")
    return node


def draining_nodes() -> set[str]:
    """Return the ids of the cluster's nodes that are about to be taken away."""
    from ray._private.state import state

    # The public state API needs the dashboard, which a cluster may lack.
    return set(state.get_draining_nodes())


def drain_node(node: str, address: str, reason: str) -> None:
    """Tell a cluster's head that a node is about to be taken away.

    Nothing starts there any more; the node ends once it is idle.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated import autoscaler_pb2

    protocol: Any = autoscaler_pb2  # Ray has no types for it
    kind = protocol.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    # The command `ray drain-node` sends this request; there is no public function for it.
    GcsClient(address=address).drain_node(node, kind, reason, 0)


def is_head(node: Mapping[str, Any]) -> bool:
    """Return whether a node is its cluster's head."""
    return "node:__internal_head__" in node["Resources"]


def refuses_token(error: BaseException) -> bool:
    """Return whether an error says that a cluster refuses this process' token."""
    # Ray raises several types of errors for it: its own and gRPC's.
    return "authenti" in f"{type(error).__name__} {error}".lower()


def is_version_mismatch(message: str) -> bool:
    """Return whether an error says that a cluster has another version of Ray or Python."""
    # Ray has no exception type for it.
    return "version mismatch" in message.lower()


def lost_worker(error: BaseException | None) -> LostWorker | None:
    """Return the process of a lost actor; None if the error does not name it."""
    # Ray gives the process id nowhere but in the error's text.
    text = str(error)
    if (found := _PID.search(text)) is None:
        return None
    detail = _DETAIL.search(text)
    return LostWorker(int(found[1]), detail[1] if detail else "")


def error_logs(pid: int) -> list[Path]:
    """Return the files with the standard error of a worker; empty without a local Ray."""
    from ray._private import worker

    node = worker._global_node
    if node is None:
        return []
    # Ray gives the directory and the names of its log files nowhere else.
    return [*map(Path, glob.glob(f"{glob.escape(node.get_logs_dir_path())}/worker-*-{pid}.err"))]


def visit_uploaded(
    directory: Path, excludes: Iterable[str], visit: Callable[[Path], None]
) -> None:
    """Call a function with each path that Ray would upload from a directory."""
    # Another parser of `.gitignore` and `.rayignore` could give other results.
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    silent = logging.getLogger(f"{__name__}.silent")  # Ray logs what `visit` raises
    silent.disabled = True
    _dir_travel(
        directory,
        [_get_excludes(directory, [*excludes])],
        visit,
        include_gitignore=obeys_gitignore(),
        logger=silent,
    )
