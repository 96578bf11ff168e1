"""Fixtures of the tests that start no processes."""

from __future__ import annotations

from tests.no_fsync import databases_without_fsync

__all__ = ["databases_without_fsync"]
