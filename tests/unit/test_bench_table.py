"""The table of the benchmarks on invented measurements; no clock is read."""

from __future__ import annotations

import pytest

from tests.bench import peers, steps
from tests.bench.__main__ import ROWS, main
from tests.bench.table import Goal, alone, dump, interleave, load, paired, render


def _counting(values):
    queue = iter(values)
    return lambda: next(queue)


def test_table_shows_the_median_of_paired_ratios():
    """The machine gets slower all the time; measurements next to each other do not notice."""
    ours = _counting([1.0, 2.0, 3.0, 4.0, 50.0])
    peer = _counting([2.0, 4.0, 6.0, 8.0, 10.0])
    (result,) = interleave(
        "row", ours, {"peer": peer}, unit="s", goals={"peer": Goal("ratio", 0.5)}, repeats=5
    )
    assert result.row == "row / peer"
    assert (result.ours, result.peer, result.ratio) == (3.0, 6.0, 0.5)
    assert (min(result.ratios), max(result.ratios)) == (0.5, 5.0)
    assert result.met is True


def test_every_side_takes_its_turn_at_being_the_first():
    order = []

    def side(name):
        return lambda: float(bool(order.append(name)) + 1)

    interleave("row", side("ours"), {"a": side("a"), "b": side("b")}, unit="s", repeats=6)
    assert order[:9] == ["ours", "a", "b", "a", "b", "ours", "b", "ours", "a"]


def test_goals_of_both_kinds():
    assert paired("row", [3.0], [2.0], "s", Goal("ratio", 1.02)).met is False
    assert paired("row", [3.0], [2.0], "s", Goal("ours", 3.0)).met is True
    assert alone("row", [700.1], "MiB", Goal("ours", 700)).met is False
    assert alone("row", [1.0], "MiB").met is None


def test_table_as_text():
    results = [
        paired("a row", [1.0, 1.0], [2.0, 4.0], "s", Goal("ratio", 0.1)),
        alone("another", [512.0], "MiB"),
    ]
    assert render(results).splitlines() == [
        "row      ours  peer  unit  ratio  spread       goal          met?",
        "-------  ----  ----  ----  -----  -----------  ------------  ----",
        "a row    1     3     s     0.375  0.250-0.500  ratio <= 0.1  NO",
        "another  512   -     MiB   -      -            -             -",
    ]


def test_results_pass_from_one_process_to_another():
    results = [
        paired("a", [1.0, 1.5], [2.0, 4.0], "s", Goal("ratio", 0.1)),
        alone("b", [512.0], "MiB"),
    ]
    assert load(dump(results)) == results


def test_missing_peers_leave_the_rest_of_the_table(monkeypatch, capsys):
    def fail():
        raise OSError("no route to host")

    monkeypatch.setattr(steps, "make_environment", fail)
    monkeypatch.setattr(steps, "measure", lambda _: [alone("P3 MLP", [1.0], "ms")])
    monkeypatch.setattr(steps, "missing", lambda: ["Lightning"])
    results = steps.steps(5)
    assert [result.row for result in results] == [
        "P3 MLP",
        "P3 DataLoader / Lightning: not measured, its environment failed",
    ]
    assert render(results).splitlines()[-1].split("failed")[1].split() == ["-"] * 7
    assert "no route to host" in capsys.readouterr().err
    assert results[1].met is None


def test_peers_are_looked_for_independently(monkeypatch):
    there = {"accelerate": object()}
    monkeypatch.setattr(peers.importlib.util, "find_spec", there.get)
    assert list(peers.installed()) == ["Accelerate"]
    assert peers.missing() == ["Lightning"]


def test_rows_can_be_listed_without_measuring(capsys):
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(ROWS)


def test_too_few_repeats_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--repeats", "3"])
    assert "--repeats is 3" in capsys.readouterr().err
