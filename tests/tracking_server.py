"""MLflow's own tracking server, as a team runs it.

It has no login, as the address of a tracking server in a spec has none: while such a test runs,
another user of the machine can use it. CONTRIBUTING.md says where tests belong. What must not
live here: the server behind `sweep ui` (`tracking.ui`).
"""

from __future__ import annotations

import os
from pathlib import Path

from tracking.ui import SERVER_ENVIRONMENT, UiServer, launch, listen


def start_tracking_server(uri: str, artifact_root: Path, port: int = 0) -> UiServer:
    """Start a tracking server on a database and wait until it answers.

    Args:
        uri: The database.
        artifact_root: Where artifacts lie that go through the server.
        port: 0 takes a free one.

    Raises:
        PortTaken: The port is in use.
        ServerError: It ended or did not answer in time.
    """
    with listen("127.0.0.1", port) as listener:
        port = listener.getsockname()[1]
    command = ["-m", "mlflow", "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1"]
    command += ["--artifacts-destination", str(artifact_root.absolute())]
    environment = {**os.environ, **SERVER_ENVIRONMENT, "MLFLOW_BACKEND_STORE_URI": uri}
    environment.pop("MLFLOW_TRACKING_URI", None)
    return launch(command, environment, f"http://127.0.0.1:{port}")
