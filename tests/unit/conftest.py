"""Fixtures of the tests that start nothing."""

from __future__ import annotations

from tests.no_fsync import databases_without_fsync

__all__ = ["databases_without_fsync"]
