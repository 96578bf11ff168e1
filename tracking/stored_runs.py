"""The runs that a tracking store holds of a sweep, and the protocol of a class that reads them.

What must not live here: how a store is read (`store_reader`), and what it should hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from redaction.secrets import redact


class StoreUnreadable(ValueError):
    """A tracking store cannot be read now."""

    def __init__(self, uri: str, cause: object) -> None:
        line = redact(str(cause)).strip().split("\n")[0][:300]
        super().__init__(
            f"the tracking store {redact(uri)} cannot be read ({line}); its runs were not "
            "compared with the trials; try again when it answers"
        )


class StoredRun(NamedTuple):
    """One run of the sweep in the store."""

    run_id: str
    trial: int
    """The trial's number, or `SWEEP`."""
    status: str
    deleted: bool
    """The run or its experiment is deleted; it can be restored."""
    artifacts: str
    """The URI of its artifacts."""


class Curve(NamedTuple):
    """How many points of one metric a store has, and the sum of their steps."""

    num_points: int
    sum_of_steps: int


class RunData(NamedTuple):
    """A run's parameters, tags and curves."""

    params: frozenset[str]
    tags: Mapping[str, str]
    curves: Mapping[str, Curve]
    last: Mapping[str, float] = MappingProxyType({})
    """The last value of each metric."""


class StoreReader(Protocol):
    """Reads one store. Every method may raise `StoreUnreadable`."""

    def runs(self, sweep_id: str) -> list[StoredRun]:
        """All runs of a sweep, deleted ones included."""
        ...

    def data(self, run_ids: Sequence[str]) -> dict[str, RunData]:
        """The data of some runs. Ask for a hundred at a time, so that memory is bounded."""
        ...

    def steps(self, run_id: str, key: str) -> set[int]:
        """The steps at which a metric has values."""
        ...

    def files(self, run: StoredRun, folder: str) -> set[str]:
        """The names of a run's artifacts in a folder; "" is the top."""
        ...


def choose_runs(runs: Sequence[StoredRun], known: Mapping[int, str]) -> dict[int, StoredRun]:
    """Return one run per trial: the known one, else one that is not deleted."""
    chosen: dict[int, StoredRun] = {}
    for run in sorted(runs, key=lambda r: (known.get(r.trial) != r.run_id, r.deleted)):
        chosen.setdefault(run.trial, run)
    return chosen
