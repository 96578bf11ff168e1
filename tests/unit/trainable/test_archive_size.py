"""A checkpoint that would fill the memory is refused before it is read."""

from __future__ import annotations

import io
import tracemalloc
import zipfile

import pytest
import torch

from trainable.errors import CheckpointError
from trainable.snapshot import parse_state


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
def test_an_archive_that_grows_is_refused_before_it_does(compression: int) -> None:
    bomb = _rewritten(_saved({"x": torch.zeros(1 << 24)}), compression=compression)
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"would be 6710\d{4} when it is read"):
            parse_state(bomb)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_names_that_share_their_bytes_are_refused() -> None:
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
    with pytest.raises(CheckpointError, match="would be"):
        parse_state(shared)


@pytest.mark.parametrize(
    "state",
    [{}, {"x": torch.zeros(0)}, {"x": torch.arange(10), "y": [torch.ones(3, 4), {"z": "text"}]}],
)
def test_what_torch_writes_is_read(state: dict[str, object]) -> None:
    found = parse_state(_saved(state))
    assert repr(found) == repr(state)
