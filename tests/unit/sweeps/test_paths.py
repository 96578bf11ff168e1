from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from sqlalchemy import make_url

from sweeps.errors import UserError
from sweeps.paths import (
    PROGRAM,
    ROOT_VARIABLE,
    SweepPaths,
    list_sweeps,
    resolve_root,
    tracking_place,
    tracking_uri,
)
from tracking.address import sqlite_file


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


@pytest.mark.parametrize("name", ["runs", "what?", "50%25", "%%41%?%4", "ü%C3%BC", "a{b} #1"])
def test_the_store_is_the_file_that_its_address_names(name: str) -> None:
    file = Path("/r") / name / "mlflow.db"
    address = tracking_uri(file.parent)
    assert sqlite_file(address) == file
    assert make_url(address).database == str(file)


@pytest.mark.parametrize("given", ["option", "variable"])
def test_unknown_home_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT_VARIABLE, "~no-such-user/runs")
    with pytest.raises(
        UserError, match=r"^--root ~no-such-user/runs: .* no such user; write a path"
    ):
        resolve_root(None if given == "variable" else Path("~no-such-user/runs"))
    assert SweepPaths(Path("/r"), "a").command("status") == "sweep status a --root /r"


@pytest.mark.parametrize(
    ("started", "program"),
    [
        ("other/bin/sweep", "other/bin/sweep"),  # of an environment that is not activated
        ("bin/sweep", "sweep"),  # the one on PATH
        ("train.py", "sweep"),  # a script that imports the API
        ("gone/sweep", "sweep"),
        ("sweep", "./sweep"),
    ],
)
def test_command_starts_the_program_that_said_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: str, program: str
) -> None:
    for place in ("bin/sweep", "other/bin/sweep", "train.py", "sweep"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / started)])
    paths = SweepPaths(tmp_path / "runs", "a")
    assert paths.command("status") == f"{program} status a"
    assert paths.command("status", program=PROGRAM) == "sweep status a"


def test_root_that_is_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"runs\udcff.*not valid UTF-8.*choose another"):
        resolve_root(tmp_path / os.fsdecode(b"runs\xff"))


def test_root_above_a_link_is_resolved_by_the_system(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("elsewhere/deep")
    assert resolve_root(tmp_path / "link" / ".." / "runs") == tmp_path / "elsewhere" / "runs"
    assert resolve_root(tmp_path / "link" / "runs") == tmp_path / "link" / "runs"


def test_command_is_quoted_for_the_shell(tmp_path: Path) -> None:
    root = tmp_path / "my runs"
    told = SweepPaths(root, "x; touch y").command("resume", "-s", "trials=4")
    words = ["sweep", "resume", "x; touch y", "-s", "trials=4", "--root", str(root)]
    assert shlex.split(told) == words


def test_default_root_is_omitted_from_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here, elsewhere = SweepPaths(tmp_path / "runs", "a"), SweepPaths(tmp_path / "other", "a")
    monkeypatch.delenv(ROOT_VARIABLE, raising=False)
    assert here.command("status") == "sweep status a"
    assert elsewhere.command("status") == f"sweep status a --root {tmp_path}/other"
    monkeypatch.setenv(ROOT_VARIABLE, "other")
    assert here.command("status") == f"sweep status a --root {tmp_path}/runs"
    assert elsewhere.command("status") == "sweep status a"


def test_directory_with_an_invalid_name_is_no_sweep(tmp_path: Path) -> None:
    for name in (".trash", "a", "mlartifacts", "odd\x07name"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sweep.yaml").touch()
    assert [paths.name for paths in list_sweeps(tmp_path)] == ["a"]
