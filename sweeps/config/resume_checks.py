"""What of a search cannot change any more once a sweep exists.

What must not live here: what may change (`proposals` shows samplers the trials so far as points of
the space as it is), and code, data and the meaning of values (`origin`).
"""

from __future__ import annotations

from sweeps.config.spec import SweepSpec
from sweeps.config.yaml_scalars import write_flow
from sweeps.errors import SearchChanged


def check_search_changes(before: SweepSpec, after: SweepSpec, num_trials: int) -> None:
    """Refuse changes of a search that would have to reach back.

    Args:
        before: The sweep's spec.
        after: The spec that it would go on with.
        num_trials: How many trials it has.

    Raises:
        SearchChanged: With what would change.
    """
    if num_trials:
        _check_population(before, after)
    old, new = before.search, after.search
    if old.warm_start != new.warm_start:
        raise SearchChanged(
            f"search.warm_start is {write_flow(old.warm_start)} in this sweep and cannot become "
            f"{write_flow(new.warm_start)}: what is taken along is fixed when a sweep is created; "
            "start a new sweep with `sweep run FILE --name NAME`"
        )
    if old.try_first[:num_trials] != new.try_first[:num_trials]:
        raise SearchChanged(
            f"search.try_first is {write_flow(old.try_first)} in this sweep, and its first "
            f"{num_trials} points cannot change: {num_trials} trials have been drawn, and point 0 "
            f"is trial 0; start a new sweep, with `search.warm_start: {before.name}` if it shall "
            "know these trials"
        )


def _check_population(before: SweepSpec, after: SweepSpec) -> None:
    """Refuse to make a population of trials, to unmake one, and to change its size."""
    old, new = before.early_stopping, after.early_stopping
    another = "start a new sweep with `sweep run FILE --name NAME`"
    if old.rule.is_population != new.rule.is_population:
        raise SearchChanged(
            f"early_stopping.scheduler is {old.scheduler} in this sweep and cannot become "
            f"{new.scheduler}: the members of a population are trained beside each other from the "
            f"beginning; {another}"
        )
    if new.rule.is_population and before.trials != after.trials:
        raise SearchChanged(
            f"trials is {before.trials} in this sweep and cannot become {after.trials}: the "
            f"members of a population ({new.scheduler}) are trained beside each other from the "
            f"beginning; {another}"
        )
