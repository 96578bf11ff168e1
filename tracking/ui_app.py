"""The process behind `sweep ui`: MLflow's pages, guarded. `python -P -m tracking.ui_app FD DIR`.

FD is the listening socket, inherited, so that nobody else can take the port before it answers;
DIR is where artifacts lie. The store's address and the login come in the environment, which other
users cannot read, unlike a command line. What must not live here: what is allowed
(`tracking.ui_guard`, `tracking.ui_artifacts`), and who starts it (`tracking.ui`).
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

    from tracking.mlflow_compat import make_pages
    from tracking.ui_artifacts import below
    from tracking.ui_guard import Guard

    listener = socket.socket(fileno=descriptor)
    pages = make_pages(os.environ[ENV_STORE], artifacts, below(artifacts))
    guarded = Guard(pages, login, listener.getsockname()[1])
    # no access log: the link's login would stand in it
    config = uvicorn.Config(guarded, access_log=False, log_level="info", proxy_headers=False)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
