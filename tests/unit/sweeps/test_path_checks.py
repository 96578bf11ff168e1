"""Files are written only where no other user can change them."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sweeps.errors import UserError
from sweeps.path_checks import (
    check_file,
    check_private,
    check_writable,
    make_private,
    write_file,
)

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
    for check in (check_private, _make):
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
    for check in (check_private, _make):
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
        _make(tmp_path / "new", "--export")


def test_own_links_are_followed_to_the_directory_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "relative").symlink_to("a/../a/b")
    (tmp_path / "absolute").symlink_to(tmp_path / "relative")
    with make_private(tmp_path / "absolute/new/deeper", "--export") as made:
        assert made == tmp_path / "a/b/new/deeper"
        assert made.is_dir()
    assert [*(tmp_path / "a/b").iterdir()] == [], "what stays empty is removed"
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(UserError, match="Too many levels of symbolic links"):
        _make(tmp_path / "circle", "--export")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Not a directory"):
        _make(tmp_path / "file/new", "--export")


def _make(directory: Path, option: str) -> None:
    with make_private(directory, option):
        pass


def test_check_creates_no_name_that_others_could_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mkdir", "rmdir"):
        monkeypatch.setattr(os, name, lambda *_, **__: pytest.fail("a name appeared"))
    for place in ("new", "new/deeper"):
        check_writable(tmp_path / place, "--root")
        check_private(tmp_path / place, "--export")
        check_file(tmp_path / place / "report.html", "--output")
    assert not [*tmp_path.iterdir()]


def _plant(kind: str, path: Path, of_user: Path) -> None:
    """Create what another user could create in `/tmp`."""
    if kind == "link":
        path.symlink_to(of_user)
    elif kind == "fifo":
        os.mkfifo(path, 0o666)
    elif kind == "file":
        path.touch(0o666)
    else:  # in the place of its directory
        path.parent.symlink_to(of_user.parent)
        path = path.parent
    os.chown(path, 12345, 12345, follow_symlinks=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away; run it as root")
@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("kind", ["link", "fifo", "file", "parent"])
def test_what_appears_after_the_check_is_not_written_to(
    tmp_path: Path, kind: str, overwrite: bool
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "report.html").write_text("mine")
    target = tmp_path / "shared" / ("new/report.html" if kind == "parent" else "report.html")
    check_file(target, "--output")
    _plant(kind, target, mine / "report.html")
    with pytest.raises(UserError, match=r"^--output .*report.html: .*belongs to user 12345"):
        write_file(target, b"page", "--output", overwrite=overwrite)
    with pytest.raises(UserError, match=r"^--output .*report.html: .*belongs to user 12345"):
        check_file(target, "--output")
    assert (mine / "report.html").read_text() == "mine"
    assert [one.name for one in mine.iterdir()] == ["report.html"]


def test_file_is_written_whole_and_its_links_stay(tmp_path: Path) -> None:
    link, pipe, target = tmp_path / "link", tmp_path / "pipe", tmp_path / "pages/one.html"
    link.symlink_to("pages/one.html")
    (tmp_path / ".one.html.tmp").touch()
    write_file(link, b"page", "--output")
    assert (link.is_symlink(), target.read_text()) == (True, "page")
    assert [one.name for one in target.parent.iterdir()] == ["one.html"]
    with pytest.raises(FileExistsError):
        write_file(target, b"other", "--write", overwrite=False)
    assert target.read_text() == "page"
    write_file(tmp_path / "new.yaml", b"new", "--write", overwrite=False)
    assert (tmp_path / "new.yaml").read_text() == "new"
    os.mkfifo(pipe)
    reading, writing = os.pipe()
    with ThreadPoolExecutor() as reader, open(reading, "rb") as anonymous:
        read = reader.submit(pipe.read_text)
        write_file(pipe, b"page", "--output")
        assert read.result() == "page"
        write_file(Path(f"/dev/fd/{writing}"), b"page", "--output")
        os.close(writing)
        assert anonymous.read() == b"page"
    write_file(Path("/dev/null"), b"page", "--output")


@pytest.mark.parametrize("earlier", [[], ["report.html"]])
def test_full_disk_keeps_the_old_file(tmp_path: Path, earlier: list[str]) -> None:
    target = tmp_path / "report.html"
    for name in earlier:
        (tmp_path / name).write_text("an earlier one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError, match=rf"{target}: cannot be written \(File too large\)"):
            write_file(target, b"x" * 2000, "--output")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [one.name for one in tmp_path.iterdir()] == earlier
    assert not earlier or target.read_text() == "an earlier one"
