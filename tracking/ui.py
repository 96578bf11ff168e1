"""The MLflow user interface: starting its server, and addresses of the pages worth opening.

The server runs in a process of its own, from the same environment, bound to this machine, and
answers only to who has the link (`tracking.ui_app`). What must not live here: mlflow as an import,
opening a browser, printing.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO
from urllib.parse import quote, urlencode, urlsplit

from redaction.secrets import redact
from tracking.address import is_server
from tracking.ui_app import ENV_LOGIN, ENV_STORE
from tracking.ui_guard import LOGIN, cookie_name

DEFAULT_ADDRESS = "http://127.0.0.1:5000"
"""Where the user interface is, unless another port is asked for."""

_START_SECONDS = 180.0  # 20 to 60 s were measured on two cores
_STOP_SECONDS = 5.0
SERVER_ENVIRONMENT = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PYTHONSAFEPATH": "1",  # it starts processes of its own
}
"""What every server of MLflow's is started with."""


class ServerError(RuntimeError):
    """The user interface's server did not come up."""


class PortTaken(ValueError):
    """Somebody else listens where the user interface shall."""


class UiServer:
    """A running server of MLflow's pages; a context manager that stops it.

    Args:
        url: Its address.
        process: Its main process, which leads a process group.
        log: What it prints.
        login: What its link carries; None: it asks for none.

    Attributes:
        url: The address, such as `http://127.0.0.1:5000`.
    """

    def __init__(
        self,
        url: str,
        process: subprocess.Popen[bytes],
        log: IO[bytes],
        login: str | None = None,
    ) -> None:
        self.url = url
        self._process = process
        self._log = log
        self._login = login
        self._openings: list[Path] = []

    def link(self, page: str) -> str:
        """Return the address of a page of this server with the login that a browser needs once."""
        if self._login is None:
            return page
        query = urlencode({LOGIN: self._login})
        return urlsplit(page)._replace(path="/", query=query).geturl()

    def opening(self, directory: Path, page: str) -> Path:
        """Write a file that leads a browser to a page; it goes when the server stops.

        Command lines are readable by every user of the machine, so a browser is given the name
        of this file and not the link.

        Args:
            directory: Where the browser of the user may read; some see no directory of /tmp.
            page: An address of this server.
        """
        descriptor, name = tempfile.mkstemp(".html", ".sweep-ui-", directory.absolute())
        link = html.escape(self.link(page))
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(
                '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
                f'<meta http-equiv="refresh" content="0; url={link}"><a href="{link}">MLflow</a>'
            )
        self._openings.append(Path(name))
        return Path(name)

    def health(self) -> urllib.request.Request:
        """Return the request that a running server answers."""
        headers = {}
        if self._login is not None:
            name = cookie_name(urlsplit(self.url).port or 0)
            headers["Cookie"] = f"{name}={self._login}"
        return urllib.request.Request(f"{self.url}/health", headers=headers)

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
        for opening in self._openings:
            opening.unlink(missing_ok=True)
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

    def __enter__(self) -> UiServer:
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
) -> UiServer:
    """Start the user interface on a tracking database and wait until it answers.

    It answers only to who has `UiServer.link`; artifacts are shown that lie below `artifact_root`.

    Args:
        uri: The database, such as `sqlite:///runs/mlflow.db`.
        artifact_root: Where artifacts lie.
        port: 0 takes a free one.
        timeout: Seconds to wait; a cold start takes 20 to 60.

    Raises:
        ValueError: `uri` is a server already; its pages can be opened as they are.
        PortTaken: The port is in use; whoever is there would be taken for ours.
        ServerError: It ended or did not answer in time; the message holds its last output.
    """
    if is_server(uri):
        raise ValueError(f"{redact(uri)} is a tracking server already; open it in a browser")
    login = secrets.token_urlsafe()
    # The login, and the database's address with its password: command lines are readable by every
    # user of the machine, a process' environment by its own.
    environment = {**os.environ, **SERVER_ENVIRONMENT, ENV_STORE: uri, ENV_LOGIN: login}
    for other in ("MLFLOW_TRACKING_URI", "MLFLOW_DEPLOYMENTS_TARGET"):  # it asks no other server
        environment.pop(other, None)
    with listen(host, port) as listener:
        command = [sys.executable, "-P", "-m", "tracking.ui_app"]
        command += [str(listener.fileno()), str(artifact_root.absolute())]
        url = f"http://{host}:{listener.getsockname()[1]}"
        return launch(
            command, environment, url, login=login, pass_fd=listener.fileno(), timeout=timeout
        )


def launch(
    command: Sequence[str],
    environment: Mapping[str, str],
    url: str,
    *,
    login: str | None = None,
    pass_fd: int | None = None,
    timeout: float = _START_SECONDS,
) -> UiServer:
    """Start a server's process and wait until it answers.

    Args:
        command: A program and its arguments.
        environment: Of the process.
        url: Where it will answer.
        login: What its link carries; None: it asks for none.
        pass_fd: A descriptor that it inherits.
        timeout: Seconds to wait.

    Raises:
        ServerError: It ended or did not answer in time; the message holds its last output.
    """
    log = tempfile.TemporaryFile()  # noqa: SIM115 - Server.stop closes it
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        pass_fds=[] if pass_fd is None else [pass_fd],
    )
    server = UiServer(url, process, log, login)
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
        view_key: Of a `tracking.mlflow_chart_view.SharedView` that a tag of the experiment
            holds: its order, columns and search are shown.
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
        view_key: Of a `tracking.mlflow_chart_view.SharedView` that a tag of each holds.
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


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that holds a port from now on: nobody else can answer in its place.

    Raises:
        PortTaken: The port is in use, or is none.
    """
    listener = socket.socket()
    # as any server does: a port whose connections are only closing is free
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        raise PortTaken(
            f"port {port} of {host} cannot be used ({error}); it must be free, and one from 1 "
            "to 65535; choose another with --port, or let one be found with --port 0"
        ) from None
    return listener


def _json(texts: Sequence[str]) -> str:
    return json.dumps(list(texts), separators=(",", ":"))


def _wait_until_healthy(server: UiServer, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # never through a proxy to ourselves
    while time.monotonic() < deadline:
        if not server.is_running():
            raise ServerError(
                f"the MLflow server ended with status {server.wait()}:\n{server.output()}"
            )
        try:
            with opener.open(server.health(), timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:  # refused or reset while it starts; urllib's own errors are OSErrors
            time.sleep(0.2)
    raise ServerError(f"the MLflow server did not answer within {timeout:g} s:\n{server.output()}")
