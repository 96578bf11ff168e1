"""Files that are written past the cache: their bytes, in pieces of all sizes, and who cannot."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from trainable.direct import DirectFile

MIB = 2**20


def _write(path: Path, parts: list[bytes]) -> None:
    with DirectFile(path) as file:
        for part in parts:
            assert file.write(memoryview(part)) == len(part)
        file.flush()
        file.sync()


@pytest.mark.parametrize(
    "sizes",
    [[], [0], [1], [MIB], [MIB + 1], [MIB - 1, 2], [5, 3 * MIB, 7], [4096] * 300, [333] * 4000],
)
def test_content_is_what_was_written_in_whatever_pieces(tmp_path: Path, sizes: list[int]) -> None:
    draw = random.Random(1)
    parts = [draw.randbytes(size) for size in sizes]
    _write(tmp_path / "state", parts)
    assert (tmp_path / "state").read_bytes() == b"".join(parts)


def test_an_existing_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "state")
    assert (tmp_path / "state").read_bytes() == b"mine"


@pytest.mark.parametrize("first", [0, 1])
def test_a_file_system_that_cannot_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """It says so at the first piece, or after a part of one that ends within a block."""
    write, calls = os.write, []

    def refuse(descriptor: int, part: memoryview) -> int:
        calls.append(len(part))
        if len(calls) == first:
            return write(descriptor, part[:4096])
        if len(calls) == first + 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, part)

    monkeypatch.setattr(os, "write", refuse)
    content = random.Random(2).randbytes(2 * MIB + 17)
    _write(tmp_path / "state", [content])
    assert (tmp_path / "state").read_bytes() == content


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(OSError, match="No space left"):
        _write(tmp_path / "state", [b"1"])
