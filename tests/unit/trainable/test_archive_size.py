"""A checkpoint that would exhaust the memory is refused before it is read."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile

import pytest
import torch

from trainable.errors import CheckpointError
from trainable.store.snapshot import parse_state


def _saved(state: object) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _rewritten(content: bytes, *, compression: int) -> bytes:
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as archive,
        zipfile.ZipFile(out, "w", compression) as other,
    ):
        for name in archive.namelist():
            other.writestr(name, archive.read(name))
    return out.getvalue()


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_archive_that_expands_is_refused_before_reading(compression: int) -> None:
    bomb = _rewritten(_saved({"x": torch.zeros(1 << 24)}), compression=compression)
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"would take 6710\d{4} in memory"):
            parse_state(bomb)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def _with_two_directories(bomb: bytes, *, in_comment: bool) -> bytes:
    """A compressed archive with a second directory, which says of each file that it is small.

    Python takes the one before the archive's end, torch the one to which the end refers.
    """
    before, end = bomb[:-22], bytearray(bomb[-22:])
    size, start = struct.unpack_from("<LL", end, 12)
    true, small = before[start:], bytearray(before[start:])
    place = 0
    while place < size:
        struct.pack_into("<L", small, place + 24, 1)
        place += 46 + sum(struct.unpack_from("<HHH", small, place + 28))
    if not in_comment:
        return before + bytes(small + end)
    struct.pack_into("<L", end, 16, start + size + 22)
    struct.pack_into("<H", end, 20, size)
    return before[:start] + bytes(small + end) + true


@pytest.mark.parametrize("in_comment", [False, True])
def test_archive_with_two_directories_is_refused(in_comment: bool) -> None:
    bomb = _rewritten(_saved({"x": torch.zeros(1 << 24)}), compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="is not an archive written by torch"):
        parse_state(_with_two_directories(bomb, in_comment=in_comment))


def test_overlapping_entries_are_refused() -> None:
    """The same bytes under many names: nothing is compressed, and all of it would be read."""
    content = bytearray(_saved({"x": torch.zeros(1 << 16)}))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        entries, end = archive.infolist(), archive.start_dir
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as other:
        other.fp = io.BytesIO(content)  # type: ignore[assignment]
        other.fp.seek(end)
        other.start_dir = end
        other.filelist = [*entries, *[largest] * 40]
        other._didModify = True  # type: ignore[attr-defined]
        other._write_end_record()  # type: ignore[attr-defined]
        shared = other.fp.getvalue()
        other._didModify = False  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="would take"):
        parse_state(shared)


def test_small_archives_are_refused_if_compressed_and_else_read() -> None:
    """A size may be written in two places, of which readers choose as they like."""
    state = {"x": torch.arange(10), "y": [torch.ones(3, 4), {"z": "text"}], "none": torch.zeros(0)}
    assert repr(parse_state(_saved(state))) == repr(state)
    with pytest.raises(CheckpointError, match="torch writes no compressed checkpoints"):
        parse_state(_rewritten(_saved(state), compression=zipfile.ZIP_DEFLATED))
