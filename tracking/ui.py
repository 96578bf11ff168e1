"""The MLflow user interface: starting its server, and addresses of the pages worth opening.

The server runs in a process of its own, from the same environment, bound to this machine. What
must not live here: mlflow as an import, opening a browser, printing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO
from urllib.parse import quote, urlencode

from redaction.secrets import redact
from tracking.address import is_server

DEFAULT_ADDRESS = "http://127.0.0.1:5000"
"""Where the user interface is, unless another port is asked for."""

_START_SECONDS = 180.0  # 20 to 60 s were measured on two cores
_STOP_SECONDS = 5.0
_ENVIRONMENT = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PYTHONSAFEPATH": "1",  # it starts processes of its own
}


class ServerError(RuntimeError):
    """The user interface's server did not come up."""


class PortTaken(ValueError):
    """Somebody else listens where the user interface shall."""


class Server:
    """A running `mlflow server`; a context manager that stops it.

    Attributes:
        url: The address, such as `http://127.0.0.1:5000`.
    """

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.url = url
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """The process id, which is also the id of the process group."""
        return self._process.pid

    def is_running(self) -> bool:
        """Whether the server's main process lives."""
        return self._process.poll() is None

    def wait(self) -> int:
        """Wait until the server ends by itself; returns its exit status."""
        return self._process.wait()

    def stop(self) -> None:
        """End the server and every process it started; a second call does nothing."""
        if self._log.closed:
            return
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        self._signal(signal.SIGKILL)  # workers that outlived the main process, too
        self._process.wait()
        self._log.close()

    def output(self) -> str:
        """What the server printed last, without secrets."""
        self._log.flush()
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), 4000, max(size - 4000, 0))
        return redact(tail.decode(errors="replace")).strip()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def start_server(
    uri: str,
    artifact_root: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    timeout: float = _START_SECONDS,
) -> Server:
    """Start the user interface on a tracking database and wait until it answers.

    Args:
        uri: The database, such as `sqlite:///runs/mlflow.db`.
        artifact_root: Where artifacts lie that go through the server.
        port: 0 takes a free one.
        timeout: Seconds to wait; a cold start takes 20 to 60.

    Raises:
        ValueError: `uri` is a server already; its pages can be opened as they are.
        PortTaken: The port is in use; whoever is there would be taken for ours.
        ServerError: It ended or did not answer in time; the message holds its last output.
    """
    if is_server(uri):
        raise ValueError(f"{redact(uri)} is a tracking server already; open it in a browser")
    port = _free_port(host, port)
    command = [
        sys.executable,
        "-P",
        "-m",
        "mlflow",
        "server",
        "--host",
        host,
        "--port",
        str(port),
        "--workers",
        "1",
        # Else uvicorn, whatever Python's options are, imports from the working directory first.
        "--uvicorn-opts",
        shlex.join(("--app-dir", os.path.dirname(os.__file__))),
    ]
    command += ["--artifacts-destination", str(artifact_root.absolute())]
    # The database's address may hold a password, and command lines are readable by every user of
    # the machine.
    environment = {**os.environ, **_ENVIRONMENT, "MLFLOW_BACKEND_STORE_URI": uri}
    environment.pop("MLFLOW_TRACKING_URI", None)
    log = tempfile.TemporaryFile()  # noqa: SIM115 - Server.stop closes it
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    server = Server(f"http://{host}:{port}", process, log)
    try:
        _wait_until_healthy(server, timeout)
    except BaseException:  # Ctrl-C while it starts leaves no server behind; raised again
        server.stop()
        raise
    return server


def runs_page(
    base: str,
    experiment_id: str,
    order_by_metric: str,
    ascending: bool,
    view_key: str | None = None,
    search: str | None = None,
) -> str:
    """Return the address of an experiment's training runs, ordered by a metric's last value.

    Args:
        base: The server's address.
        order_by_metric: Such as `best/val/loss`.
        ascending: Smallest first.
        view_key: Of a `tracking.shared_view.SharedView` that a tag of the experiment holds: its
            order, columns and search are shown.
        search: Which runs are shown where there is no such view; None: all.
    """
    query = {"workflowType": "machine_learning"}
    if view_key is not None:
        query["viewStateShareKey"] = view_key
    else:
        query["orderByKey"] = f"metrics.`{order_by_metric}`"
        query["orderByAsc"] = "true" if ascending else "false"
        if search is not None:
            query["searchFilter"] = search
    runs = f"{base.rstrip('/')}/#/experiments/{quote(experiment_id, safe='')}/runs"
    return f"{runs}?{urlencode(query, quote_via=quote)}"


def compare_page(base: str, run_ids: Sequence[str], experiment_ids: Sequence[str]) -> str:
    """Return the address of the page that compares runs side by side.

    Which parameters and metrics it shows at first is MLflow's own choice: the address takes none.
    """
    query = {"runs": _json(run_ids), "experiments": _json(experiment_ids)}
    return f"{base.rstrip('/')}/#/compare-runs?{urlencode(query, quote_via=quote)}"


def charts_page(base: str, experiment_ids: Sequence[str], view_key: str) -> str:
    """Return the address of the charts of one or several experiments, as a shared view has them.

    Args:
        view_key: Of a `tracking.shared_view.SharedView` that a tag of each holds.
    """
    query = {
        "workflowType": "machine_learning",
        "viewStateShareKey": view_key,
        "compareRunsMode": "CHART",
    }
    page = f"experiments/{quote(experiment_ids[0], safe='')}/runs"
    if len(experiment_ids) > 1:
        page, query = "compare-experiments/s", {"experiments": _json(experiment_ids), **query}
    return f"{base.rstrip('/')}/#/{page}?{urlencode(query, quote_via=quote)}"


def metrics_page(
    base: str, run_ids: Sequence[str], experiment_ids: Sequence[str], metrics: Sequence[str]
) -> str:
    """Return the address of the page that draws the curves of some metrics for some runs."""
    query = {
        "runs": _json(run_ids),
        "metric": json.dumps(metrics[0]),
        "experiments": _json(experiment_ids),
        "plot_metric_keys": _json(metrics),
        "x_axis": "step",
    }
    return f"{base.rstrip('/')}/#/metric?{urlencode(query, quote_via=quote)}"


def _json(texts: Sequence[str]) -> str:
    return json.dumps(list(texts), separators=(",", ":"))


def _free_port(host: str, port: int) -> int:
    with socket.socket() as probe:
        # as the server itself does: a port whose connections are only closing is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise PortTaken(
                f"port {port} of {host} cannot be used ({error}); it must be free, and one from 1 "
                "to 65535; choose another with --port, or let one be found with --port 0"
            ) from None
        return int(probe.getsockname()[1])


def _wait_until_healthy(server: Server, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # never through a proxy to ourselves
    while time.monotonic() < deadline:
        if not server.is_running():
            raise ServerError(
                f"mlflow server ended with status {server.wait()}:\n{server.output()}"
            )
        try:
            with opener.open(f"{server.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:  # refused or reset while it starts; urllib's own errors are OSErrors
            time.sleep(0.2)
    raise ServerError(f"mlflow server did not answer within {timeout:g} s:\n{server.output()}")
