"""The field's measures and protocol, with a tiny peer in place of other libraries."""

from __future__ import annotations

import ast
import math
import re
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from tests.bench.field import grounds, process, searches
from tests.bench.field.measure import KEYS, Programs, fill, measure
from tests.bench.field.measures import (
    area,
    by_problem,
    curve,
    interval,
    kept_from,
    lead,
    median_lead,
    median_ratio,
    ranks,
    regret_at,
)
from tests.bench.field.played import OneEpochThenTop, PlayedSide, RandomPoints
from tests.bench.field.process import PeerError, PeerProcess
from tests.bench.field.searches import OURS, RANDOM, STOCK, TOP, Program, problem
from tests.bench.quality_sweeps import drive
from tests.bench.rows_file import read

PATH = [(2, 2.0, 0.9), (4, 4.0, 0.05), (7, 7.0, 0.5), (9, 9.0, 0.08), (12, 12.0, 0.02)]


def test_a_target_counts_from_when_it_is_kept():
    assert kept_from(PATH, 0.1) == (9, 9.0)
    assert kept_from(PATH, 0.6) == (4, 4.0)
    assert kept_from(PATH, 1.0) == (2, 2.0)
    assert kept_from(PATH, 0.01) is None
    assert kept_from(PATH[:3], 0.1) is None
    assert kept_from([], 0.1) is None


def test_regret_is_that_of_what_is_shown():
    assert regret_at(PATH, 1) == math.inf
    assert [regret_at(PATH, epochs) for epochs in (2, 6, 8, 99)] == [0.9, 0.05, 0.5, 0.02]


def test_area_is_the_mean_logarithm_of_regret():
    path = [(2, 0.0, 1.0), (3, 0.0, 0.1), (5, 0.0, 1e-9)]
    # epoch 1 shows nothing: 10; epoch 2: 1; 3 and 4: 0.1; 5 and 6: the floor
    assert area(path, 6) == pytest.approx((1 + 0 - 1 - 1 - 3 - 3) / 6)
    assert area([], 6) == 1.0
    assert area([(1, 0.0, math.inf)], 4) == 1.0
    assert area([(1, 0.0, 0.1), (9, 0.0, 0.01)], 6) == pytest.approx(-1)


def test_ranks_are_those_of_demsar():
    """The critical values of his table 5a; 30 problems."""
    for count, q in ((2, 1.960), (5, 2.728), (10, 3.164)):
        values = {str(one): np.full(30, float(one)) for one in range(count)}
        found = ranks(values)
        assert found.critical == pytest.approx(q * math.sqrt(count * (count + 1) / 180), rel=1e-3)
        assert list(found.mean.values()) == list(range(1, count + 1))
    assert found.p < 1e-9
    assert ranks({"a": [1, 1], "b": [1, 2], "c": [3, 0]}).mean == {"a": 1.75, "b": 2.25, "c": 2.0}


def test_a_ratio_is_the_median_over_problems():
    ours = [[10.0, 10.0, 10.0], [4.0, 4.0, 4.0], [1.0, 1.0, 1.0]]
    theirs = [[20.0, 20.0, 20.0], [2.0, 4.0, 8.0], [9.0, 9.0, 9.0]]
    assert median_ratio(theirs, ours) == (2.0, 2.0, 2.0)
    low, middle, high = (median_ratio(theirs[1:2], ours[1:2])[one] for one in (1, 0, 2))
    assert low < middle == 1.0 < high
    assert interval([3.0]) == (3.0, 3.0, 3.0)


def test_a_lead_is_taken_at_the_end_of_the_worse_one():
    ours = curve([(1, 0.0, 1.0), (3, 0.0, 0.2), (8, 0.0, 0.1)], 12)
    theirs = curve([(2, 0.0, 0.9), (6, 0.0, 0.2)], 12)
    assert ours.tolist() == [1.0, 1.0, *[0.2] * 5, *[0.1] * 5]
    assert theirs[0] == 10.0
    assert lead([theirs], [ours]) == 6 / 3
    assert lead([ours], [theirs]) == 3 / 6
    assert lead([ours], [ours]) == 1
    assert median_lead([[theirs] * 2] * 3, [[ours] * 2] * 3) == (2.0, 2.0, 2.0)


def test_only_common_replications_are_compared():
    rows = [
        {"problem": "p", "search": search, "workers": 4, "seed": seed, "value": 10 * seed}
        for search, seeds in (("a", (0, 1, 2)), ("b", (0, 2)))
        for seed in seeds
    ]
    found = by_problem(rows, 4, lambda row: row["value"])
    assert found == {"p": {"a": [0, 20], "b": [0, 20]}}
    assert by_problem(rows, 1, lambda row: row["value"]) == {}


PEER = """
    import os, sys, time
    from tests.bench.field.programs.serve import Job, serve

    class Halving:
        '''Four for an epoch, then the one with the lowest loss to its end; `trick` misbehaves.'''

        def __init__(self, problem):
            print("what libraries print is no answer")
            self.problem, self.count, self.losses = problem, 0, {}
            self.random = problem["seed"]

        def ask(self):
            trick = self.problem["options"].get("trick")
            if trick == "raises":
                raise ValueError("no such thing")
            if trick == "ends":
                sys.exit("good bye")
            if trick == "waits":
                time.sleep(60)
            if self.count < 4:
                self.count += 1
                place = {name: self.at(one) for name, one in self.problem["space"].items()}
                return Job(str(self.count), place, 1)
            if len(self.losses) < 4:
                return None
            best = min(self.losses, key=self.losses.get)
            return Job(best, {}, self.problem["epochs"])

        def at(self, one):
            middle = one["low"] + (one["high"] - one["low"]) * self.count / 5
            return round(middle) if one["kind"] == "int" else middle

        def tell(self, report):
            self.losses.setdefault(report.trial, report.loss)
            return True

    serve(Halving)
"""


@pytest.fixture
def peer(tmp_path):
    program = tmp_path / "peer.py"
    program.write_text(textwrap.dedent(PEER))
    started = []

    def start(patience: float = 30.0) -> PeerProcess:
        started.append(PeerProcess([sys.executable, str(program)], patience=patience))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.mark.parametrize("name", ["digits-cnn", "branin-alike"])
def test_a_peer_resumes_and_pays_new_epochs_alone(peer, name):
    where = grounds.ground(name)
    process = peer()
    for _ in range(2):  # one process plays one search after the other
        meets = where.start(0)
        process.begin(problem(where, 4, 0, {}))
        side = PlayedSide(process, where, meets)
        reports = list(
            drive(side, meets.train, epochs=where.epochs, at_once=4, seconds=meets.seconds)
        )
        assert [one.epoch for one in reports[:4]] == [1] * 4
        first = min(reports[:4], key=lambda one: one.loss)
        assert [one.epoch for one in reports[4:]] == list(range(2, where.epochs + 1))
        assert {str(one.params) for one in reports[4:]} == {str(first.params)}
        assert process.cpu > 0


@pytest.mark.parametrize(
    ("trick", "said"), [("raises", "no such thing"), ("ends", "good bye"), ("waits", "no answer")]
)
def test_a_peer_that_fails_says_why(peer, trick, said):
    process = peer(patience=30.0 if trick != "waits" else 3.0)
    process.begin(problem(grounds.ground("branin-alike"), 1, 0, {"trick": trick}))
    with pytest.raises(PeerError, match=said):
        process.ask()


def test_a_failed_peer_keeps_what_it_showed(peer, monkeypatch):
    process = peer()
    answers = process.tell

    def fails(**report):
        if report["epoch"] == 3:
            raise PeerError("some lines\nthe last of them")
        return answers(**report)

    monkeypatch.setattr(process, "tell", fails)
    monkeypatch.setattr(Program, "start", lambda _: process)
    row = measure("branin-alike", "DEHB", 1, 0, Programs())
    assert (row["spent"], row["failed"]) == (6, "the last of them")
    assert row["path"]
    assert process._process.poll() is not None  # the next search starts another one


class Told:
    """Proposes what it is given, and notes what it is told."""

    def __init__(self, jobs):
        self.jobs, self.reports = list(jobs), []

    def ask(self):
        return self.jobs.pop(0) if self.jobs else None

    def tell(self, **report):
        self.reports.append(report)
        return True


def _job(trial, until, place=0.25):
    return {"trial": trial, "params": {"x0": place, "x1": place}, "until": until}


def _play(jobs, workers=1, losses=None):
    where = grounds.ground("branin-alike")
    meets = where.start(0)
    told = Told(jobs)
    train = (lambda *_: iter(losses)) if losses else meets.train
    reports = list(
        drive(PlayedSide(told, where, meets), train, epochs=where.epochs, at_once=workers)
    )
    return reports, [(one["trial"], one["epoch"], one["last"]) for one in told.reports], told


def test_what_was_reported_is_told_again_for_nothing():
    reports, told, _ = _play([_job("a", 3), _job("a", 2), _job("a", 4)])
    assert [one.epoch for one in reports] == [1, 2, 3, 4]
    assert told == [
        ("a", 1, False),
        ("a", 2, False),
        ("a", 3, True),
        ("a", 2, True),
        ("a", 4, True),
    ]


def test_a_job_waits_until_its_trial_pauses():
    _, told, _ = _play([_job("a", 2), _job("a", 3), _job("b", 1, 0.5)], workers=2)
    assert told == [("a", 1, False), ("b", 1, True), ("a", 2, True), ("a", 3, True)]


def test_a_diverged_training_is_told_once_as_null():
    reports, told, proposer = _play([_job("a", 5), _job("a", 9)], losses=[1.0, math.nan])
    assert [one.epoch for one in reports] == [1, 2]
    assert told == [("a", 1, False), ("a", 2, True), ("a", 2, True)]
    assert proposer.reports[-1]["loss"] is None


def test_peers_learn_what_was_trained_of_a_table():
    where = grounds.ground("digits-cnn")
    meets = where.start(0)
    params = {f"x{index}": one.at(0.5) for index, one in enumerate(where.space.values())}
    told = Told([{"trial": "a", "params": params, "until": 1}])
    list(drive(PlayedSide(told, where, meets), meets.train, epochs=12, at_once=1))
    (report,) = told.reports
    trained = dict(zip(where.space, report["params"].values(), strict=True))
    assert list(report["params"]) == list(params)
    assert report["params"] != params
    assert trained in where.table.params


def test_half_of_the_budget_is_for_first_epochs():
    where = grounds.ground("branin-alike")
    points = where.points(np.random.default_rng(0))
    side = PlayedSide(OneEpochThenTop(points, 27, 20), where, where.start(0))
    epochs = [
        report.epoch
        for report, _ in zip(
            drive(side, where.start(0).train, epochs=27, at_once=1), range(62), strict=False
        )
    ]
    assert epochs[:10] == [1] * 10
    assert 1 not in epochs[10:]
    assert epochs.count(27) == 2


@pytest.mark.parametrize("name", grounds.FORMS)
def test_regret_of_a_closed_form_is_that_of_a_table(name):
    where = grounds.ground(name)
    meets = where.start(0)
    points = where.points(np.random.default_rng(0))
    regrets = [meets.regret(next(points)) for _ in range(2000)]
    assert min(regrets) > 0
    assert np.median(regrets) == pytest.approx(1, abs=0.15)
    assert 0 < where.level < 0.5


@pytest.mark.parametrize("search", [RANDOM, TOP, STOCK, OURS[0]])
@pytest.mark.parametrize("name", ["lookup", "branin-crossing"])
def test_a_search_goes_on_to_its_horizon(name, search):
    row = measure(name, search, 4, 0, Programs())
    where = grounds.ground(name)
    assert (
        row["spent"] == where.horizon == {"lookup": 1, "branin-crossing": 4}[name] * where.budget
    )
    assert row["failed"] is None
    assert 0 < row["path"][0][0] <= row["path"][-1][0] <= where.horizon
    again = measure(name, search, 4, 0, Programs())
    assert again["path"] == row["path"]


def test_rows_are_measured_once(tmp_path):
    rows = tmp_path / "rows.jsonl"
    for seeds in (1, 2):
        fill(rows, ["branin-alike"], [RANDOM, TOP], [4], seeds)
    found = [tuple(row[key] for key in KEYS[:4]) for row in read(rows)]
    assert found == [
        ("branin-alike", search, 4, seed) for seed in (0, 1) for search in (RANDOM, TOP)
    ]


def test_each_peer_has_a_program_and_pinned_packages():
    here = Path(process.__file__).parent
    for one in searches.PROGRAMS.values():
        assert (here / "programs" / f"{one.program}.py").exists()
        if one.environment:
            pinned = (here / "requirements" / f"{one.environment}.txt").read_text().splitlines()
            assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pinned)


@pytest.mark.parametrize("program", sorted({one.program for one in searches.PROGRAMS.values()}))
def test_each_peer_compares_from_the_first_rung_on(program):
    """Their libraries are not in this environment; a default may be as long as a training."""
    tree = ast.parse((Path(process.__file__).parent / "programs" / f"{program}.py").read_text())
    read = {ast.unparse(one) for one in ast.walk(tree) if isinstance(one, ast.Subscript)}
    assert "problem['grace']" in read


def test_random_points_of_a_table_are_its_own():
    where = grounds.ground("friedman")
    search = RandomPoints(where.points(np.random.default_rng(0)), where.epochs)
    jobs = [search.ask() for _ in range(129)]
    assert jobs[-1] is None
    assert len({str(job["params"]) for job in jobs[:-1]}) == 128
