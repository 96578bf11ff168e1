"""Checks of arguments, whose keys the user's class or function defines: no model knows them.

What must not live here: whether a class takes an argument (`trainable.optim`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from redaction.secrets import is_secret
from sweeps.errors import Issue, KeyPath
from sweeps.spec.error_messages import ARGUMENTS
from sweeps.spec.sections import CREDENTIALS, LONGEST_KEY
from sweeps.spec.yaml_scalars import write_flow

_SAMPLER = ("search", "arguments")
LONGEST_VALUE = 6000  # characters; the tracking store's limit for a parameter


def argument_faults(data: Mapping[str, Any]) -> Iterator[Issue]:
    """Check the arguments of task, sampler, optimizer and schedule, and the keys of the space."""
    task = data.get("task")
    if isinstance(task, dict):
        yield from _form_faults(task, ("task",))
    yield from _secret_faults(task, ("task",))
    yield from _secret_faults(data.get("space"), ("space",))
    yield from _secret_faults(_at(data, _SAMPLER), _SAMPLER)
    for place in ARGUMENTS:
        if isinstance(given := _at(data, place), dict):
            yield from _form_faults(given, place)
            yield from _secret_faults(given, place)


def reserved_faults(path: KeyPath, key: str) -> Iterator[Issue]:
    """Refuse to search an argument that has a key of its own, or none."""
    section, _, name = key.rpartition(".arguments.")
    if section == "train.optimizer" and name in ("lr", "params"):
        yield Issue(
            path,
            f"'{key}' is no argument; the learning rate is train.optimizer.lr, and the parameters "
            "come from the task; write train.optimizer.lr, or remove it",
            at_key=True,
        )


def _at(data: object, path: Sequence[str]) -> object:
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def _form_faults(given: Mapping[str, Any], section: tuple[str, ...]) -> Iterator[Issue]:
    """Check arguments, which have no model: the ledger and tracking must accept them."""
    before = len(".".join(section)) + 1
    for key, argument in given.items():
        path: KeyPath = (*section, key)
        if len(key) + before > LONGEST_KEY:
            yield Issue(
                path,
                f"the key has {len(key)} characters; tracking accepts at most "
                f"{LONGEST_KEY - before}; choose a shorter one",
                True,
            )
        if len(text := write_flow(argument)) > LONGEST_VALUE:
            yield Issue(
                path,
                f"the value has {len(text)} characters; tracking accepts at most "
                f"{LONGEST_VALUE}; keep data in a file and name the file",
            )
        for place, value in _scalars(argument, path):
            if isinstance(value, float) and not math.isfinite(value):
                yield Issue(
                    place,
                    f"{write_flow(value)} is not finite; numbers in a spec are "
                    "finite; write a number, or null",
                )


def _secret_faults(value: object, path: KeyPath) -> Iterator[Issue]:
    """Refuse secrets in the parts whose keys the user chooses."""
    rule = "a spec is stored and tracked unencrypted; let the task read"
    if isinstance(value, str) and CREDENTIALS.search(value):
        yield Issue(path, f"the address holds credentials; {rule} them from the environment")
    for key, inner in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        name = str(key).rpartition(".")[2]
        if is_secret(name) and not isinstance(inner, bool | None):
            yield Issue(
                (*path, key),
                f"{name} looks like a secret; {rule} it from the environment, or give it another "
                "name",
                at_key=True,
            )
        else:
            yield from _secret_faults(inner, (*path, key))


def _scalars(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _scalars(inner, (*path, key))
    else:
        yield path, value
