from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.layout import tracking_place


@pytest.mark.parametrize(
    ("uri", "place"),
    [
        (None, ("sqlite:////r/mlflow.db", Path("/r/mlartifacts"))),
        ("sqlite:///elsewhere.db", ("sqlite:///elsewhere.db", Path("/r/mlartifacts"))),
        ("postgresql+psycopg2://h/db", ("postgresql+psycopg2://h/db", Path("/r/mlartifacts"))),
        ("http://127.0.0.1:5000", ("http://127.0.0.1:5000", None)),
        ("databricks", ("databricks", None)),
    ],
)
def test_only_a_server_keeps_artifacts_itself(
    uri: str | None, place: tuple[str, Path | None]
) -> None:
    assert tracking_place(uri, Path("/r")) == place
