"""Start the server of `sweep ui`, and build the URLs of MLflow's pages.

The server is a child process on this machine's loopback. It answers only a browser that has opened
its link (`tracking.ui_app`). What must not live here: mlflow as an import, opening a browser,
printing.
"""

from __future__ import annotations

import html
import json
import os
import secrets
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO
from urllib.parse import quote, urlencode, urlsplit

from redaction.secrets import redact
from tracking.child_process import end_group, start_python
from tracking.ui_app import ENV_LOGIN, ENV_STORE, LOGIN, cookie_name

DEFAULT_ADDRESS = "http://127.0.0.1:5000"
"""The default address of the user interface."""

_HOST = "127.0.0.1"
_START_SECONDS = 180.0  # 20 to 60 s were measured on two cores
_STOP_SECONDS = 5.0
_TRAINING = {"workflowType": "machine_learning"}
"""Selects the pages about training, not those about GenAI."""
SERVER_ENVIRONMENT = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PYTHONSAFEPATH": "1",  # it starts processes of its own
}
"""Environment variables for every MLflow server."""


class ServerError(RuntimeError):
    """The server of the user interface did not start."""


class PortTaken(ValueError):
    """The port for the user interface cannot be used."""


class UiServer:
    """A running server of MLflow's pages; a context manager that stops it."""

    def __init__(
        self,
        url: str,
        process: subprocess.Popen[str],
        log: IO[bytes],
        login: str | None = None,
    ) -> None:
        self.url = url
        self._process = process
        self._log = log
        self._login = login
        self._redirect_files: list[Path] = []

    def link(self, page: str) -> str:
        """Return the URL of a page with the secret, which a browser needs once."""
        if self._login is None:
            return page
        parts = urlsplit(page)
        query = urlencode({LOGIN: self._login})
        return parts._replace(path=parts.path or "/", query=query).geturl()

    def redirect_file(self, directory: Path, page: str) -> Path:
        """Write an HTML file that redirects a browser to a page; `stop` removes it.

        Every user of the machine can read command lines, so the browser gets the name of this file
        instead of the link.
        """
        descriptor, name = tempfile.mkstemp(".html", ".sweep-ui-", directory.absolute())
        link = html.escape(self.link(page))
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(
                '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
                f'<meta http-equiv="refresh" content="0; url={link}"><a href="{link}">open</a>'
            )
        self._redirect_files.append(Path(name))
        return Path(name)

    def health(self) -> urllib.request.Request:
        """Return a request for the server's health check."""
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
        """Whether the server's main process runs."""
        return self._process.poll() is None

    def wait(self) -> int:
        """Wait until the server exits; returns its exit status."""
        return self._process.wait()

    def stop(self) -> None:
        """Stop the server and its child processes; a second call does nothing."""
        for redirect_file in self._redirect_files:
            redirect_file.unlink(missing_ok=True)
        if self._log.closed:
            return
        end_group(self._process, _STOP_SECONDS)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._log.close()

    def output(self) -> str:
        """The last 4,000 bytes of the server's output, without secrets."""
        self._log.flush()
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), 4000, max(size - 4000, 0))
        return redact(tail.decode(errors="replace")).strip()

    def __enter__(self) -> UiServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_server(
    uri: str,
    artifact_root: Path,
    port: int = 0,
    *,
    program: Sequence[str] = ("tracking.ui_app",),
) -> UiServer:
    """Start the user interface for a tracking store and wait until it answers.

    A browser must open `UiServer.link` first. Only artifacts below `artifact_root` are shown.
    `program` is the module that serves, with further arguments; it may add a page to those of
    MLflow (`tracking.ui_app`). A tracking server has these itself.
    """
    login = secrets.token_urlsafe()
    # The secret, and the database's URI with its password, are passed in the environment. Every
    # user of the machine can read command lines; only the same user can read an environment.
    environment = {**os.environ, **SERVER_ENVIRONMENT, ENV_STORE: uri, ENV_LOGIN: login}
    for other in ("MLFLOW_TRACKING_URI", "MLFLOW_DEPLOYMENTS_TARGET"):  # it uses no other server
        environment.pop(other, None)
    with listen(_HOST, port) as listener:
        module, *more = program
        place = [str(listener.fileno()), str(artifact_root.absolute())]
        command = ["-m", module, *place, *more]
        url = f"http://{_HOST}:{listener.getsockname()[1]}"
        return launch(command, environment, url, login=login, pass_fd=listener.fileno())


def launch(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    url: str,
    *,
    login: str | None = None,
    pass_fd: int | None = None,
) -> UiServer:
    """Start a server in a Python with these arguments, and wait until it answers."""
    log = tempfile.TemporaryFile()  # noqa: SIM115 - Server.stop closes it
    process = start_python(
        *arguments,
        environment=environment,
        stdin=subprocess.PIPE,  # ends with this process: see `tracking.ui_app`
        stdout=log,
        stderr=log,
        pass_fds=[] if pass_fd is None else [pass_fd],
    )
    server = UiServer(url, process, log, login)
    try:
        _wait_until_healthy(server)
    except BaseException:  # Ctrl-C during the start also stops the server; raised again
        server.stop()
        raise
    return server


def runs_page(
    base: str,
    experiment_id: str,
    order_by_metric: str,
    ascending: bool,
    search: str | None = None,
) -> str:
    """Return the URL of an experiment's training runs, ordered by a metric's last value."""
    query = {
        **_TRAINING,
        "orderByKey": f"metrics.`{order_by_metric}`",
        "orderByAsc": "true" if ascending else "false",
    }
    if search is not None:
        query["searchFilter"] = search
    runs = f"{base.rstrip('/')}/#/experiments/{quote(experiment_id, safe='')}/runs"
    return f"{runs}?{urlencode(query, quote_via=quote)}"


def run_page(base: str, experiment_id: str, run_id: str) -> str:
    """Return the URL of the page of one run."""
    place = f"{quote(experiment_id, safe='')}/runs/{quote(run_id, safe='')}"
    return f"{base.rstrip('/')}/#/experiments/{place}"


def compare_page(base: str, run_ids: Sequence[str], experiment_ids: Sequence[str]) -> str:
    """Return the URL of the page that compares runs side by side.

    MLflow chooses the parameters and metrics that it shows first: a URL cannot name them.
    """
    # Of a query that does not begin with `runs`, this page and that of metrics read no `runs`.
    query = {"runs": _json(run_ids), "experiments": _json(experiment_ids), **_TRAINING}
    return f"{base.rstrip('/')}/#/compare-runs?{urlencode(query, quote_via=quote)}"


def charts_page(base: str, experiment_ids: Sequence[str], view_key: str) -> str:
    """Return the URL of the charts of one or several experiments in a shared view."""
    query = {
        **_TRAINING,
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
    """Return the URL of the page with the curves of some metrics of some runs."""
    query = {
        "runs": _json(run_ids),
        "metric": json.dumps(metrics[0]),
        "experiments": _json(experiment_ids),
        "plot_metric_keys": _json(metrics),
        "x_axis": "step",
        **_TRAINING,
    }
    return f"{base.rstrip('/')}/#/metric?{urlencode(query, quote_via=quote)}"


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that no other process can take the port."""
    listener = socket.socket()
    # so that the port can be used while its old connections are still closing
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


def _wait_until_healthy(server: UiServer) -> None:
    deadline = time.monotonic() + _START_SECONDS
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # no proxy for this machine
    while time.monotonic() < deadline:
        if not server.is_running():
            raise ServerError(f"the server ended with status {server.wait()}:\n{server.output()}")
        try:
            with opener.open(server.health(), timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:  # refused or reset while it starts; urllib's own errors are OSErrors
            time.sleep(0.2)
    raise ServerError(f"the server did not answer within {_START_SECONDS:g} s:\n{server.output()}")
