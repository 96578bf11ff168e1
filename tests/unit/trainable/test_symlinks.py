"""Nothing is written through a link in a run's directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from trainable.built import BUILT, Summary, check_built
from trainable.store.regular_files import replace_file, replace_regular


def _config(path: Path) -> None:
    replace_regular(path, b"{}")


def _notes(path: Path) -> None:
    replace_file(path, "{}")


def _built(path: Path) -> None:
    check_built(path.parent, cast(Summary, {"arguments": {}}), resumed=False)


@pytest.mark.parametrize("write", [_config, _notes, _built])
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
