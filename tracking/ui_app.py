"""The server process of `sweep ui`: its pages, a secret per start, and a list of requests.

    python -P -m tracking.ui_app FD DIR

FD is the inherited listening socket, so that no other process can take the port; DIR is the
directory of artifacts. The store's URI and the secret are in the environment, because other users
can read a command line.

Other users of the machine can reach the port. So each request needs a cookie, which only the link
with the secret sets. A request that is not in the list is refused, because many of MLflow's
endpoints read and write files as the user who runs the server. What must not live here: access to
artifacts (`tracking.ui_artifacts`), and starting this process (`tracking.ui`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tracking.address import is_server

ENV_LOGIN = "SWEEP_UI_LOGIN"
ENV_STORE = "MLFLOW_BACKEND_STORE_URI"

LOGIN = "login"
"""The name of the secret in the link's query."""
PAGE = "/sweep"
"""The path of the page of one sweep, if the server has one."""
_HOSTS = ("127.0.0.1", "localhost")

_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]
_Receive = Callable[[], Awaitable[_Message]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]
_Headers = list[tuple[bytes, bytes]]
Page = Callable[[Executor], tuple[str, str]]
"""Returns the page of a sweep with a mark that changes with it. May have the executor draw it anew
for the next request. Raises `PageError`."""


class PageError(Exception):
    """The page of a sweep cannot be drawn; the message says why."""


# The page of runs requests `gateway-proxy`; it has no target, as `tracking.ui` sets no gateway.
_API = r"/ajax-api/[23]\.0/mlflow/"
_ALLOWED = {
    "GET": re.compile(
        rf"/|{PAGE}|/health|/version|/static-files/.+|/get-artifact|/model-versions/get-artifact|"
        rf"{_API}(artifacts/list|experiments/(get|get-by-name|search)|runs/get|"
        r"metrics/get-history(-bulk(-interval)?)?|get-trace-artifact|"
        r"registered-models/(get|search|alias|get-latest-versions)|model-versions/(get|search)|"
        r"logged-models/[^/]+(/artifacts/(directories|files))?|"
        r"traces(/[^/]+(/info)?)?|datasets/[^/]+(/records|/experiment-ids)?|"
        r"scorers/list|label-schemas/list|gateway-proxy|server-info|ui-telemetry|workspaces)"
    ),
    "POST": re.compile(
        r"/graphql|"
        rf"{_API}((experiments|runs|logged-models|datasets|traces|issues)/search|"
        r"experiments/(search-datasets|update|delete|restore|(set|delete)-experiment-tag)|"
        r"runs/(update|delete|restore|(set|delete)-tag)|"
        r"traces/(metrics|batchGetInfos|calculate-filter-correlation)|"
        r"registered-models/(get-latest-versions|rename|alias|set-tag)|"
        r"model-versions/(set-tag|transition-stage))"
    ),
    "PATCH": re.compile(rf"{_API}(registered-models|model-versions)/update"),
    "DELETE": re.compile(
        rf"{_API}(registered-models/(delete|delete-tag|alias)|model-versions/(delete|delete-tag))"
    ),
}
_LOGGED_IN = (
    "<!doctype html><meta charset=utf-8><title>sweep ui</title>"
    "<noscript>These pages need JavaScript.</noscript>"
    "<script>try {for (const [key, value] of Object.entries(%s))"
    " if (localStorage.getItem(key) === null) localStorage.setItem(key, value)}"
    " catch {} location.replace(location.pathname + location.hash)</script>"
)
"""A browser may refuse local storage; the page opens nevertheless."""


class Guard:
    """ASGI middleware that passes on only allowed requests with the cookie."""

    def __init__(
        self, app: _App, login: str, port: int, settings: Mapping[str, str] | None = None
    ) -> None:
        self._app = app
        self._login = login.encode()
        self._port = port
        self._logged_in = (_LOGGED_IN % json.dumps(settings or {})).encode()

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [(name.lower(), value) for name, value in scope["headers"]]
        method, path = scope["method"], scope["path"]
        if method == "GET" and path in ("/", PAGE) and self._has_login(scope["query_string"]):
            # This is no HTTP redirect: after a link from another site, a browser would follow one
            # without a SameSite=Strict cookie. Also, the page's script keeps the part after the #.
            await _answer(send, 200, self._logged_in, ("set-cookie", self._cookie()))
        elif not self._has_cookie(headers):
            await _answer(send, 401, b"Open the link that sweep ui printed when it started.\n")
        elif not _is_own_page(headers):
            await _answer(send, 403, b"Pages of other servers may not ask this one.\n")
        elif not is_allowed(method, path):
            text = (
                f"{method} {path} is refused: this server shows what is tracked, and edits names, "
                "tags and notes; for anything else use mlflow on the store itself\n"
            )
            await _answer(send, 403, text.encode())
        else:
            await self._app(scope, receive, send)

    def _cookie(self) -> str:
        name = cookie_name(self._port)
        return f"{name}={self._login.decode()}; Path=/; HttpOnly; SameSite=Strict"

    def _has_login(self, query: bytes) -> bool:
        given = parse_qs(query.decode(errors="replace")).get(LOGIN, [])
        return len(given) == 1 and secrets.compare_digest(given[0].encode(), self._login)

    def _has_cookie(self, headers: _Headers) -> bool:
        wanted = cookie_name(self._port).encode()
        pairs = [
            pair.strip().partition(b"=")
            for name, value in headers
            if name == b"cookie"
            for pair in value.split(b";")
        ]
        # A server on another port of this host can set a cookie of the same name.
        return any(
            name == wanted and secrets.compare_digest(value, self._login)
            for name, _, value in pairs
        )


def cookie_name(port: int) -> str:
    """Return the name of the cookie for the server on a port."""
    return f"sweep-ui-{port}"


def is_allowed(method: str, path: str) -> bool:
    """Whether a logged-in user may send this request."""
    pattern = _ALLOWED.get("GET" if method == "HEAD" else method)
    return pattern is not None and pattern.fullmatch(path) is not None


def _is_own_page(headers: _Headers) -> bool:
    """Whether a request comes from a page of this server, or from a program without an origin.

    SameSite does not suffice: to a browser all ports of this machine are the same site, and a name
    of another site may lead here.
    """
    own = [b"http://" + value for name, value in headers if name == b"host"]
    if [urlsplit(one).hostname for one in own] not in [[host.encode()] for host in _HOSTS]:
        return False
    for name, value in headers:
        if name == b"origin" and [value] != own:
            return False
        if name == b"sec-fetch-site" and value not in (b"same-origin", b"none"):
            return False
    return True


async def _answer(send: _Send, status: int, body: bytes, *headers: tuple[str, str]) -> None:
    kind = "text/html" if body.startswith(b"<!doctype") else "text/plain"
    always = [
        ("content-type", f"{kind}; charset=utf-8"),
        ("content-length", str(len(body))),
        ("cache-control", "no-store"),
        ("referrer-policy", "no-referrer"),
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
    ]
    encoded = [(name.encode(), value.encode()) for name, value in (*always, *headers)]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


class _Pages:
    """What the guard protects: the page of a sweep, and MLflow's pages if they are served here."""

    def __init__(
        self, page: Callable[[], tuple[str, str]] | None, mlflow: Future[_App] | None
    ) -> None:
        self._page, self._mlflow = page, mlflow

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Answer one request; one for MLflow waits until that is imported."""
        path = scope["path"]
        if self._page is not None and path == PAGE:
            await self._answer_with_page(self._page, scope["headers"], send)
        elif self._page is not None and path == "/health":
            await _answer(send, 200, b"OK\n")
        elif self._mlflow is None:
            await _answer(send, 404, b"The tracking server has MLflow's pages.\n")
        else:
            app = await asyncio.wrap_future(self._mlflow)
            await app(scope, receive, send)

    async def _answer_with_page(
        self, page: Callable[[], tuple[str, str]], headers: _Headers, send: _Send
    ) -> None:
        try:
            mark, text = page()
        except PageError as error:
            await _answer(send, 500, f"{error}\n".encode())
            return
        tag = f'"{mark}"'
        if (b"if-none-match", tag.encode()) in headers:
            await _answer(send, 304, b"", ("etag", tag))
        else:
            await _answer(send, 200, text.encode(), ("etag", tag))


def main(descriptor: int, artifacts: Path, page: Page | None = None) -> None:
    """Serve until SIGTERM or the parent's end: MLflow's pages, if the store is no server, and one
    more page.
    """
    login, store = os.environ.pop(ENV_LOGIN), os.environ[ENV_STORE]
    import uvicorn

    from tracking.mlflow_compat import BROWSER_SETTINGS

    Thread(target=_end_with_parent, daemon=True).start()
    listener = socket.socket(fileno=descriptor)
    # One thread imports MLflow and draws the page: imports of two threads can disturb each other.
    with ThreadPoolExecutor(1) as executor:
        mlflow = None if is_server(store) else executor.submit(_load_mlflow, store, artifacts)
        pages = _Pages(page and partial(page, executor), mlflow)
        guarded = Guard(pages, login, listener.getsockname()[1], BROWSER_SETTINGS)
        # no access log: it would contain the secret of the link
        config = uvicorn.Config(
            guarded, access_log=False, log_level="info", proxy_headers=False, lifespan="off"
        )
        server = uvicorn.Server(config)

        def end_after_failure(loaded: Future[_App]) -> None:
            server.should_exit = loaded.exception() is not None

        if mlflow is not None:
            mlflow.add_done_callback(end_after_failure)
        server.run(sockets=[listener])
        if mlflow is not None and mlflow.done():
            mlflow.result()  # raises what has ended the server


def _end_with_parent() -> None:
    """End this process when the one that started it has ended, and with it standard input."""
    while os.read(0, 1024):
        pass
    os._exit(0)


def _load_mlflow(store: str, artifacts: Path) -> _App:
    from tracking.mlflow_compat import make_pages
    from tracking.ui_artifacts import below

    app: _App = make_pages(store, artifacts, below(artifacts))
    return app


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
