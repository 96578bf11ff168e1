"""What is different about the machine on which a sweep is trained again.

Only what decides which bits a training has: versions, processors, and some variables. What must
not live here: reading this machine (`tracking.provenance`), and the task's code (`trainable`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_COMPARED = {
    "gradsweep.version.python": "python",
    "gradsweep.version.torch": "torch",
    "gradsweep.version.numpy": "numpy",
    "gradsweep.version.gradsweep": "gradsweep",
    "gradsweep.platform": "platform",
    "gradsweep.cpu": "cpu",
    "gradsweep.gpus": "gpus",
    "gradsweep.environment": "environment",
}
"""The tags that are compared, with their words."""


class MachineDifference(NamedTuple):
    """Something that was another one in the sweep.

    Attributes:
        what: What it is, such as `torch`.
        then: What it was; several, if it changed while the sweep ran.
        now: What it is here.
    """

    what: str
    then: str
    now: str

    def __str__(self) -> str:
        return f"{self.what} is {self.now} here and was {self.then} in the sweep"


def machine_differences(
    attempts: Sequence[Mapping[str, str]], now: Mapping[str, str]
) -> Iterator[MachineDifference]:
    """Yield what differs from the machines of a sweep's drivers.

    What no driver recorded is not compared.

    Args:
        attempts: The tags of each driver of the sweep.
        now: The tags of this process.
    """
    for key, what in _COMPARED.items():
        then = {attempt[key] for attempt in attempts if key in attempt}
        if then and then != {now.get(key)}:
            yield MachineDifference(what, ", ".join(sorted(then)), now.get(key, "none"))
