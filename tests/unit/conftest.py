"""Fixtures of the tests that start nothing."""

from __future__ import annotations

from tests.no_fsync import hasty_databases

__all__ = ["hasty_databases"]
