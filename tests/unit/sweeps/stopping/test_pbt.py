"""Population based training: members pause, and each waits for all others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sweeps.stopping.pbt import PopulationBasedTraining
from sweeps.stopping.rule import Standing


@given(st.data(), st.integers(1, 6), st.integers(1, 3))
def test_population_waits_for_every_member_at_a_rung(
    data: st.DataObject, members: int, slots: int
) -> None:
    population = PopulationBasedTraining(rungs=(2, 4), minimize=True, num_trials=members)
    reports: dict[int, dict[int, float]] = {}
    live: dict[int, int] = {}
    unfinished: set[int] = set()
    for _ in range(200):
        number = population.next_promotion(Standing(reports, unfinished, live.keys()))
        if len(live) < slots and number is not None:
            rung = max(reports[number])
            assert all(max(r, default=0) >= rung for n, r in reports.items() if n in unfinished)
            assert len(reports) == members
            live[number] = population.pause_at_epoch(rung) or 6
        elif len(live) < slots and len(reports) < members:
            number = len(reports)
            reports[number] = {}
            unfinished.add(number)
            live[number] = 2
        elif not live:
            break
        else:  # one of those that are worked on comes further, or dies for good
            number = data.draw(st.sampled_from(sorted(live)))
            if data.draw(st.integers(0, 9)) == 0:
                unfinished.remove(number)
                del live[number]
                continue
            epoch = max(reports[number], default=0) + 1
            reports[number][epoch] = 0.0
            if epoch == live[number]:
                del live[number]
                if epoch == 6:
                    unfinished.remove(number)
    assert not unfinished, "all came to their end"
    assert population.never_promoted(Standing(reports, unfinished)) == frozenset()
