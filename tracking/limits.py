"""What a tracking server accepts: characters, lengths of names and values, sizes of requests.

Everything is made to fit before it is queued, so that only a server with unusual rules can reject
a record of the outbox. What must not live here: anything about runs, queues or MLflow's classes.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

MAX_KEY = 250
MAX_PARAM_VALUE = 6000
MAX_TAG_VALUE = 5000  # the limit of servers before MLflow 2.14
MAX_POINTS = 1000
MAX_PAIRS = 100
MAX_REQUEST_BYTES = 900_000  # the limit is 1 MB; the rest is for the envelope

_FORBIDDEN = re.compile(r"[^/\w.\- :]")
_DIGEST = 8


# Metric names repeat at every step; without the cache this is half of the cost of an append.
@lru_cache(maxsize=65536)
def clean_key(key: str) -> str:
    """Return a key that a server accepts: `key` itself, or a cleaned one with a unique digest."""
    cleaned = _FORBIDDEN.sub("_", key)
    path = posixpath.normpath(cleaned).lstrip("/.") if cleaned else ""
    if path != key or len(key) > MAX_KEY or not key:
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]
        return f"{path[: MAX_KEY - _DIGEST - 1] or 'key'}-{digest}"
    return key


def clean_text(text: str) -> str:
    """Return a text that every store accepts.

    NUL characters are escaped, because PostgreSQL rejects them. Lone surrogates are escaped, too:
    they stand for bytes that are not UTF-8, as in a file name.
    """
    return text.replace("\0", r"\x00").encode(errors="backslashreplace").decode()


def clip_text(text: str, limit: int) -> str:
    """Return at most `limit` characters of `text`, with an ellipsis where it was cut."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def clip_start(text: str, limit: int) -> str:
    """Return at most the last `limit` characters of `text`, with an ellipsis where it was cut."""
    return text if len(text) <= limit else "…" + text[1 - limit :]


def num_bytes_sent(key: str, value: str) -> int:
    """Return the size of a pair in a request: a character beyond ASCII takes six bytes."""
    return len(json.dumps([key, value]))


def split_pairs(pairs: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Split parameters or tags into parts that fit into one request each."""
    part: dict[str, str] = {}
    num_bytes = 0
    for key, value in pairs.items():
        size = num_bytes_sent(key, value)
        if part and (len(part) == MAX_PAIRS or num_bytes + size > MAX_REQUEST_BYTES):
            yield part
            part, num_bytes = {}, 0
        part[key] = value
        num_bytes += size
    if part:
        yield part
