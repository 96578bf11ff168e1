"""What the ranks of a trial evaluate, log and read, in a real group of three processes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict

import pytest
import torch

from tests.rank_training import Groups, config, curve, to_end
from tests.rank_value_cases import Asking, Mined, Parted, Reading, run_all, run_rank, said
from trainable.build import open_trainer
from trainable.group_joining import GroupPlace, listen
from trainable.parallel.rank_group import RankGroup
from trainable.processes.local_ranks import LocalRanks
from trainable.ranks import ALONE

pytestmark = pytest.mark.integration


KINDS = {
    "loader": {},
    "stream": {},
    "batches": {"accumulation": 3},
    "own": {"loader": {"num_workers": 1}},
    "asks": {"loader": {"num_workers": 1}},
    "asks in a stream": {},
}
TASKS = {"own": Reading, "asks": Asking, "asks in a stream": Asking, "mined": Mined}


def _configured(kind, workers):
    name = f"{Reading.__module__}:{TASKS.get(kind, Parted).__name__}"
    task = {"name": name, "kind": kind}
    train = {
        "batch_size": 6,
        "accumulation": 1,
        "epochs": 2,
        "every": "2 steps",
        **KINDS.get(kind, {}),
    }
    return config(workers, task, **train)


@pytest.fixture(scope="module")
def alone():
    """The cases in one process."""
    torch.set_num_threads(1)
    return run_all(ALONE)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What each of three ranks found in the cases, and the directories of their runs.

    Each run is made on one rank, too. The last one is stopped and resumed.
    """
    torch.set_num_threads(1)
    found = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    runs = [(_configured(kind, 3), path / "three") for kind, path in found.items()]
    runs += [(_configured("stream", 3), found["stream"] / "stopped")] * 2
    runs.append((_configured("mined", 3), tmp_path_factory.mktemp("mined")))
    cases = f"{run_rank.__module__}:{run_rank.__name__}"
    with LocalRanks(3) as children, listen() as listening:
        place = GroupPlace(*listening.getsockname()[:2], 3, timeout=60.0)
        groups = Groups(children, runs)
        groups.begin(function=cases, place=asdict(place))
        with RankGroup.join(place, 0, listening=listening) as ranks:
            first = run_all(ranks)
        for number, kind in enumerate(KINDS):
            with groups.first(number) as run:
                to_end(run)
            with closing(open_trainer(_configured(kind, 1), found[kind] / "one")) as run:
                to_end(run)
        stops = iter([False, False, True])
        with groups.first(len(KINDS), should_stop=lambda: next(stops)) as run:
            to_end(run)
        with groups.first(len(KINDS) + 1) as run:
            assert run.resumed_at == 3
            to_end(run)
        with groups.first(len(KINDS) + 2) as run:
            first["mined"] = said(lambda: to_end(run))
        others = children.ends()
    assert [end.error for end in others if end.error] == []
    for one in others:
        *ends, mined = one.result["ends"]
        assert set(ends) == {""}
        one.result["mined"] = mined.split(": ", 1)
    return [first, *(end.result for end in others)], found


@pytest.fixture(scope="module")
def together(both):
    """The cases on each of three ranks."""
    return both[0]


@pytest.fixture(scope="module")
def trained(both):
    """The directories of the runs, by kind of data."""
    return both[1]


@pytest.mark.parametrize("task", ["Judged", "Few"])
def test_default_evaluation_is_that_of_one_process(task, alone, together):
    expected = alone[task]
    for found in (ranks[task] for ranks in together):
        assert found["metrics"] == together[0][task]["metrics"]
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-12)
        assert found["logged"] == pytest.approx(expected["logged"], rel=1e-12)
    assert found["metrics"]["val/accuracy"] == expected["metrics"]["val/accuracy"]
    assert set(expected["metrics"]) == {"val/loss", "val/accuracy"}
    shares = [sum(ranks[task]["evaluated"]) for ranks in together]
    assert sum(shares) == sum(expected["evaluated"])
    assert shares == ([9, 8, 6] if task == "Judged" else [1, 1, 0])


def test_own_evaluation_runs_on_the_first_rank_over_all(alone, together):
    assert [ranks["Own"]["evaluated"] for ranks in together] == [[23], [], []]
    assert all(ranks["Own"]["metrics"] == alone["Own"]["metrics"] for ranks in together)
    assert all(ranks["Own"]["logged"] == {"val/seen": 23.0} for ranks in together)


def test_an_error_of_an_evaluation_is_raised_on_all_ranks(alone, together):
    assert [ranks["Ignored"] for ranks in together] == [alone["Ignored"]] * 3
    assert alone["Failing"] == ["ValueError", "bad sample 9"]
    for case, failing, text in (("Failing", 0, "bad sample 9"), ("OwnFailing", 0, "no curve")):
        for rank, (kind, message) in enumerate(ranks[case] for ranks in together):
            assert text in message
            assert (kind == "ValueError") == (rank == failing)
            assert (f"rank {failing}" in message) == (rank != failing)


def test_logged_values_are_those_of_all_ranks(together):
    assert len({repr(ranks["logged"]) for ranks in together}) == 1
    steps = together[0]["logged"]
    # weights 1, 2 and 3 of the values 0, 1 and 2
    assert [step["loss"] for step in steps] == pytest.approx([8 / 6 + step for step in range(3)])
    assert [step["count"] for step in steps] == [6.0] * 3
    assert [step["rare"] for step in steps] == [5.5] * 3
    assert all(step["own"] != step["own"] for step in steps)  # its weight is 0


def test_messages_of_ranks_have_any_length(together):
    assert [ranks["long"] for ranks in together] == [[0, 4000, 8000]] * 3


@pytest.mark.parametrize("case", ["stream", "stream in processes"])
def test_stream_is_read_by_all_and_divided(case, alone, together):
    for number, window in enumerate(alone[case]):
        parts = [ranks[case][number] for ranks in together]
        assert sum(parts, []) == window  # noqa: RUF017
        assert [len(part) for part in parts] == [2, 2, 2]


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("divided", "TaskError", "on rank 1"),
        ("divided in processes", "TaskError", "on rank 1"),
        ("shorter", "TaskError", "ended on 1 of 3 ranks"),
        ("built", "ConfigError", "train: its length"),
    ],
)
def test_data_that_differ_between_ranks_are_refused(case, kind, text, together):
    for ranks in together:
        assert ranks[case][0] == kind
        assert text in ranks[case][1]
        assert ranks["at last"] == [1, 1, 1]


def test_sampler_that_chooses_otherwise_on_a_rank_is_refused(together):
    for _, message in (ranks["mined"] for ranks in together):
        assert "chooses other samples for epoch 2 on rank 1" in message


@pytest.mark.parametrize("kind", KINDS)
def test_three_ranks_train_as_one_process(kind, trained):
    one, three = curve(trained[kind] / "one"), curve(trained[kind] / "three")
    assert [row.step for row in one] == [row.step for row in three]
    for expected, found in zip(one, three, strict=True):
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-12)
    assert one[-1].metrics["epoch/seen"] == sum(
        row.metrics["seen"] for row in one[len(one) // 2 :]
    )


def test_stream_on_three_ranks_resumes_to_the_same_bits(trained):
    assert curve(trained["stream"] / "stopped") == curve(trained["stream"] / "three")
