"""Check before a run starts that a stream would resume with the same samples.

What must not live here: reading a stream (`stream_reader.py`).
"""

from __future__ import annotations

import operator
import time
from dataclasses import replace
from typing import Any

from trainable.built import summary_of
from trainable.errors import TaskError
from trainable.ranks import WHOLE
from trainable.splits import has_state
from trainable.streams import StreamReader, StreamSource, stream_name
from trainable.train_state import check_state

_CHECKED = 2
"""Items before the state that `check_stream` takes."""
_COMPARED = 20
"""Windows of so many items compared with those read again, if they come in these seconds."""
_SECONDS = 2.0


def check_stream(source: StreamSource) -> None:
    """Refuse a stream with which a resumed run would train on other samples.

    Reads a few items, and then again, from a state saved on the way or from the epoch's start.
    Read nothing else from the stream afterwards.
    """
    stream = source.stream
    format = replace(source.format, items=_CHECKED, batched=True, drop_last=False, share=WHOLE)
    if format.skips or not has_state(stream):
        first = _read_some(StreamReader(stream, format, 0, 0, None))
        _read_some(StreamReader(stream, format, 0, 1, None))
        if not _agree(first, _read_some(StreamReader(stream, format, 0, 0, None))):
            raise TaskError(
                f"train: {stream_name(stream)} gives other samples when an epoch is read again "
                "under the same seed, as a resumed run does that drops the trained ones; draw "
                "from the global generators of Python, NumPy or torch, or from a generator in an "
                "attribute (webdataset: .shuffle(1000, rng=random.Random(0))), and count epochs "
                "in set_epoch(epoch)"
            )
        return
    reader = StreamReader(stream, format, 0, 0, None)
    reader.read()
    place = reader.place()
    check_state(place.state, "the state of the stream")
    expected = _read_some(reader)
    if place.ended:
        return
    if not _agree(expected, _read_some(StreamReader(stream, format, 0, 0, place))):
        raise TaskError(
            f"train: {stream_name(stream)} continues with other samples after load_state_dict() "
            f"of the state that state_dict() returned after {_CHECKED} items: a resumed run would "
            "train on others than an uninterrupted one; save the position (set before each "
            "yield), the shuffle buffer and the generators, and continue from them in "
            "__iter__(); or write train.loader.resume: skip, to read again from the epoch's start"
        )


def _agree(first: list[Any], again: list[Any]) -> bool:
    """Whether two readings agree as far as both went."""
    return bool(first) == bool(again) and all(map(operator.eq, first, again))


def _read_some(reader: StreamReader) -> list[Any]:
    """Return summaries of the next items, as many as can be read in a short time."""
    found: list[Any] = []
    started = time.monotonic()
    while len(found) < _COMPARED and (window := reader.read()) is not None:
        found.append(summary_of(list(window)))
        if time.monotonic() - started > _SECONDS:
            break
    return found
