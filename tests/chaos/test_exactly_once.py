"""Row 3: kill the driver, a worker, or the delivery process between two records of one event.

Where it dies is told by the environment variable `CHAOS_DIE` to `hooks/sitecustomize.py`, which
every Python of the sweep loads when it starts.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.invariants import PARALLEL, SERIAL, References, Sandbox, assert_all

# In the order of one report and of one trial's end; numbers that fall into the second trial.
PLACES = {
    "commit and report": "sweeps.ledger.ledger:Ledger.report_all:4",
    "report and outbox": "tracking.outbox:Outbox.follow:4",
    "outbox and acknowledgement of the report": "tracking.outbox:Outbox.follow:-4",
    "the end in the ledger and in the outbox": "tracking.recorder:Recorder.finish:2",
    "a trial in the ledger and its start": "sweeps.ledger.ledger:Ledger.add:-2",
}
"""`module:Class.method:N`: killed before the N-th call; `-N`: after it."""
DELIVERY_PLACES = {
    "send and acknowledgement": "tracking.outbox:Outbox.delivered:3",
    "preparation and next batch": "tracking.outbox:Outbox.prepare:-3",
    "next batch and send": "tracking.outbox:Outbox.next_batch:-3",
    "run created and remembered": "tracking.outbox:Outbox.set_run_id:2",
}
# In the first trial: its sixth generation is that of its second epoch, and a rehearsal has fewer;
# its third report is its last, whose generation is committed before it is told.
WORKER_PLACES = {
    "a commit and what follows": "trainable.store.local:LocalFiles.commit:-6",
    "the last commit and its report": "trainable.processes.trial_run:TrialRun._next_report:-3",
}


@pytest.mark.parametrize(
    "place", [*PLACES.values(), *DELIVERY_PLACES.values(), *WORKER_PLACES.values()]
)
def test_places_to_be_killed_at_exist(place: str) -> None:
    module, path, _ = place.split(":")
    assert callable(operator.attrgetter(path)(importlib.import_module(module)))


@pytest.mark.chaos
@pytest.mark.fault(3, "kill -9 between commit, report, outbox, send and acknowledgement")
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_row_03_killed_between(tmp_path: Path, references: References, place: str) -> None:
    _killed_at(place, tmp_path, references)


@pytest.mark.fault(3, "kill -9 between the ledger and the outbox")
def test_row_03_killed_between_report_and_outbox(tmp_path: Path, references: References) -> None:
    _killed_at(PLACES["report and outbox"], tmp_path, references)


@pytest.mark.chaos
@pytest.mark.fault(3, "kill -9 of the process that delivers, between send and acknowledgement")
@pytest.mark.parametrize("place", DELIVERY_PLACES.values(), ids=DELIVERY_PLACES.keys())
def test_row_03_delivery_killed_between(
    tmp_path: Path, references: References, place: str
) -> None:
    """Another process takes its place, and the driver goes on."""
    with _one_dying_at(place, tmp_path) as sandbox:
        ended = sandbox.run().wait()
        assert "the process that delivers to the tracking server ended" in ended.text
        assert_all(sandbox, references.of(SERIAL), ended)


@pytest.mark.chaos
@pytest.mark.fault(3, "kill -9 of a worker between its commit and its report")
@pytest.mark.parametrize("place", WORKER_PLACES.values(), ids=WORKER_PLACES.keys())
@pytest.mark.parametrize("spec", [SERIAL, PARALLEL], ids=["each alone", "together"])
def test_row_03_worker_killed_between(
    tmp_path: Path, references: References, place: str, spec: str
) -> None:
    with _one_dying_at(place, tmp_path, spec) as sandbox:
        ended = sandbox.run().wait()
        found = assert_all(sandbox, references.of(spec), ended)
        assert sorted(trial["attempts"] for trial in found.trials) == [1, 1, 1, 2]


def _killed_at(place: str, tmp_path: Path, references: References) -> None:
    with _dying_at(place, tmp_path) as sandbox:
        ended = sandbox.run().wait()
        assert ended.code == -9, f"it was not killed at {place}:\n{ended.text}"
        del sandbox.cli.environment["CHAOS_DIE"]
        assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end())


@contextmanager
def _one_dying_at(place: str, tmp_path: Path, spec: str = SERIAL) -> Iterator[Sandbox]:
    """Of the processes that come to a place, the first one dies."""
    ticket = tmp_path / "ticket"
    ticket.touch()
    with _dying_at(place, tmp_path, spec, CHAOS_DIE_ONCE=str(ticket)) as sandbox:
        yield sandbox
        assert not ticket.exists(), f"nothing was killed at {place}"


@contextmanager
def _dying_at(place: str, tmp_path: Path, spec: str = SERIAL, **more: str) -> Iterator[Sandbox]:
    hooks = Path(__file__).with_name("hooks")
    environment = {"PYTHONPATH": str(hooks), "CHAOS_DIE": place, **more}
    sandbox = Sandbox(tmp_path / "sweep", spec, environment)
    try:
        yield sandbox
    finally:
        sandbox.close()
