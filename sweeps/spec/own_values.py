"""The values that a sweep's file and task have without a search, as the first point to try.

With it, a sweep can say what its search gained. What must not live here: the search space
(`search_space`), and reading the task's own defaults (`trainable.check.inspect_task`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sweeps.errors import SpecError
from sweeps.formatting import shown
from sweeps.spec.search_checks import constraint_cautions, prior_cautions
from sweeps.spec.search_space import fixed_values
from sweeps.spec.spec import SweepSpec
from trainable.config import TaskConfig

_ARGUMENT = "task."
_MISSING = object()
_SHAPING = (
    "train.optimizer.name",
    "train.optimizer.lr",
    "train.optimizer.weight_decay",
    "train.batch_size",
    "train.clip.max_norm",
    "train.schedule.name",
)
"""The keys whose default may decide a result."""


class ResolvedSearch(NamedTuple):
    """The search of a new sweep."""

    spec: SweepSpec
    """The spec, with points instead of `try_first: defaults`."""
    cautions: list[str]
    """What the search cannot do as the file asks, a sentence each."""


def resolve_search(spec: SweepSpec, task_defaults: Mapping[str, Any]) -> ResolvedSearch:
    """Return a new sweep's spec with the points that `search.try_first: defaults` means.

    The points are stored with the sweep, so that a resume is not affected by later changes of the
    task. Searched arguments of the task that the file does not have get the task's defaults.
    """
    cautions = [] if spec.num_trials == spec.trials else [_few_points(spec)]
    cautions += prior_cautions(spec.search_space(), spec.search, spec.train.optimizer.name)
    cautions += constraint_cautions(spec.search_space(), spec.search)
    if spec.constraints and spec.search.sampler == "cmaes":
        cautions.append(
            "cmaes learns from values alone: it may search where trials miss the constraints, and "
            "these are only never the best; tpe, gp and nsgaii learn from constraints, too"
        )
    if spec.search.try_first != "defaults":
        return ResolvedSearch(spec, cautions)
    searched = {k.removeprefix(_ARGUMENT) for k in spec.space if k.startswith(_ARGUMENT)}
    known = spec.task.arguments
    added = {k: v for k, v in task_defaults.items() if k in searched and k not in known}
    task = TaskConfig.model_validate({**spec.task.model_dump(), **added})
    point, why_none = _own_point(spec.model_copy(update={"task": task}))
    search = spec.search.model_copy(update={"try_first": [point] if point else []})
    if why_none is not None:
        cautions.append(
            f"{why_none}, so no trial shows what the search gains; write a value in the space, or "
            "search.try_first: []"
        )
    return ResolvedSearch(spec.model_copy(update={"search": search, "task": task}), cautions)


def own_values(spec: SweepSpec) -> dict[str, Any]:
    """Return the values that a spec has beside its space, by dotted key; none if they conflict."""
    try:
        config = spec.trial_config(0, {})
    except SpecError:  # a parameter has no value but in the space
        return {}
    return fixed_values(config.train, config.task, spec.resources)


def unwritten_values(spec: SweepSpec, *, own_optimizer: bool) -> dict[str, Any]:
    """Return the values that shape each training and that neither the file nor its space has.

    Args:
        own_optimizer: The task builds its optimizer itself.
    """
    own = own_values(spec)
    return {
        key: own[key]
        for key in _SHAPING
        if key in own
        and key not in spec.space
        and not (own_optimizer and key.startswith(("train.optimizer.", "train.schedule.")))
        and not _is_written(spec, key)
    }


def _is_written(spec: SweepSpec, key: str) -> bool:
    section: Any = spec
    for name in key.split("."):
        if name not in section.model_fields_set:
            return False
        section = getattr(section, name)
    return True


def _few_points(spec: SweepSpec) -> str:
    return (
        f"trials is {spec.trials}, and the space has {spec.num_trials} points: no point is tried "
        f"twice, so the sweep ends after {spec.num_trials} trials; write trials: "
        f"{spec.num_trials}, or add values to the space"
    )


def _own_point(spec: SweepSpec) -> tuple[dict[str, Any], str | None]:
    """Return the file's own values as a point; without one, why there is none."""
    space, own = spec.search_space(), own_values(spec)
    point: dict[str, Any] = {}
    for key, distribution in space.ordered():
        if not distribution.exists(point):
            continue
        value = own.get(key, _MISSING)
        if value is _MISSING:
            return {}, f"without the search, '{key}' has no value"
        if not distribution.contains(value):
            return {}, f"without the search, {key} is {shown(value)}, outside {distribution}"
        point[key] = distribution.normalize(value)
    if not space.allows(point):
        return {}, "the values without the search violate search.constraints"
    return point, None
