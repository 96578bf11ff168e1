"""The schema version of the installed MLflow, read without importing it."""

from __future__ import annotations

import pytest

from tracking.schema_version import TablesDiffer, check_revision


@pytest.mark.integration
def test_wanted_revision_is_mlflows_own() -> None:
    from mlflow.store.db.utils import _get_latest_schema_revision

    check_revision((_get_latest_schema_revision(),))
    check_revision(None)
    with pytest.raises(TablesDiffer, match="its tables have revision 451aebb31d03, and MLflow "):
        check_revision(("451aebb31d03",))
