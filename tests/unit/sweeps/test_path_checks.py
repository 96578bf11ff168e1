"""Files are written only where no other user can change them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sweeps.errors import UserError
from sweeps.path_checks import check_file, check_private, make_private

GiveAway = Callable[[Path], None]


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> GiveAway:
    """Makes a path another user's: for root, who may do so, really; for others by their number."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, 12345, 12345, follow_symlinks=False)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 12345)

    return give


def test_export_goes_into_the_users_own_directory(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for name in ("own", "new", "new/deeper"):
        check_private(tmp_path / name, "--export")
    assert [each.name for each in tmp_path.iterdir()] == ["own"]


@pytest.mark.parametrize("place", ["theirs", "theirs/new", "theirs/new/deeper"])
def test_export_into_another_users_directory_is_refused(
    tmp_path: Path, give_away: GiveAway, place: str
) -> None:
    (tmp_path / "theirs").mkdir()
    give_away(tmp_path / "theirs")
    with pytest.raises(
        UserError, match=r"theirs belongs to user .*choose a directory of your own"
    ):
        check_private(tmp_path / place, "--export")
    assert not [*(tmp_path / "theirs").iterdir()]


@pytest.mark.parametrize(
    ("mode", "place", "is_safe"),
    [
        (0o777, "shared", False),
        (0o777, "shared/new", False),
        (0o1777, "shared", False),
        (0o1777, "shared/new", True),
    ],
)
def test_new_directory_below_a_sticky_one_is_safe(
    tmp_path: Path, mode: int, place: str, is_safe: bool
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(mode)
    if is_safe:
        check_private(tmp_path / place, "--export")
    else:
        with pytest.raises(UserError, match=f"every user may write to .*mode {mode:o}.*chmod o-w"):
            check_private(tmp_path / place, "--export")


@pytest.mark.parametrize(("mode", "is_safe"), [(0o700, True), (0o777, False), (0o1777, True)])
def test_file_is_created_where_nobody_else_may_replace_it(
    tmp_path: Path, mode: int, is_safe: bool
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(mode)
    if is_safe:
        check_file(tmp_path / "shared/report.html", "--output")
    else:
        with pytest.raises(UserError, match="every user may write to"):
            check_file(tmp_path / "shared/report.html", "--output")


def test_links_of_the_user_are_followed(tmp_path: Path, give_away: GiveAway) -> None:
    for name in ("target", "shared"):
        (tmp_path / name).mkdir()
    link = tmp_path / "shared/report.html"
    link.symlink_to(tmp_path / "target/report.html")
    check_file(link, "--output")
    give_away(link)
    with pytest.raises(UserError, match="is a symbolic link that belongs to user"):
        check_file(link, "--output")


def test_link_targets_are_checked_too(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "report.html").symlink_to(tmp_path / "open/report.html")
    with pytest.raises(UserError, match="open"):
        check_file(tmp_path / "report.html", "--output")


@pytest.mark.parametrize("place", ["theirs/mine", "theirs/mine/new", "link", "link/new"])
def test_directory_below_another_users_is_refused(
    tmp_path: Path, give_away: GiveAway, place: str
) -> None:
    """Whoever owns a parent can move the directory away, and put another one in its place."""
    (tmp_path / "theirs/mine").mkdir(parents=True)
    (tmp_path / "link").symlink_to("theirs/mine")
    give_away(tmp_path / "theirs")
    for check in (check_private, make_private):
        with pytest.raises(UserError, match=r"theirs belongs to user .*choose a directory of"):
            check(tmp_path / place, "--export")
    with pytest.raises(UserError, match=r"theirs belongs to user"):
        check_file(tmp_path / place / "report.html", "--output")
    assert [each.name for each in tmp_path.rglob("*") if each.name == "new"] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away; run it as root")
@pytest.mark.parametrize("place", ["shared/link", "shared/link/new", "shared/link/../new"])
def test_planted_link_to_a_directory_is_not_followed(tmp_path: Path, place: str) -> None:
    for name in ("shared", "mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "shared").chmod(0o1777)
    link = tmp_path / "shared/link"
    link.symlink_to(tmp_path / "mine")
    os.chown(link, 12345, 12345, follow_symlinks=False)
    place = f"{tmp_path}/{place}"
    if ".." in place:  # as a link of one's own, which names the planted one
        (tmp_path / "own").symlink_to(place)
        place = f"{tmp_path}/own"
    for check in (check_private, make_private):
        with pytest.raises(UserError, match=r"link is a symbolic link that belongs to user 12345"):
            check(Path(place), "--export")
    with pytest.raises(UserError, match=r"link is a symbolic link that belongs to user 12345"):
        check_file(Path(place) / "report.html", "--output")
    assert not [*(tmp_path / "mine").iterdir()]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away; run it as root")
def test_directory_that_appeared_after_the_check_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    check_private(tmp_path / "new", "--export")
    (tmp_path / "new").mkdir()
    os.chown(tmp_path / "new", 12345, 12345)
    with pytest.raises(UserError, match=r"new belongs to user 12345"):
        make_private(tmp_path / "new", "--export")


def test_own_links_are_followed_to_the_directory_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "relative").symlink_to("a/../a/b")
    (tmp_path / "absolute").symlink_to(tmp_path / "relative")
    assert (
        make_private(tmp_path / "absolute/new/deeper", "--export") == tmp_path / "a/b/new/deeper"
    )
    assert (tmp_path / "a/b/new/deeper").is_dir()
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(UserError, match="Too many levels of symbolic links"):
        make_private(tmp_path / "circle", "--export")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Not a directory"):
        make_private(tmp_path / "file/new", "--export")
