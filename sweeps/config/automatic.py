"""What `auto` takes: `search: {sampler: auto}` and `early_stopping: {scheduler: auto}`.

A name takes the place of `auto` when a file is read, before all checks. So the stored spec names
what was taken, and no resume chooses again. The two tables follow the measurements in
docs/benchmarks.md. What must not live here: samplers, and what a rule does
(`sweeps.early_stopping`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sweeps.config.search_validators import AUTO
from sweeps.config.sections import SearchConfig
from sweeps.early_stopping.asha_promote import AshaPromote
from sweeps.early_stopping.no_stopping import NoStopping
from sweeps.early_stopping.registry import rule_class
from sweeps.errors import Issue, KeyPath, UserError
from trainable.config import BudgetConfig

_KEYS = {"search": "sampler", "early_stopping": "scheduler"}
"""The sections that may be written as `auto`, and the key that they then have."""
_STARTUP = SearchConfig.model_fields["startup_trials"].default
_LONG = 10**9


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What the choice depends on.

    Attributes:
        trials: The number of trials.
        startup: The trials that `tpe` draws at random before it learns.
        rungs: The reports at which `asha_promote` would compare trials.
        reports: The reports of a full training.
        needs_learning: Whether the section has arguments of the sampler or a warm start.
        is_population: Whether the stopping rule trains all trials side by side.
    """

    trials: int
    startup: int
    rungs: Sequence[int]
    reports: int
    needs_learning: bool
    is_population: bool


@dataclass(frozen=True)
class AutoChoice:
    """A name that `auto` took.

    Attributes:
        path: The key of the spec.
        name: The sampler or the rule.
        why: The rest of a sentence that begins with the name.
    """

    path: KeyPath
    name: str
    why: str


_Row = tuple[str, Callable[[Circumstances], bool], str]
_SAMPLERS: Sequence[_Row] = (
    (
        "tpe",
        lambda at: at.needs_learning,
        "as arguments and warm starts are for a sampler that learns",
    ),
    (
        "random",
        lambda at: at.is_population,
        "as all members of a population start before a sampler could learn",
    ),
    (
        "random",
        lambda at: at.trials <= at.startup,
        "as tpe would draw all {trials} trials at random, too (startup_trials: {startup})",
    ),
    (
        "tpe",
        lambda _: True,
        "as it has the best mean rank of eleven measured searches, with asha_promote",
    ),
)
_RULES: Sequence[_Row] = (
    (
        NoStopping.name,
        lambda at: at.trials == 1,
        "as one trial has no other to be compared with",
    ),
    (
        NoStopping.name,
        lambda at: not at.rungs,
        "as a budget of {reports} has no report so early that stopping saves anything",
    ),
    (
        AshaPromote.name,
        lambda _: True,
        "as it has the best mean rank of eleven measured searches, with tpe",
    ),
)
"""The first row that holds is taken."""


def choose_sampler(at: Circumstances) -> AutoChoice:
    """Return the sampler for a sweep."""
    return _first(_SAMPLERS, at, "search")


def choose_rule(at: Circumstances) -> AutoChoice:
    """Return the stopping rule for a sweep."""
    return _first(_RULES, at, "early_stopping")


def sentence(choices: Sequence[AutoChoice]) -> str:
    """Return what `auto` took and why, in one line."""
    return "auto takes " + "; ".join(
        f"{choice.path[-1]} {choice.name}, {choice.why}" for choice in choices
    )


def short_forms(data: dict[str, Any]) -> Iterator[KeyPath]:
    """Replace each section that is written as `auto`; yield the keys that it then has."""
    for section, key in _KEYS.items():
        if data.get(section) == AUTO:
            data[section] = {key: AUTO}
            yield (section, key)


def resolve(data: dict[str, Any]) -> list[AutoChoice]:
    """Replace each `auto` by what it takes; return what was taken.

    Args:
        data: The spec as plain data; parts of it may be wrong, which is reported elsewhere.
    """
    list(short_forms(data))
    asked = {section for section, key in _KEYS.items() if _section(data, section).get(key) == AUTO}
    if not asked:
        return []
    at = _circumstances(data)
    found = []
    for section, choose in (("search", choose_sampler), ("early_stopping", choose_rule)):
        if section in asked:
            choice = choose(at)
            data[section] = {**data[section], choice.path[-1]: choice.name}
            found.append(choice)
    return found


def refuse_another_choice(choices: Sequence[AutoChoice]) -> None:
    """Refuse `auto` in a resume.

    Raises:
        UserError: There is such a choice.
    """
    if choices:
        raise UserError(
            [
                Issue(
                    choice.path,
                    f"{AUTO} chooses once, when a sweep is created, and this sweep exists; write "
                    f"the name itself, for example {choice.name}",
                )
                for choice in choices
            ]
        )


def _first(rows: Sequence[_Row], at: Circumstances, section: str) -> AutoChoice:
    name, why = next((name, why) for name, holds, why in rows if holds(at))
    return AutoChoice(
        (section, _KEYS[section]),
        name,
        why.format(trials=at.trials, startup=at.startup, reports=at.reports),
    )


def _circumstances(data: Mapping[str, Any]) -> Circumstances:
    search, stopping = _section(data, "search"), _section(data, "early_stopping")
    reports = _reports(data.get("budget", {}))
    return Circumstances(
        trials=_whole(data.get("trials"), _LONG),
        startup=_whole(search.get("startup_trials"), _STARTUP),
        rungs=_rungs(stopping, reports),
        reports=reports,
        needs_learning=bool(search.get("arguments") or search.get("warm_start")),
        is_population=rule_class(stopping.get("scheduler")).is_population,
    )


def _rungs(stopping: Mapping[str, Any], reports: int) -> Sequence[int]:
    """Return the rungs of `asha_promote` with the parameters that the section has.

    A first rung of the user beyond the budget counts, so that the checks of the rule refuse it.
    """
    given = {key: stopping[key] for key in AshaPromote.model_fields if key in stopping}
    try:
        rule = AshaPromote.model_validate(given)
    except ValidationError:  # reported elsewhere
        rule = AshaPromote()
    if "grace_epochs" in given and rule.grace_epochs >= reports:
        return (rule.grace_epochs,)
    return rule.rungs(reports)


def _reports(budget: object) -> int:
    try:
        return BudgetConfig.model_validate(budget).reports
    except ValidationError:  # reported elsewhere
        return _LONG


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    return found if isinstance(found, Mapping) else {}


def _whole(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise
