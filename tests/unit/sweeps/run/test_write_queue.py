"""The write queue: it keeps the order, stops at the first error, and blocks callers only when
full.

A write that takes long is one that waits for an event; nothing here is timed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from sweeps.run import event_writer
from sweeps.run.event_writer import WriteQueue


class Slow:
    """Writes when it is let."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.batches: list[int] = []
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.fails_at: int | None = None
        self.error: BaseException = OSError(28, "No space left on device")

    def write(self, numbers: Sequence[int]) -> None:
        self.begun.set()
        assert self.may_end.wait(30)
        self.batches.append(len(numbers))
        for number in numbers:
            if number == self.fails_at:
                raise self.error
            self.written.append(number)


@pytest.fixture
def slow() -> Iterator[Slow]:
    slow = Slow()
    yield slow
    slow.may_end.set()


@pytest.fixture
def writer(slow: Slow) -> Iterator[WriteQueue[int]]:
    writer = WriteQueue(slow.write)
    yield writer
    slow.may_end.set()
    writer.close()


def test_waiting_writes_are_batched_and_block_nobody(slow: Slow, writer: WriteQueue[int]) -> None:
    writer.put(0)
    assert slow.begun.wait(30)
    for number in range(1, 100):
        writer.put(number)
        writer.check()
    assert slow.written == []
    slow.may_end.set()
    writer.flush()
    assert slow.written == list(range(100))
    assert slow.batches == [1, 99]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError()], ids=repr
)
def test_error_is_raised_unchanged_and_writing_stops(
    slow: Slow, writer: WriteQueue[int], error: BaseException
) -> None:
    slow.fails_at, slow.error = 1, error
    writer.put(0)
    assert slow.begun.wait(30)
    writer.put(1)
    writer.put(2)
    slow.may_end.set()
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            writer.flush()
        assert caught.value is error
    with pytest.raises(type(error)):
        writer.check()
    with pytest.raises(type(error)):
        writer.put(3)
    writer.close()
    assert slow.written == [0]


def test_producer_waits_for_a_slow_writer(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_writer, "_MOST", 2)
    writer = WriteQueue(slow.write)
    writer.put(0)
    assert slow.begun.wait(30)
    for number in (1, 2):
        writer.put(number)
    done = threading.Event()

    def put() -> None:
        writer.put(3)
        done.set()

    putting = threading.Thread(target=put)
    putting.start()
    assert not done.wait(0.05)
    slow.may_end.set()
    putting.join(30)
    writer.close()
    assert done.is_set()
    assert slow.written == [0, 1, 2, 3]
