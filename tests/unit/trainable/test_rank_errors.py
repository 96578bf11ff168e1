"""What ranks say to each other of their errors."""

from __future__ import annotations

import itertools

import pytest

from trainable.failures import is_shared, mark_shared, with_causes


def _fail() -> None:
    """As code that tries a second way, and raises why the first one failed."""
    try:
        raise ValueError("first way")
    except ValueError as first:
        try:
            raise OSError("second way") from first
        except OSError as second:
            raise first from second


def test_errors_that_cause_each_other_end() -> None:
    with pytest.raises(ValueError, match="first") as raised:
        _fail()
    first = raised.value
    second = first.__cause__
    assert second is not None
    assert second.__cause__ is first
    assert list(itertools.islice(with_causes(first), 5)) == [first, second]
    assert not is_shared(first)
    mark_shared(second)
    assert is_shared(first)
