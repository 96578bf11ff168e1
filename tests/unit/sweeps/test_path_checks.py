"""Files are written only where no other user can change them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sweeps.errors import UserError
from sweeps.path_checks import check_file, check_private

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
