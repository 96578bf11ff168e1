"""Network file systems: removed files that are open, and stale handles."""

from __future__ import annotations

import errno
import os

import pytest

from trainable.checkpoint import CheckpointStore
from trainable.config import CheckpointConfig
from trainable.errors import StorageError, WriterReplaced
from trainable.store.local import LocalFiles
from trainable.store.metrics_file import History, Row


class Stale(LocalFiles):
    """The server no longer knows what is to be renamed by its handle."""

    successor = None
    """Takes over right before."""

    def rename(self, source, target):
        if self.successor is not None:
            self.successor.open()
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(source), None, str(target))


def _store(directory, files=None):
    return CheckpointStore(directory, CheckpointConfig(), metric="val/loss", files=files)


def _save(store, step=1):
    store.save(lambda: {"step": step}, step=step, reports=step)
    store.wait()


def _refuse(monkeypatch, code, times, name):
    """Have the system refuse to open a file some times."""
    found, left = open, [code] * times

    def refuse(path, *arguments, **options):
        if left and str(path).endswith(name):
            raise OSError(left.pop(), "refused for a while", path)
        return found(path, *arguments, **options)

    monkeypatch.setattr("builtins.open", refuse)


def _unlink_over_nfs(monkeypatch, name):
    """Someone on this host reads the files of that name: removed, they only change their name."""
    unlink = os.unlink

    def over_nfs(path, *, dir_fd=None):
        if os.fspath(path) == name:
            os.rename(path, ".nfs00000001", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        elif os.fspath(path).startswith(".nfs"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        else:
            unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", over_nfs)


def test_open_file_does_not_prevent_taking_over_a_run(tmp_path, monkeypatch):
    first = LocalFiles.of(tmp_path)
    first.open()
    unfinished = first.writer_dir / "new-step-00000001"
    unfinished.mkdir()
    for name in ("manifest.json", "state.pt"):
        (unfinished / name).write_bytes(b"half")
    with monkeypatch.context() as network:
        _unlink_over_nfs(network, "manifest.json")
        second = LocalFiles.of(tmp_path)
        second.open()
        assert [path.name for path in second.writer_dir.rglob("*") if path.is_file()] == [
            ".nfs00000001"
        ]
        with pytest.raises(WriterReplaced):
            first.remove("step-00000001")
    second.close()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_open_checkpoint_can_be_removed(tmp_path, monkeypatch):
    store = _store(tmp_path)
    _save(store)
    with monkeypatch.context() as network:
        _unlink_over_nfs(network, "state.pt")
        store._files.remove("step-00000001")
        assert store.generations() == []
    store.close()
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "code"),
    [("state.pt", errno.EIO), ("state.pt", errno.ESTALE), ("manifest.json", errno.EMFILE)],
)
def test_temporarily_unreadable_checkpoint_is_not_damaged(tmp_path, monkeypatch, name, code):
    store = _store(tmp_path)
    for step in (1, 2):
        _save(store, step)
    store.close()
    name = f"step-00000002/{name}"
    with monkeypatch.context() as network:
        _refuse(network, code, 2, name)
        with pytest.raises(StorageError, match="refused for a while"):
            _store(tmp_path).resume()
    with monkeypatch.context() as network:
        _refuse(network, code, 1, name)  # a stale handle is looked up anew
        again = _store(tmp_path)
        assert again.resume() == {"step": 2}
    assert again.set_aside == []
    again.close()


def test_stale_handle_means_replaced_writer(tmp_path):
    files = Stale.of(tmp_path)
    with pytest.raises(StorageError, match="Stale file handle"):
        _save(_store(tmp_path, files))
    files = Stale.of(tmp_path)
    files.successor = LocalFiles.of(tmp_path)
    with pytest.raises(WriterReplaced, match="another process has taken over"):
        _save(_store(tmp_path, files))


def test_stale_handle_on_the_curve_means_replaced_writer(tmp_path, monkeypatch):
    files = LocalFiles.of(tmp_path)
    files.open()
    history = History(tmp_path, files, step=0)
    history.append([Row(1, 1, {"train/loss": 0.5})])

    def stale(_handle):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "fsync", stale)
    with pytest.raises(StorageError, match="Stale file handle"):
        history.sync()
    files.close()
    with pytest.raises(WriterReplaced, match="another process has taken over"):
        history.sync()
    with pytest.raises(WriterReplaced, match="another process has taken over"):
        history.close()
    history.close()
