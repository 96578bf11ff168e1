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
    reason = _reason(names)
    return pytest.mark.skipif(reason is not None, reason=reason or "nothing is missing")


def needs_imports_of(code: str) -> pytest.MarkDecorator:
    """Skip a test without the optional packages that some code imports."""
    return needs(*sorted({name for name in _IMPORTED.findall(code) if name in _OPTIONAL}))


def skip_without(*names: str) -> None:
    """Skip the tests of a module without these packages; call it before they are imported."""
    if reason := _reason(names):
        pytest.skip(reason, allow_module_level=True)


def _reason(names: tuple[str, ...]) -> str | None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if not missing or os.environ.get("CI") == "true":
        return None
    return f"needs other packages: {sys.executable} -m pip install {' '.join(missing)}"
