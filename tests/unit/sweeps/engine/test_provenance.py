from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sweeps.engine.provenance import provenance


def test_command_line_is_recorded_without_secrets(tmp_path: Path) -> None:
    command = [
        "/usr/bin/sweep",
        "run",
        "my file.yaml",
        "--token",
        "canary",
        "--tracking-uri",
        "http://u:canary@h",
    ]
    tags = provenance(tmp_path, command)
    assert tags["gradsweep.command"] == (
        "/usr/bin/sweep run 'my file.yaml' --token '[hidden]' --tracking-uri 'http://[hidden]@h'"
    )
    assert tags["mlflow.source.name"] == "sweep"


def test_variables_that_decide_numbers_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("UNRELATED", "1")
    tags = provenance(tmp_path, ["sweep"])
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in tags["gradsweep.environment"].split()
    assert "UNRELATED" not in tags["gradsweep.environment"]
    assert tags["gradsweep.cpu"]


def test_provenance_is_always_valid_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", os.fsdecode(b"andr\xe9"))
    tags = provenance(tmp_path, ["sweep", "run", os.fsdecode(b"t\xe9st.yaml")])
    assert tags["mlflow.user"] == r"andr\udce9"
    assert tags["gradsweep.command"] == r"sweep run 't\udce9st.yaml'"


def test_git_state_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NAME": "A", "EMAIL": "a@b.invalid"}.items():
        monkeypatch.setenv(f"GIT_AUTHOR_{name}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", value)

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    assert "mlflow.source.git.commit" not in provenance(tmp_path, ["sweep"])
    git("init", "--initial-branch", "trunk")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "one")
    tags = provenance(tmp_path, ["sweep"])
    assert tags["mlflow.source.git.commit"] == git("rev-parse", "HEAD")
    assert tags["mlflow.source.git.branch"] == "trunk"
    assert tags["gradsweep.git.dirty"] == "false"
    (tmp_path / "a").write_text("2")
    assert provenance(tmp_path, ["sweep"])["gradsweep.git.dirty"] == "true"
