"""A trial that is recorded again has one run, with none of the points of the earlier one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.unit.tracking.test_delivery import House, fail_sometimes
from tracking.delivery import TAG_REPLACED, TAG_TRIAL
from tracking.outbox import Outbox
from tracking.outbox_status import read_outbox


@pytest.fixture
def house(disk_server: ModuleType, tmp_path: Path) -> Iterator[House]:
    built = House(disk_server, tmp_path)
    yield built
    built.outbox.close()
    built.server.close()


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
