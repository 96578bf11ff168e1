from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def disk_server() -> Iterator[ModuleType]:
    """The module `disk_server.py`, which the kill tests also run as a program."""
    path = Path(__file__).with_name("disk_server.py")
    spec = importlib.util.spec_from_file_location("disk_server", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["disk_server"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["disk_server"]
