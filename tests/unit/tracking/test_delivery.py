"""Delivery to a server that rejects, commits and then fails, or commits late."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tracking.delivery import (
    TAG_REPLACED,
    TAG_TRIAL,
    Delivery,
    FoundRun,
    NotStored,
    RecordRejected,
    RunGone,
)
from tracking.metric_points import PointRow
from tracking.outbox import SWEEP, TAG_REPEATS, Outbox
from tracking.outbox_status import read_outbox


class House:
    """An outbox, a server and a delivery between them."""

    def __init__(self, module: ModuleType, directory: Path) -> None:
        self.module = module
        self.directory = directory
        self.server = module.DiskServer(directory / "server.db")
        self.outbox = Outbox(directory / "outbox")
        self.delivery = self.new_delivery()

    def new_delivery(self) -> Delivery:
        return Delivery(self.outbox, self.server, sweep_id="s1", name="digits")

    def start(self, trial: int, tags: dict[str, str] | None = None, **params: str) -> None:
        payload = {"params": params, "tags": tags or {}, "time": 5}
        step = self.outbox.last_step(trial)
        self.outbox.append(trial, "start", {**payload, "step": step})

    def log(self, trial: int, first: int, last: int) -> None:
        self.outbox.append_rows(trial, self.module.lines(trial, first, last))

    def attempt(self) -> bool:
        """One attempt, as the thread makes it; True when nothing is left."""
        try:
            self.delivery.connect()
            self.delivery.drain(lambda: False)
        except NotStored:
            self.delivery.drain(lambda: False, uploads=False)
        except (OSError, TimeoutError):
            self.delivery.disconnect()
        return self.outbox.pending == 0

    def deliver(self) -> None:
        for _ in range(200):
            if self.attempt():
                return
        pytest.fail("200 attempts did not deliver everything")


@pytest.fixture
def house(disk_server: ModuleType, tmp_path: Path) -> Iterator[House]:
    built = House(disk_server, tmp_path)
    yield built
    built.outbox.close()
    built.server.close()


def fail_sometimes(
    seed: int, places: str, error: Callable[[], Exception]
) -> Callable[[str], None]:
    generator = random.Random(seed)

    def fault(place: str) -> None:
        if place.startswith(places) and generator.random() < 0.4:
            raise error()

    return fault


def fail_once(place: str) -> Callable[[str], None]:
    places = [place]

    def fault(here: str) -> None:
        if here in places:
            places.clear()
            raise ConnectionResetError

    return fault


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("places", "error"),
    [
        ("before", ConnectionRefusedError),
        ("after", ConnectionResetError),
        ("after", TimeoutError),
        ("", OSError),
    ],
    ids=["refuses", "commits-then-raises", "commits-then-times-out", "anything"],
)
def test_flaky_server_receives_everything_once(
    house: House, places: str, error: Callable[[], Exception], seed: int
) -> None:
    house.server.fault = fail_sometimes(seed, places, error)
    for trial in range(3):
        house.start(trial, lr=str(trial))
    for first in range(1, house.module.STEPS, 40):
        for trial in range(3):
            house.log(trial, 1, first + 39)  # every append replays all that came before
        house.deliver()
    for trial in range(3):
        house.outbox.append(trial, "finish", {"status": "FINISHED", "time": 9, "tags": {}})
    house.deliver()
    for trial in range(3):
        assert house.server.points(trial) == house.module.expected(trial)
        [(status, params, _)] = house.server.runs(trial)
        assert (status, params) == ("FINISHED", {"lr": str(trial)})
    assert len(house.server.runs(SWEEP)) == 1


def test_many_trials_share_one_disk_sync(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    for trial in range(10):
        house.start(trial)
    house.deliver()
    for trial in range(10):
        house.log(trial, 1, 20)
    waits = []
    monkeypatch.setattr("os.fsync", lambda _: waits.append(house.server.calls["log"]))
    before = house.server.calls["log"]
    assert house.attempt()
    assert waits == [before]
    assert house.server.calls["log"] == before + 10


def test_only_the_failed_trial_is_compared(house: House) -> None:
    for trial in range(10):
        house.start(trial)
    house.deliver()
    for trial in range(10):
        house.log(trial, 1, 20)
    house.server.calls.clear()
    house.server.fault = fail_once("after log_points")
    assert not house.attempt()
    assert house.attempt()
    keys = {key for key, _, _ in house.server.points(0)}
    assert house.server.calls["history"] == len(keys)
    for trial in range(10):
        found = [(key, step) for key, step, _ in house.server.points(trial)]
        assert found == sorted((key, step) for key in keys for step in range(1, 21))


def test_run_has_the_tags_by_which_it_is_found(house: House) -> None:
    house.start(7, tags={"own": "tag"})
    house.deliver()
    [(status, _, tags)] = house.server.runs(7)
    assert status == "RUNNING"
    assert tags == {
        "gradsweep.sweep_id": "s1",
        "gradsweep.trial": "7",
        "gradsweep.role": "trial",
        "mlflow.runName": "trial-0007",
        "mlflow.parentRunId": house.outbox.run_id(SWEEP),
        "own": "tag",
    }
    [(_, _, parent)] = house.server.runs(SWEEP)
    assert parent == {
        "gradsweep.sweep_id": "s1",
        "gradsweep.role": "sweep",
        "mlflow.runName": "digits",
    }


def test_run_of_a_further_seed_is_below_that_of_the_first(house: House) -> None:
    house.start(3)
    house.start(7, tags={TAG_REPEATS: "3"})
    house.deliver()
    [(_, _, first)] = house.server.runs(3)
    [(_, _, tags)] = house.server.runs(7)
    assert first["mlflow.parentRunId"] == house.outbox.run_id(SWEEP)
    assert tags["mlflow.parentRunId"] == house.outbox.run_id(3)


@pytest.mark.parametrize("place", ["before set_tags", "after log_points", "after set_status"])
def test_changed_parameter_becomes_a_curve_and_a_tag(house: House, place: str) -> None:
    house.start(0, lr="1", name="a")
    house.log(0, 1, 10)
    house.deliver()
    changes = [("2", "b", 20), ("1", "a", 30), ("1", "a", 40), ("nan", "a", 50)]
    for lr, name, last in changes:
        house.outbox.append(0, "finish", {"status": "KILLED", "time": 9, "tags": {}})
        house.start(0, lr=lr, name=name)
        house.server.fault = fail_once(place)
        house.deliver()
        house.log(0, 1, last)
        house.deliver()
        tags = house.server.runs(0)[0][2]
        assert (tags["param_changed.lr"], tags["param_changed.name"]) == (lr, name)
    points = house.server.points(0)
    assert [p for p in points if p[0].startswith("param/")] == [
        ("param/lr", 10, 2.0),
        ("param/lr", 20, 1.0),
    ]
    assert house.server.runs(0)[0][1] == {"lr": "1", "name": "a"}


def test_permanently_rejected_record_blocks_nothing(house: House) -> None:
    real, refused = house.server.set_tags, []

    def picky(run_id: str, tags: dict[str, str]) -> None:
        if "bad" in tags:
            refused.append(tags)
            raise RecordRejected("the tag 'bad' is not allowed here")
        real(run_id, tags)

    house.server.set_tags = picky
    house.start(0)
    house.outbox.append(0, "tags", {"bad": "1"})
    house.log(0, 1, 120)
    house.outbox.append(0, "tags", {"good": "1"})
    house.deliver()
    assert house.server.points(0) == house.module.expected(0)
    assert house.server.runs(0)[0][2]["good"] == "1"
    [(kind, reason)] = house.outbox._db.execute("SELECT kind, reason FROM refused").fetchall()
    assert (kind, reason) == ("tags", "the tag 'bad' is not allowed here")
    assert refused[-2:] == [{"bad": "1"}] * 2, "alone, once more after a search for the run"
    assert len(refused) == 4, "and with others behind the start record and before it"


def test_only_the_rejected_record_of_a_batch_is_set_aside(house: House) -> None:
    real = house.server.log_points

    def picky(run_id: str, points: list[Any]) -> None:
        if any(point.step == 15 for point in points):
            raise RecordRejected("step 15 is unlucky")
        real(run_id, points)

    house.server.log_points = picky
    for first in (1, 11, 21):
        house.log(0, first, first + 9)
    house.deliver()
    assert {step for _, step, _ in house.server.points(0)} == {*range(1, 11), *range(21, 31)}


def test_deleted_run_is_restored(house: House) -> None:
    house.start(0)
    house.log(0, 1, 60)
    house.deliver()
    house.server.delete_run(house.outbox.run_id(0))
    house.delivery.disconnect()
    house.log(0, 1, 120)
    house.deliver()
    assert house.server.points(0) == house.module.expected(0)


def test_next_driver_backfills_a_run_lost_meanwhile(
    house: House,
) -> None:
    house.start(0, lr="1")
    house.log(0, 1, 60)
    house.deliver()
    house.server.wipe()
    house.log(0, 61, 70)
    with pytest.raises(RunGone):
        house.delivery.drain(lambda: False)
    house.delivery.disconnect()
    house.deliver()
    house.log(0, 71, house.module.STEPS)
    finish = {"status": "FINISHED", "time": 9, "tags": {}}
    house.outbox.append(0, "finish", finish)
    house.deliver()
    known = read_outbox(house.outbox.directory)
    assert known.tracked_statuses == {}
    assert known.lacks(0, house.module.lines(0, 1, 1))
    for _ in range(2):
        house.outbox.close()
        house.outbox = Outbox(house.outbox.directory)
        house.delivery = house.new_delivery()
        house.start(0, lr="1")
        house.log(0, 1, house.module.STEPS)
        house.outbox.append(0, "finish", finish)
        house.deliver()
        known = read_outbox(house.outbox.directory)
        assert known.tracked_statuses[0] == "FINISHED"
        assert not known.lacks(0, house.module.lines(0, 1, house.module.STEPS))
        assert house.server.points(0) == house.module.expected(0)
        [(status, params, _)] = house.server.runs(0)
        assert (status, params) == ("FINISHED", {"lr": "1"})


_OWN, _FULL = FoundRun("own", 0, 9), FoundRun("full", 0, 8)
_EMPTY, _OLDER = FoundRun("empty", 0, 1, empty=True), FoundRun("older", 0, 7)
_TRASHED = FoundRun("trashed", 0, 0, deleted=True)
_TRASHED_EMPTY = FoundRun("bare", 0, 0, deleted=True, empty=True)


@pytest.mark.parametrize(
    ("runs", "chosen", "deleted"),
    [
        ([_EMPTY, _FULL, _OWN], _OWN, ["empty"]),
        ([_EMPTY, _FULL], _FULL, ["empty"]),  # although the empty one is older
        ([_TRASHED, _FULL, _OLDER], _OLDER, []),
        ([_TRASHED, _EMPTY], _EMPTY, []),
        ([_TRASHED_EMPTY, _TRASHED], _TRASHED, []),
        ([_EMPTY, _TRASHED_EMPTY, _FULL], _FULL, ["empty"]),
        ([FoundRun("b", 0, 1, empty=True), _EMPTY], FoundRun("b", 0, 1, empty=True), ["empty"]),
    ],
)
def test_one_run_is_chosen_and_its_empty_twins_are_deleted(
    house: House, runs: list[FoundRun], chosen: FoundRun, deleted: list[str]
) -> None:
    removed: list[str] = []
    house.server.delete_run = removed.append
    for order in (runs, runs[::-1]):
        other = FoundRun("other", 1, 0, empty=True)
        found = house.delivery._choose([other, *order], {0: "own"})
        assert found == {0: chosen, 1: other}
    assert removed == deleted * 2


def test_lost_outbox_continues_to_count_infinite_values(house: House) -> None:
    infinite = [PointRow(step, step, {"loss": float("inf")}) for step in (1, 2)]
    house.outbox.append_rows(0, infinite)
    house.deliver()
    house.outbox.close()
    house.outbox = Outbox(house.directory / "another")
    house.delivery = house.new_delivery()
    house.start(0)
    house.deliver()
    house.outbox.append_rows(0, [*infinite, PointRow(3, 3, {"loss": float("inf")})])
    house.deliver()
    assert house.server.points(0) == [
        ("num_infinite/loss", 1, 1.0),
        ("num_infinite/loss", 2, 2.0),
        ("num_infinite/loss", 3, 3.0),
    ]


def test_lost_outbox_starting_with_metrics_sends_nothing_twice(
    house: House, tmp_path: Path
) -> None:
    house.start(0)
    house.log(0, 1, 10)
    house.deliver()
    house.outbox.close()
    house.outbox = Outbox(tmp_path / "another")
    house.delivery = house.new_delivery()
    house.log(0, 1, 20)
    house.deliver()
    wanted = {(k, r.step) for r in house.module.lines(0, 1, 20) for k in r.metrics}
    assert sorted((key, step) for key, step, _ in house.server.points(0)) == sorted(wanted)


def test_only_staged_copies_are_sent(house: House, tmp_path: Path) -> None:
    secret = tmp_path / "id_rsa"
    secret.write_text("secret")
    copy = house.outbox.directory / "artifacts" / ("0" * 32)
    copy.mkdir(parents=True)
    (copy / "linked").symlink_to(secret)
    for place in (str(secret), "../id_rsa", f"artifacts/{copy.name}/linked", "artifacts"):
        house.outbox.append(0, "artifact", {"staged": place, "folder": ""})
    house.deliver()
    assert not house.server.files()
    assert house.outbox.pending == 0
    assert secret.exists()


def fill_with_artifacts(house: House) -> None:
    """The sweep's spec, and of each trial all from its start to its end, with three artifacts."""
    for name in ("sweep.yaml", "a", "b", "c"):
        (house.directory / name).write_text(name)
    house.start(SWEEP)
    house.outbox.append_artifact(SWEEP, house.directory / "sweep.yaml", "sweep.yaml")
    for trial in range(3):
        house.start(trial)
        for name in ("a", "b", "c"):
            house.outbox.append_artifact(trial, house.directory / name, f"{trial}/{name}")
        house.log(trial, 1, house.module.STEPS)
        house.outbox.append(trial, "finish", {"status": "FINISHED", "time": 9, "tags": {}})


def stores_all_but(house: House, names: set[str]) -> Callable[[str, Path, str], None]:
    real = type(house.server).upload

    def upload(run_id: str, path: Path, folder: str) -> None:
        if str(Path(folder, path.name)) in names:
            raise PermissionError(13, "Permission denied", "/mlartifacts")
        real(house.server, run_id, path, folder)

    return upload


def test_failing_artifact_blocks_only_those_of_its_run(house: House) -> None:
    fill_with_artifacts(house)
    unwanted = {"sweep.yaml", "1/b"}
    house.server.upload = stores_all_but(house, unwanted)
    for _ in range(20):
        assert not house.attempt()
    for trial in range(3):
        assert house.server.points(trial) == house.module.expected(trial)
        assert house.server.runs(trial)[0][0] == "FINISHED"
    stored = [path for path, _ in house.server.files()]
    assert sorted(stored) == ["0/a", "0/b", "0/c", "1/a", "2/a", "2/b", "2/c"]
    assert house.outbox.pending == 3
    unwanted.clear()
    house.deliver()
    stored = [path for path, _ in house.server.files()]
    assert sorted(stored[-3:]) == ["1/b", "1/c", "sweep.yaml"]
    assert stored.index("1/b") < stored.index("1/c")


def test_reason_of_a_waiting_artifact_is_shown_until_stored(house: House) -> None:
    fill_with_artifacts(house)
    unwanted = {"0/a"}
    house.server.upload = stores_all_but(house, unwanted)
    house.delivery.connect()
    reason = (
        r"9 artifacts wait: 0/a of trial 0 cannot be stored at s3://\[hidden\]@bucket/\d "
        r"\(PermissionError: \[Errno 13\] Permission denied: '/mlartifacts'\); give this machine "
    )
    with pytest.raises(NotStored, match=reason) as told:
        house.delivery.drain(lambda: False)
    assert read_outbox(house.directory / "outbox").blocked_artifacts == str(told.value)
    unwanted.clear()
    house.deliver()
    assert read_outbox(house.directory / "outbox").blocked_artifacts is None


def test_server_lost_during_an_upload_is_an_outage(house: House) -> None:
    fill_with_artifacts(house)

    def away(*_: object) -> None:
        raise ConnectionRefusedError

    house.server.upload = house.server.read_run = away
    house.delivery.connect()
    with pytest.raises(ConnectionRefusedError):
        house.delivery.drain(lambda: False)
    assert read_outbox(house.directory / "outbox").blocked_artifacts is None


# -- A trial that is recorded again has one run, with none of the points of the earlier one


def _fail(house: House, trial: int) -> None:
    house.start(trial, lr="1")
    house.log(trial, 1, 50)
    house.outbox.append(
        trial, "finish", {"status": "FAILED", "time": 9, "tags": {"reason": "nan"}}
    )


def _record_again(house: House, trial: int) -> None:
    house.start(trial, lr="1")
    house.log(trial, 1, house.module.STEPS)
    house.outbox.append(trial, "finish", {"status": "FINISHED", "time": 12, "tags": {}})


def _assert_recorded_once(house: House, trial: int) -> None:
    [(status, params, tags)] = house.server.runs(trial)
    assert (status, params) == ("FINISHED", {"lr": "1"})
    assert "reason" not in tags
    assert house.server.points(trial) == house.module.expected(trial)


def _removed(house: House) -> list[dict[str, str]]:
    query = "SELECT tags FROM runs WHERE deleted"
    return [json.loads(tags) for (tags,) in house.server._db.execute(query)]


def test_new_run_has_no_earlier_points(house: House) -> None:
    for trial in (0, 1):
        _fail(house, trial)
    house.deliver()
    house.outbox.replace_run(1)
    delivered = read_outbox(house.outbox.directory)
    assert 1 not in delivered.tracked_statuses
    assert 1 not in delivered.run_ids
    _record_again(house, 1)
    house.deliver()
    _assert_recorded_once(house, 1)
    assert house.server.runs(0)[0][0] == "FAILED"
    [tags] = _removed(house)
    assert (tags[TAG_TRIAL], tags[TAG_REPLACED], tags["reason"]) == ("", "1", "nan")


@pytest.mark.parametrize("seed", range(6))
def test_failing_server_gets_one_new_run(house: House, seed: int) -> None:
    _fail(house, 0)
    house.deliver()
    house.server.fault = fail_sometimes(seed, "", ConnectionResetError)
    house.outbox.replace_run(0)
    _record_again(house, 0)
    house.deliver()
    _assert_recorded_once(house, 0)
    assert len(_removed(house)) == 1


def test_delivery_in_progress_leaves_the_old_run(house: House, tmp_path: Path) -> None:
    """Another process replaces the run while this one has records of it prepared."""
    _fail(house, 0)
    house.delivery.connect()
    house.outbox.prepare([0])
    other = Outbox(tmp_path / "outbox")
    other.replace_run(0)
    batch = house.outbox.next_batch(0)
    assert batch is not None
    assert [record.kind for record in batch.records] == ["replace"]
    other.append_rows(0, house.module.lines(0, 1, 5))
    other.close()
    house.deliver()
    assert len(house.server.points(0)) == 10
