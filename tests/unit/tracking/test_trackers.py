"""The tracker is chosen by the address, and a new one needs a line of the list."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracking import trackers
from tracking.delivery import TrackingServer
from tracking.delivery_loop import Destination
from tracking.tracker import StoreUnreadable, Tracker
from tracking.trackers import MlflowTracker, choose_tracker


class EchoTracker(Tracker):
    name = "Echo"

    @classmethod
    def handles(cls, uri: str) -> bool:
        return uri.startswith("echo:")

    def open_server(self, experiment: str, sweep_id: str) -> TrackingServer:
        return (self.uri, self.artifact_root, experiment, sweep_id)  # type: ignore[return-value]


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "TRACKERS", [EchoTracker, *trackers.TRACKERS])


@pytest.mark.parametrize(
    "uri", ["sqlite:////tmp/mlflow.db", "https://mlflow.example", "postgresql://db.example/m"]
)
@pytest.mark.usefixtures("echo")
def test_address_of_mlflow(uri: str) -> None:
    tracker = choose_tracker(uri, Path("artifacts"))
    assert isinstance(tracker, MlflowTracker)
    assert (tracker.uri, tracker.artifact_root) == (uri, Path("artifacts"))


@pytest.mark.usefixtures("echo")
def test_delivery_asks_the_chosen_tracker_for_its_server() -> None:
    assert isinstance(choose_tracker("echo:a"), EchoTracker)
    destination = Destination("echo:a", "/artifacts", "digits", "5f3a", "/outbox")
    assert destination.open_server() == ("echo:a", Path("/artifacts"), "digits", "5f3a")


@pytest.mark.usefixtures("echo")
def test_defaults_of_a_tracker() -> None:
    tracker = choose_tracker("echo:a")
    tracker.probe(known=True)
    assert tracker.identity() == "echo:a"
    assert not tracker.has_lost(["1"])
    with pytest.raises(StoreUnreadable, match="runs of Echo cannot be read back"):
        tracker.read_runs("digits", None, "5f3a", {})
