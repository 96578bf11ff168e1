"""A sweep writes only below its root, and a copy not into the stores of the original."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sweeps.paths import SweepPaths
from sweeps.spec.spec import SweepSpec
from sweeps.stores import OutsideRoot, check_below_root, check_no_copy, place_of
from sweeps.trust.verification import verify
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import MadeSweep
from tracking.trusted_stores import add_trusted


@pytest.fixture(autouse=True)
def _own_trust(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def made(tmp_path: Path) -> MadeSweep:
    made = MadeSweep(tmp_path / "runs")
    made.add("complete", 0.5)
    (made.paths.trial(0) / "checkpoints").mkdir(parents=True)
    made.paths.outbox.mkdir()
    return made


@pytest.mark.parametrize(
    "name",
    [
        *("mlartifacts", "mlflow.db", "small", "small/ledger.db", "small/outbox", "small/trials"),
        *("small/outbox/outbox.db", "small/trials/0000", "small/trials/0000/checkpoints"),
        *("small/trials/0000/metrics.jsonl", "small/control", "small/ray"),
        *("small/trials/0000/artifacts/notes/deep", "small/trials/0000/figures/own.png"),
    ],
)
def test_link_out_of_the_root_is_refused(made: MadeSweep, tmp_path: Path, name: str) -> None:
    link, target = made.paths.root / name, tmp_path / "elsewhere"
    if link.exists():
        link.rename(target)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    with pytest.raises(OutsideRoot, match=f"{link} is a link to {target}, outside"):
        check_below_root(made.paths, made.spec)
    add_trusted(target.as_uri(), explicit=True)
    check_below_root(made.paths, made.spec)


def test_link_within_the_root_and_a_root_that_is_a_link_are_used(
    made: MadeSweep, tmp_path: Path
) -> None:
    trials = made.paths.trial(0).parent
    trials.rename(made.paths.root / "elsewhere")
    trials.symlink_to(made.paths.root / "elsewhere")
    check_below_root(made.paths, made.spec)
    (tmp_path / "link").symlink_to(made.paths.root)
    check_below_root(SweepPaths(tmp_path / "link", "small"), made.spec)


def test_hard_link_of_a_copy_is_refused(made: MadeSweep, tmp_path: Path) -> None:
    shutil.copytree(made.paths.root, tmp_path / "copy", copy_function=os.link)
    copy = SweepPaths(tmp_path / "copy", "small")
    with pytest.raises(OutsideRoot, match=r"has another name, too .*; make it a file of its own"):
        check_below_root(copy, made.spec)
    found = verify(copy)
    assert any("has another name, too" in one.what for one in found.contradictions)


def test_hard_link_in_a_folder_of_a_trial_is_refused(made: MadeSweep, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs.txt", made.paths.trial(0) / "artifacts/notes/0.txt"
    ours.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    ours.hardlink_to(theirs)
    with pytest.raises(OutsideRoot, match=rf"{ours} has another name, too"):
        check_below_root(made.paths, made.spec)


def _stored(made: MadeSweep, key: str, uri: str) -> SweepSpec:
    return with_overrides(made.spec, [f"{key}={uri}"])


@pytest.mark.parametrize(
    ("key", "uri"),
    [
        ("storage.checkpoints", "s3://bucket/prefix"),
        ("tracking.uri", "https://mlflow.example"),
        ("tracking.uri", "sqlite:////srv/mlflow.db"),
    ],
)
def test_copy_is_asked_about_where_it_shares_a_store(
    made: MadeSweep, tmp_path: Path, key: str, uri: str
) -> None:
    spec, before = _stored(made, key, uri), place_of(made.paths)
    check_no_copy(made.paths, spec, before)
    shutil.copytree(made.paths.root, tmp_path / "copy")
    copy = SweepPaths(tmp_path / "copy", "small")
    with pytest.raises(OutsideRoot, match=f"{key} {uri}.* --accept-changes") as refused:
        check_no_copy(copy, spec, before)
    assert str(made.paths.directory) in str(refused.value)
    check_no_copy(copy, spec, before, accepted=True)
    check_no_copy(copy, made.spec, before)  # all its stores are below its root
    check_no_copy(copy, spec, {})  # by an earlier release, which noted no place


def test_moved_sweep_is_no_copy(made: MadeSweep, tmp_path: Path) -> None:
    spec, before = _stored(made, "storage.checkpoints", "s3://bucket/prefix"), place_of(made.paths)
    shutil.copytree(made.paths.root, tmp_path / "other disk")  # as `mv` does between two
    shutil.rmtree(made.paths.root)
    check_no_copy(SweepPaths(tmp_path / "other disk", "small"), spec, before)
    (tmp_path / "other disk").rename(tmp_path / "again")
    check_no_copy(SweepPaths(tmp_path / "again", "small"), spec, before)


def test_store_in_the_old_place_of_a_moved_root_is_asked_about(
    made: MadeSweep, tmp_path: Path
) -> None:
    spec = _stored(made, "tracking.uri", f"sqlite:///{made.paths.root / 'own.db'}")
    before = place_of(made.paths)
    check_no_copy(made.paths, spec, before)
    made.paths.root.rename(tmp_path / "moved")
    with pytest.raises(OutsideRoot, match=r"tracking.uri=sqlite:///.*moved/own.db"):
        check_no_copy(SweepPaths(tmp_path / "moved", "small"), spec, before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away; run it as root")
@pytest.mark.parametrize("place", ["link", "link/runs", "own"])
def test_link_of_another_user_to_the_root_is_refused(
    made: MadeSweep, tmp_path: Path, place: str
) -> None:
    (tmp_path / "link").symlink_to(made.paths.root.parent)
    (tmp_path / "own").symlink_to("link/runs")
    os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
    with pytest.raises(OutsideRoot, match=r"link is a symbolic link that belongs to user 12345"):
        check_below_root(SweepPaths(tmp_path / place, "small"), made.spec)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away; run it as root")
def test_owner_of_the_root_is_named(made: MadeSweep) -> None:
    said: list[str] = []
    check_below_root(made.paths, made.spec, said.append)
    assert said == []
    os.chown(made.paths.root, 12345, 12345)
    check_below_root(made.paths, made.spec, said.append)
    assert len(said) == 1
    assert f"--root {made.paths.root}: {made.paths.root} belongs to user 12345" in said[0]
