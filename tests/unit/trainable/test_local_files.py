"""What a directory of generations syncs, and in which order: a power loss may come at any time.

Nothing is written through a link in a run's directory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from trainable.built import BUILT, Summary, check_built
from trainable.store.local import LocalFiles
from trainable.store.metrics_file import History, Row
from trainable.store.regular_files import make_directory, replace_regular, sync_file


class Disk:
    """Notes what is synced and what is renamed, by paths below a directory."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.done = root, list[str]()
        self._names: dict[str, str] = {}
        self._sync = os.fsync
        monkeypatch.setattr(os, "fsync", self._note_sync)
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._noting(getattr(os, name)))

    def name(self, path: str, short: str) -> None:
        """Write a part of paths in short."""
        self._names[path] = short

    def _note_sync(self, file: int) -> None:
        self.done.append(f"sync {self._shown(os.readlink(f'/proc/self/fd/{file}'))}")
        self._sync(file)

    def _noting(self, rename: Callable[..., None]) -> Callable[..., None]:
        def noting(source: Path, target: Path) -> None:
            self.done.append(f"{self._shown(source)} -> {self._shown(target)}")
            rename(source, target)

        return noting

    def _shown(self, path: str | Path) -> str:
        found = os.path.relpath(path, self.root)
        for name, short in self._names.items():
            found = found.replace(name, short)
        return found


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path, monkeypatch)


@pytest.fixture
def files(disk: Disk, tmp_path: Path) -> LocalFiles:
    found = LocalFiles(tmp_path / "all")
    disk.name(found.writer_dir.name, "own")
    found.open()
    return found


def _commit(files: LocalFiles, name: str = "step-1") -> None:
    def write(file: BinaryIO) -> bytes:
        file.write(b"state")
        return b"{}"

    files.commit(name, write)


def test_opening_syncs_what_it_made_and_renamed(disk: Disk, files: LocalFiles) -> None:
    assert disk.done == ["sync .", "sync all"]  # the directory, then the writer's in it
    second = LocalFiles(files.writer_dir.parent)
    disk.name(second.writer_dir.name, "second")
    disk.done.clear()
    second.open()
    assert disk.done == ["all/own -> all/second/gone-own", "sync all"]


def test_generation_is_synced_before_and_after_its_rename(disk: Disk, files: LocalFiles) -> None:
    disk.done.clear()
    _commit(files)
    new = "all/own/new-step-1"
    assert disk.done == [
        f"sync {new}/state.pt",
        f"sync {new}/manifest.json",
        f"sync {new}",
        f"{new} -> all/step-1",
        "sync all",
    ]


def test_shard_is_synced(disk: Disk, files: LocalFiles) -> None:
    begun = files.begin("step-1")
    disk.done.clear()
    files.add_shard(begun, "shard-0.pt", lambda file: file.write(b"shard"))
    assert disk.done == ["sync all/own/new-step-1/shard-0.pt"]


def test_linked_generation_is_synced_before_and_after_its_rename(
    disk: Disk, files: LocalFiles, tmp_path: Path
) -> None:
    _commit(files)
    shutil.copytree(tmp_path / "all" / "step-1", tmp_path / "donor")
    disk.done.clear()
    files.link(tmp_path / "donor", "step-2", ["state.pt", "manifest.json"])
    new = "all/own/new-step-2"
    assert disk.done == [f"sync {new}", f"{new} -> all/step-2", "sync all"]


def test_quarantine_is_synced_after_its_rename(disk: Disk, files: LocalFiles) -> None:
    _commit(files)
    disk.done.clear()
    files.quarantine("step-1")
    assert disk.done == [
        "all/step-1 -> all/own/damaged-step-1",
        "all/own/damaged-step-1 -> all/quarantine/step-1",
        "sync all/quarantine",
        "sync all",
    ]


def test_replaced_file_is_synced_before_and_after_its_rename(
    disk: Disk, files: LocalFiles, tmp_path: Path
) -> None:
    disk.done.clear()
    files.replace(tmp_path / "metrics.jsonl", b"")
    assert disk.done == [
        "sync all/own/metrics.jsonl",
        "all/own/metrics.jsonl -> metrics.jsonl",
        "sync .",
    ]


def test_both_curves_are_synced(disk: Disk, files: LocalFiles, tmp_path: Path) -> None:
    history = History(tmp_path, files, step=0)
    history.append([Row(1, 1, {"loss": 1.0})])
    disk.done.clear()
    history.append([Row(2, 1, {"loss": 1.0})])
    assert disk.done == [], "a step waits for no disk"
    history.append_logged(1, [Row(7, 1, {"own": 1.0})])
    disk.done.clear()
    history.sync()
    assert disk.done == ["sync metrics.jsonl", "sync logged.jsonl"]
    history.close()
    assert disk.done[2:] == disk.done[:2]


def test_small_files_and_directories_are_synced(disk: Disk, tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b")
    assert disk.done == ["sync .", "sync a"]
    disk.done.clear()
    sync_file(tmp_path / "a" / "b")
    assert disk.done == ["sync a/b", "sync a"]
    disk.done.clear()
    replace_regular(tmp_path / "a" / "notes", b"{}", durable=True)
    source, target = disk.done[1].split(" -> ")
    assert disk.done == [f"sync {source}", f"{source} -> a/notes", "sync a"]
    assert target == "a/notes"


def _notes(path: Path) -> None:
    replace_regular(path, b"{}", durable=True)


def _built(path: Path) -> None:
    check_built(path.parent, cast(Summary, {"arguments": {}}), resumed=False)


@pytest.mark.parametrize("write", [_notes, _built])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_links_are_not_written_through(
    write: Callable[[Path], None], link: Callable[[Any, Any], None], tmp_path: Path
) -> None:
    theirs = tmp_path / "authorized_keys"
    theirs.write_text("ssh-ed25519 AAAA")
    run = tmp_path / "run"
    run.mkdir()
    place = run / BUILT
    for name in (place.name, f".{place.name}.tmp", place.with_suffix(".tmp").name):
        link(theirs, run / name)
    write(place)
    assert theirs.read_text() == "ssh-ed25519 AAAA"
    assert not place.is_symlink()
    assert json.loads(place.read_text()) in ({}, {"arguments": {}})
