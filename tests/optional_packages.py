"""Packages that only some tests need: without one, a test is skipped; under `CI=true` it fails.

What must not live here: packages that the project itself needs.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys

import pytest

_OPTIONAL = (
    "accelerate",
    "lightning",
    "peft",
    "timm",
    "torch_geometric",
    "torchmetrics",
    "transformers",
)
_IMPORTED = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip a test without these packages, and say how to install them."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(
        bool(missing) and os.environ.get("CI") != "true",
        reason=f"needs other packages: {sys.executable} -m pip install {' '.join(missing)}",
    )


def needs_imports_of(code: str) -> pytest.MarkDecorator:
    """Skip a test without the optional packages that some code imports."""
    return needs(*sorted({name for name in _IMPORTED.findall(code) if name in _OPTIONAL}))
