"""The metrics file: each step once, durable, and cut back on resume."""

from __future__ import annotations

import json
import os

import pytest

from trainable.errors import StorageError, WriterReplaced
from trainable.store.local import LocalFiles
from trainable.store.metrics_file import History, Row, read_resumptions, read_rows


def _row(step):
    return Row(step, 1000 * step, {"train/loss": 1 / step})


def _open(directory, step=0, interrupted=False):
    files = LocalFiles.of(directory)
    files.open()
    return History(directory, files, step=step, interrupted=interrupted)


def _write(directory, steps):
    history = _open(directory)
    history.append(map(_row, steps))
    history.close()


def test_rows_come_back_as_they_were(tmp_path):
    _write(tmp_path, [1, 2, 3])
    assert read_rows(tmp_path) == [_row(1), _row(2), _row(3)]
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert first == {"step": 1, "time": 1000, "metrics": {"train/loss": 1.0}}


@pytest.mark.parametrize(
    ("step", "kept"), [(0, []), (2, [1, 2]), (5, [1, 2, 3, 5]), (9, [1, 2, 3, 5])]
)
def test_cut_drops_every_row_after_the_step(tmp_path, step, kept):
    _write(tmp_path, [1, 2, 3, 5])
    history = _open(tmp_path, step)
    history.append([_row(step + 1)])
    history.close()
    assert [row.step for row in read_rows(tmp_path)] == [*kept, step + 1]


def test_no_line_that_goes_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(bytes(64) + b"\n")  # as a machine leaves it that lost power before a save
    _open(tmp_path, -1).close()
    assert path.read_bytes() == b""


def test_interruptions_beyond_the_cut_no_longer_count(tmp_path):
    marks = []
    for step, interrupted in [(0, False), (4, True), (9, True), (9, True), (6, True), (5, False)]:
        _open(tmp_path, step, interrupted=interrupted).close()
        marks.append(read_resumptions(tmp_path))
    assert marks == [[], [4], [4, 9], [4, 9], [4, 6], [4]]
    assert not list(tmp_path.glob(".*"))


def test_every_torn_end_is_tolerated_and_repaired(tmp_path):
    _write(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    second = content.index(b"\n", content.index(b"\n") + 1) + 1
    for length in range(second, len(content)):
        path.write_bytes(content[:length])
        assert [row.step for row in read_rows(tmp_path)] == [1, 2]
        history = _open(tmp_path, 2)
        history.append([_row(3)])
        history.close()
        assert path.read_bytes() == content


def test_lines_of_one_step_are_one_row(tmp_path):
    history = _open(tmp_path)
    history.append([Row(4, 10, {"train/loss": 1.0}), Row(4, 20, {"val/loss": 2.0})])
    history.close()
    assert read_rows(tmp_path) == [Row(4, 20, {"train/loss": 1.0, "val/loss": 2.0})]


def test_a_full_disk_is_named_with_the_curve(tmp_path):
    history = _open(tmp_path)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), history._file.fileno())
    told = r"metrics\.jsonl could not be written: .*No space left"
    with pytest.raises(StorageError, match=told):
        history.append([_row(1)])
    with pytest.raises(StorageError, match=told):
        history.close()
    assert history._file.closed


def test_replaced_writer_appends_nothing(tmp_path):
    """Also not when it stands right before it opens the file."""
    stale = _open(tmp_path)
    stale.append(map(_row, [1, 2]))
    files = LocalFiles.of(tmp_path)
    files.open()
    successor = _open(tmp_path, 1)
    stale.append(map(_row, [3, 4]))
    stale.close()
    with pytest.raises(WriterReplaced, match="another process has taken over"):
        History(tmp_path, files, step=0)
    successor.append([_row(2)])
    successor.close()
    assert read_rows(tmp_path) == [_row(1), _row(2)]
