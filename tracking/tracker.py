"""What a sweep asks of a tracking service: a server for its delivery, and what the service holds.

`tracking.trackers` chooses a tracker by the address. What must not live here: any service, how a
store is read (`store_reader`), and imports that take long.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Protocol

from redaction.secrets import redact
from tracking.delivery import RunGone, TrackingServer, error_line


class TrackingUnusable(ValueError):
    """Nothing can be recorded at a tracking URI.

    Args:
        message: The URI without its credentials, the fault, and the remedy.
    """

    def __init__(self, message: str) -> None:
        super().__init__(f"tracking.uri: {message}")
        self.message = message


@dataclass(frozen=True, kw_only=True)
class TrackedSweep:
    """The sweep that is recorded."""

    experiment: str
    """The experiment's name; created when missing, restored when deleted."""
    sweep_id: str
    """The sweep's identity, a tag by which its runs are found again."""
    outbox: Path
    """The directory of the durable queue."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Tags of the sweep's run."""
    params: Mapping[str, object] = field(default_factory=dict)
    """Parameters of the sweep's run."""
    inherited: Mapping[str, str] = field(default_factory=dict)
    """Tags of the driver. A trial's run gets those about provenance."""
    experiment_tags: Mapping[str, str] = field(default_factory=dict)
    """Tags of the experiment."""


class Tracker(ABC):
    """A tracking service at one address.

    A subclass must say which addresses it handles and open a server. It should override `probe`
    and `reader`: without them, a wrong address is noticed late, and runs that the service has lost
    are not found.

    Args:
        uri: The address.
        artifact_root: The artifact location of a new experiment; None: the service chooses it.
    """

    name: ClassVar[str]
    """The service's name in messages."""

    def __init__(self, uri: str, artifact_root: Path | None) -> None:
        self.uri = uri
        self.artifact_root = artifact_root

    @classmethod
    @abstractmethod
    def handles(cls, uri: str) -> bool:
        """Return whether this class records at an address, without contacting it."""

    @abstractmethod
    def open_server(self, experiment: str, sweep_id: str) -> TrackingServer:
        """Connect to the service; called in the thread or process that delivers."""

    def check_address(self) -> None:  # noqa: B027 - any address that is handled may be right
        """Check the form of the address, without contacting it.

        Raises:
            TrackingUnusable: It names no store.
        """

    def probe(self, *, known: bool = False, thorough: bool = False) -> None:
        """Check within seconds that runs can be recorded at the address.

        Args:
            known: The sweep has recorded there before, so the server may be down for now.
            thorough: Check all of a file of any size.

        Raises:
            TrackingUnusable: Nothing can be recorded there.
        """
        del known, thorough
        self.check_address()

    def identity(self) -> str:
        """Return a text that is the same for all addresses of one store."""
        return self.uri

    def has_lost(self, run_ids: list[str]) -> bool:
        """Return whether the store is known to have none of these runs, without waiting."""
        del run_ids
        return False

    @property
    def reads_back(self) -> bool:
        """Whether what the store holds can be read."""
        return type(self).reader is not Tracker.reader

    def reader(self, experiment: str, experiment_id: str | None) -> StoreReader:
        """Return a reader of what the store holds. Nothing is created there.

        Args:
            experiment: The name of the experiment that has the sweep's runs.
            experiment_id: Its id, which stays when it is renamed; None: unknown.

        Raises:
            StoreUnreadable: The service cannot be read back.
        """
        del experiment, experiment_id
        raise StoreUnreadable(self.uri, f"runs of {self.name} cannot be read back")

    def read_runs(
        self,
        experiment: str,
        experiment_id: str | None,
        sweep_id: str,
        environment: Mapping[str, str],
    ) -> list[StoredRun]:
        """Return a sweep's runs, without heavy imports in this process.

        Args:
            experiment: See `reader`.
            experiment_id: See `reader`.
            sweep_id: The sweep's identity.
            environment: The environment of a child process that may be started to read them.

        Raises:
            StoreUnreadable: The store does not answer.
        """
        del environment
        return self.reader(experiment, experiment_id).runs(sweep_id)

    def correct_addresses(self, *, dry_run: bool = False) -> list[Path]:
        """Correct addresses of artifacts that name a place where their root was before.

        Only in a store whose file lies below the root, beside the artifacts.

        Args:
            dry_run: Change nothing.

        Returns:
            The former places of the artifacts; empty if nothing has to be corrected.
        """
        del dry_run
        return []

    def addresses_outside(self, experiment: str) -> list[str]:
        """Return the addresses of an experiment's artifacts that are files outside of the root.

        Without those that `correct_addresses` corrects. Only a store that is a file is read.

        Raises:
            StoreUnreadable: The store does not answer.
        """
        del experiment
        return []

    def delete_runs(self, experiment: str, sweep_id: str, run_ids: Iterable[str]) -> None:
        """Delete runs of a sweep; those that are gone already are left out.

        Args:
            experiment: The name of the experiment that has the runs.
            sweep_id: The sweep's identity.
            run_ids: The runs.

        Raises:
            TrackingUnusable: The service does not answer, or refuses.
        """
        try:
            server = self.open_server(experiment, sweep_id)
            for run_id in run_ids:
                with contextlib.suppress(RunGone):
                    server.delete_run(run_id)
        except Exception as error:  # a service may raise any exception
            raise TrackingUnusable(
                f"runs cannot be deleted at {redact(self.uri)} ({error_line(error)}); repeat the "
                "command when the tracking server answers"
            ) from error


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
