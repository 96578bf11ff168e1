"""Checks of the space and `search`: conditions, constraints, ranges, priors, points, grid size.

They work on plain data, so that they also run if another part of the spec is wrong. A study keeps
each number as a float of 64 bits; without the checks of ranges, a trial would be trained with a
value near the one that was meant. What must not live here: which keys may be searched
(`cross_checks`), and the form of single values (`sections`, `space_parser`, `priors`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from sweeps.errors import Issue, KeyPath, dotted
from sweeps.formatting import shown
from sweeps.spec.applied_priors import OPTIMIZER, applied_priors, default_prior
from sweeps.spec.constraints import Constraint, parse_constraint
from sweeps.spec.error_messages import nearest
from sweeps.spec.priors import PRIOR
from sweeps.spec.search_space import MOST_DRAWS, SearchSpace, fixed_values
from sweeps.spec.searched_workers import WORKERS
from sweeps.spec.sections import LEARN_NOTHING, ResourcesConfig, SearchConfig
from sweeps.spec.space import WHEN, Choice, Distribution, Int, LogUniform, QUniform, Uniform
from sweeps.spec.space_parser import parse_distribution
from sweeps.spec.yaml_scalars import write_flow
from trainable.config import TaskConfig, TrainConfig

_SHARE_OF = 1_000
_LEAST_SHARE = 0.05
"""Of a smaller part of the space, samplers that model the whole space learn little."""
Show = Callable[[KeyPath, object], str]


def search_space(
    space: Mapping[str, Distribution],
    search: SearchConfig,
    train: TrainConfig,
    task: TaskConfig,
    resources: ResourcesConfig,
) -> SearchSpace:
    """Return the search space of a spec whose conditions are valid."""
    constraints = [parse_constraint(text) for text in search.constraints]
    wanted = {key for constraint in constraints for key in constraint.keys} - space.keys()
    values = fixed_values(train, task, resources, own_optimizer="train.optimizer.name" in space)
    fixed = {key: value for key in wanted if (value := values.get(key)) is not None}
    return SearchSpace(space, constraints, fixed)


def search_faults(
    data: Mapping[str, Any],
    space: Mapping[str, Distribution | None],
    show: Show,
    drawn: int = 0,
) -> Iterator[Issue]:
    """Check `space` and `search` against each other."""
    sound = {key: one for key, one in space.items() if one is not None}
    wrong = [fault for key in sound for fault in _condition_faults(key, space, show)]
    yield from wrong
    if wrong or len(sound) < len(space):
        return
    search = _search_of(data.get("search", {}))
    if (whole := _whole(data, sound, search)) is None:
        return
    trials = data.get("trials")
    if not drawn:  # else a resume checks what it changes
        yield from range_faults(sound, search)
    yield from _warm_start_faults(search, data)
    yield from prior_faults(whole, search, _optimizer_of(data))
    wrong = list(_constraint_faults(whole, search))
    yield from wrong or _grid_faults(whole, search)
    yield from _point_faults(whole, search, trials, show, drawn, allowed=not wrong)


def sound_constraints(
    data: Mapping[str, Any], space: Mapping[str, Distribution | None]
) -> SearchSpace:
    """Return the search space with its valid constraints only."""
    sound = {key: one for key, one in space.items() if one is not None}
    whole = _whole(data, sound, _search_of(data.get("search", {}))) or SearchSpace(sound)
    kept = [one for one in whole.constraints if not any(_key_faults(one, whole))]
    return replace(whole, constraints=kept)


def num_points(data: Mapping[str, Any], most: int) -> int | None:
    """Return how many points a space has; None if endless, or if a part of the spec is wrong."""
    raw = data.get("space")
    try:  # a `UserError` is a `ValueError`
        space = {key: parse_distribution(one) for key, one in dict(raw or {}).items()}
    except (TypeError, ValueError):
        return None
    if any(fault for key in space for fault in _condition_faults(key, space, lambda *_: "")):
        return None
    return sound_constraints(data, space).num_points(most)


def _whole(
    data: Mapping[str, Any], sound: Mapping[str, Distribution], search: SearchConfig
) -> SearchSpace | None:
    """Return the search space, or None if another part of the spec is wrong."""
    task = data.get("task", "")
    named = {"name": task} if isinstance(task, str) else task
    try:
        train = TrainConfig.model_validate(data.get("train", {}))
        resources = ResourcesConfig.model_validate(data.get("resources", {}))
        return search_space(sound, search, train, TaskConfig.model_validate(named), resources)
    except ValidationError:
        return None


def _optimizer_of(data: Mapping[str, Any]) -> str:
    """Return the optimizer of a spec whose section `train` is valid."""
    return TrainConfig.model_validate(data.get("train", {})).optimizer.name


def _search_of(data: object) -> SearchConfig:
    """Return the section with its valid fields only; the others are reported elsewhere."""
    data = data if isinstance(data, dict) else {}
    try:
        return SearchConfig.model_validate(data)
    except ValidationError as error:
        wrong = {item["loc"][0] for item in error.errors()}
        return SearchConfig.model_validate({k: v for k, v in data.items() if k not in wrong})


def _condition_faults(
    key: str, space: Mapping[str, Distribution | None], show: Show
) -> Iterator[Issue]:
    distribution = space[key]
    assert distribution is not None
    for other, allowed in distribution.when:
        path = ("space", key, WHEN, other)
        if other not in space:
            meant = nearest(other, [name for name in space if name != key])
            fix = f"did you mean '{meant}'?" if meant else "search it, or leave the condition out"
            message = f"'{other}' is not searched; a condition names another key of the space; "
            yield Issue(path, message + fix, at_key=True)
            continue
        if (circle := _circle(key, other, space)) is not None:
            message = f"'{key}' depends on itself ({' -> '.join(circle)}); remove one condition"
            yield Issue(path, message, at_key=True)
            continue
        parent = space[other]
        if parent is None:
            continue
        if not isinstance(parent, Choice):
            yield Issue(
                path,
                f"'{other}' is drawn by {parent.name}; a condition names a choice and some of its "
                "options; make it a choice, or leave the condition out",
                at_key=True,
            )
            continue
        for index, value in enumerate(allowed):
            if value not in parent.options:
                single = len(allowed) == 1
                text = show(path if single else (*path, index), value)
                options = ", ".join(map(write_flow, parent.options))
                yield Issue(
                    path if single else (*path, index),
                    f"{text} is not an option of '{other}'; its options: {options}; write one of "
                    "them",
                )


def _circle(
    key: str, other: str, space: Mapping[str, Distribution | None]
) -> tuple[str, ...] | None:
    """Return a circle of conditions from a key over another one back to it, or None."""
    ways: list[tuple[str, ...]] = [(key, other)]
    while ways:
        way = ways.pop()
        if way[-1] == key:
            return way
        distribution = space.get(way[-1])
        further = [name for name, _ in distribution.when] if distribution else []
        ways += [(*way, name) for name in further if name == key or name not in way]
    return None


def constraint_cautions(space: SearchSpace, search: SearchConfig) -> list[str]:
    """Return a sentence if constraints allow so little that samplers hardly learn."""
    if not space.constraints or search.sampler in LEARN_NOTHING:
        return []
    generator = random.Random(0)
    points = (space.point(lambda _, one: one.at(generator.random())) for _ in range(_SHARE_OF))
    share = sum(map(space.allows, points)) / _SHARE_OF
    if share >= _LEAST_SHARE:
        return []
    return [
        f"search.constraints allow {100 * share:.1f} % of {_SHARE_OF:,} random points: "
        f"{search.sampler} models the whole ranges, and may find no better values than random "
        "draws do; narrow the ranges of the space to where the constraints hold"
    ]


def _constraint_faults(whole: SearchSpace, search: SearchConfig) -> Iterator[Issue]:
    faulty = False
    for index, constraint in enumerate(whole.constraints):
        for message in _key_faults(constraint, whole):
            faulty = True
            yield Issue(("search", "constraints", index), message)
    if search.constraints and not faulty and whole.draw(0) is None:
        yield Issue(
            ("search", "constraints"),
            f"none of {MOST_DRAWS:,} random points satisfies them; a trial is drawn until its "
            "point does; loosen a constraint, or narrow the space to where they hold",
        )


def _key_faults(constraint: Constraint, whole: SearchSpace) -> Iterator[str]:
    known = {**whole.fixed, **whole.distributions}
    for key in constraint.keys:
        if key not in known:
            meant = nearest(key, known)
            fix = f"did you mean '{meant}'?" if meant else "give it a number in the file"
            yield (
                f"'{key}' is not searched and has no value; a constraint names keys of the "
                f"space, or numbers below train. and task., or {WORKERS}; {fix}"
            )
            continue
        distribution = whole.distributions.get(key)
        values = distribution.options if isinstance(distribution, Choice) else ()
        for value in values if distribution else (whole.fixed[key],):
            if isinstance(value, bool) or not isinstance(value, int | float):
                yield (
                    f"{shown(value) if not isinstance(value, list | dict | tuple) else 'a list'} "
                    f"is not a number; a constraint compares numbers; leave '{key}' out"
                )
                break


def _grid_faults(whole: SearchSpace, search: SearchConfig) -> Iterator[Issue]:
    if search.sampler != "grid":
        return
    endless = [key for key, one in whole.distributions.items() if one.values() is None]
    for key in endless:
        name = whole.distributions[key].name
        yield Issue(
            ("space", key, name),
            f"{name} has no list of values, and the sampler is grid; a grid tries every value of "
            "choice, int and quniform; write choice: [...], or another sampler",
            at_key=True,
        )


def _warm_start_faults(search: SearchConfig, data: Mapping[str, Any]) -> Iterator[Issue]:
    path: KeyPath = ("search", "warm_start")
    if search.warm_start and search.sampler in LEARN_NOTHING:
        yield Issue(
            path,
            f"{search.sampler} does not learn from trials, so it cannot use earlier ones; remove "
            "the key, or write sampler: tpe",
        )
    if data.get("name") in search.warm_start:
        yield Issue(
            path,
            f"{shown(data['name'])} is the name of this sweep; a warm start takes trials of "
            "earlier sweeps; give this sweep another name",
        )


def _point_faults(
    whole: SearchSpace,
    search: SearchConfig,
    trials: object,
    show: Show,
    drawn: int,
    *,
    allowed: bool,
) -> Iterator[Issue]:
    points = search.points
    if isinstance(trials, int) and not isinstance(trials, bool) and 0 < trials < len(points):
        yield Issue(
            ("search", "try_first"),
            f"there are {len(points)} points and {trials} trials; each point is a trial; write "
            f"trials: {len(points)} or more",
        )
    for number, point in enumerate(points[drawn:], drawn):
        path: KeyPath = ("search", "try_first", number)
        wrong = [fault for key in point for fault in _value_faults(path, key, point, whole, show)]
        yield from wrong
        if not wrong and allowed and whole.draw(0, point) is None:
            some = "" if whole.unconditional().keys() <= point.keys() else ", whatever is drawn"
            yield Issue(
                path, f"the point violates search.constraints{some}; change it, or a constraint"
            )


def _value_faults(
    path: KeyPath, key: str, point: Mapping[str, Any], whole: SearchSpace, show: Show
) -> Iterator[Issue]:
    at = (*path, key)
    distribution = whole.distributions.get(key)
    if distribution is None:
        meant = nearest(key, whole.distributions)
        fix = f"did you mean '{meant}'?" if meant else "search it, or set it in the file itself"
        yield Issue(at, f"'{key}' is not searched; a point has keys of the space; {fix}", True)
    elif not distribution.contains(point[key]):
        yield Issue(
            at,
            f"{show(at, point[key])} is outside {distribution}; a point must be in the space; "
            "change the value, or widen the space",
        )
    elif not distribution.exists(point):
        missing = ", ".join(f"{k}: {write_flow(list(v))}" for k, v in distribution.when)
        yield Issue(
            at,
            f"'{dotted((key,))}' exists only with {missing}; a point must have such a value; add "
            "one of these values to the point",
            True,
        )


_MOST_EXACT = 2**53
_MOST_STEPS = 10**7
"""Optuna accepts a value that is at most 1e-8 of a step away from a step."""
_MOST_LISTED = 10**6
"""GP holds all values of a stepped range in memory, and each suggestion looks at them."""


def range_faults(space: Mapping[str, Distribution], search: SearchConfig) -> Iterator[Issue]:
    """Refuse ranges that are too wide."""
    for key, one in space.items():
        path = ("space", key, one.name)
        for index, bound in enumerate((one.low, one.high) if isinstance(one, Int) else ()):
            if abs(bound) > _MOST_EXACT:
                yield Issue(
                    (*path, index),
                    f"{shown(bound)} is beyond 2**53 ({_MOST_EXACT}); a study keeps numbers as "
                    "floats, which have not every whole number beyond it; write a bound up to "
                    "it, or a choice",
                )
        if (
            problem := _problem(one, is_listed=_is_gp(search.sampler) and not one.when)
        ) is not None:
            yield Issue(path, problem)


def _problem(one: Distribution, *, is_listed: bool) -> str | None:
    """Return why a range is too wide; None if it is not."""
    if isinstance(one, Uniform | LogUniform | QUniform) and (what := _overflow(one)) is not None:
        return (
            f"{what} is above 1.8e308, the largest number, and values are drawn by it; write "
            f"{'closer' if isinstance(one, LogUniform) else 'smaller'} bounds"
        )
    if isinstance(one, QUniform):
        steps = max(abs(one.low), abs(one.high)) / one.step
        if steps > _MOST_STEPS:
            return (
                f"its values are up to {steps:.3g} steps of {one.step:g} away from 0; a study "
                f"keeps numbers as floats, and tells {_MOST_STEPS:,} steps apart; write a larger "
                "step, or use uniform"
            )
    values = one.num_values() if isinstance(one, Int | QUniform) and is_listed else None
    if values is not None and values > _MOST_LISTED:
        return (
            f"it has {values:,} values, and the sampler is gp, which lists the values of int, "
            f"logint and quniform: at most {_MOST_LISTED:,}; use uniform or loguniform, write "
            "larger steps, or another sampler"
        )
    return None


def _overflow(one: Uniform | LogUniform | QUniform) -> str | None:
    """Return what samplers compute of the bounds that is no finite number; None without any."""
    low, high = one.low, one.high
    if isinstance(one, LogUniform):
        return None if math.isfinite(high / low) else "high / low"
    if not math.isfinite(high - low):
        return "high - low"
    return None if math.isfinite(high + low) else "high + low"  # TPE begins with their mean


def _is_gp(sampler: str) -> bool:
    return sampler.rpartition(":")[2] in ("gp", "GPSampler")


_DRAWS = 1_000
"""Points with all priors, of which one must satisfy the constraints."""


def prior_faults(space: SearchSpace, search: SearchConfig, optimizer: str) -> Iterator[Issue]:
    """Refuse priors that no trial would be drawn around."""
    own = [key for key, one in space.distributions.items() if one.prior is not None]
    if search.sampler == "grid":
        rule = "grid tries every value in a fixed order, so that a prior would change nothing"
        fix = "write another sampler, such as tpe"
        for key in own:
            message = f"{rule}; leave it out, or {fix}"
            yield Issue(("space", key, PRIOR), message, at_key=True)
        if search.priors is not None:
            yield Issue(("search", "priors"), f"{rule}; leave it out, or {fix}", at_key=True)
    elif search.priors == "defaults":
        found = applied_priors(space.distributions, optimizer, with_defaults=True)
        if all(prior.default_of is None for prior in found):
            yield Issue(
                ("search", "priors"),
                "no searched parameter without a prior of its own has its optimizer's default in "
                "its range, so that this would change nothing; defaults are those of lr, "
                "weight_decay, betas and momentum; widen a range, write "
                "prior: VALUE beside a distribution, or leave this out",
            )


def prior_cautions(space: SearchSpace, search: SearchConfig, optimizer: str) -> list[str]:
    """Return a sentence if no allowed point has all priors, with one of the optimizers."""
    own = {key: one.prior.value for key, one in space.distributions.items() if one.prior}
    searched = space.distributions.get(OPTIMIZER)
    names = [str(own.get(OPTIMIZER, optimizer))]
    if search.priors == "defaults" and OPTIMIZER not in own and isinstance(searched, Choice):
        names = list(map(str, searched.options))
    forbidden = [name for name in names if not _may_have_all(space, search, own, name)]
    if not forbidden:
        return []
    where = f" with {', '.join(forbidden)}" if len(names) > 1 else ""
    return [
        f"search.constraints forbid the priors together{where}, so no trial has them all: trials "
        "are drawn near them only where the constraints hold; move a prior, or change the "
        "constraints"
    ]


def _may_have_all(
    space: SearchSpace, search: SearchConfig, own: Mapping[str, Any], optimizer: str
) -> bool:
    """Return whether an allowed point has all priors of an optimizer, or it has none."""
    priors = dict(own)
    if search.priors == "defaults":
        for key, one in space.distributions.items():
            default = default_prior(key, one, optimizer)
            if key not in own and default is not None:
                priors[key] = default.value
    if not priors:
        return True
    if OPTIMIZER in space.distributions:
        priors.setdefault(OPTIMIZER, optimizer)
    return space.draw(0, priors, attempts=_DRAWS) is not None
