"""Resolve the name of a task without importing it.

What must not live here: importing a task (`task.py`), and torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from trainable.errors import ConfigError

BUILT_IN = {
    "char_lm": "trainable.tasks.char_lm:CharLm",
    "digits": "trainable.tasks.digits:Digits",
    "fashion_mnist": "trainable.tasks.fashion_mnist:FashionMnist",
    "spiral": "trainable.tasks.spiral:Spiral",
}


def resolve_task_name(name: str) -> tuple[str, str]:
    """Return the module of a task and the class name in it."""
    module, colon, inside = BUILT_IN.get(name, name).partition(":")
    if not colon or not module or not inside:
        raise ConfigError(
            f"{name!r} is not a built-in task{nearest(name, BUILT_IN)}; built in are "
            f"{', '.join(BUILT_IN)}; write one of these, or your own as package.module:ClassName",
            key="task.name",
        )
    return module, inside


def nearest(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the most similar known word, or ""."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
