"""The server process of `sweep ui`: MLflow's pages with access control.

    python -P -m tracking.ui_app FD DIR

FD is the inherited listening socket, so that no other process can take the port; DIR is the
directory of artifacts. The store's URI and the secret are in the environment, because other users
can read a command line. What must not live here: what is allowed (`tracking.ui_guard`,
`tracking.ui_artifacts`), and starting this process (`tracking.ui`).
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

ENV_LOGIN = "SWEEP_UI_LOGIN"
ENV_STORE = "MLFLOW_BACKEND_STORE_URI"


def main(descriptor: int, artifacts: Path) -> None:
    """Serve until SIGTERM."""
    login = os.environ.pop(ENV_LOGIN)
    import uvicorn

    from tracking.mlflow_compat import BROWSER_SETTINGS, make_pages
    from tracking.ui_artifacts import below
    from tracking.ui_guard import Guard

    listener = socket.socket(fileno=descriptor)
    pages = make_pages(os.environ[ENV_STORE], artifacts, below(artifacts))
    guarded = Guard(pages, login, listener.getsockname()[1], BROWSER_SETTINGS)
    # no access log: it would contain the secret of the link
    config = uvicorn.Config(guarded, access_log=False, log_level="info", proxy_headers=False)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
