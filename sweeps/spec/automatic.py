"""What `auto` takes: `search: {sampler: auto}` and `early_stopping: {scheduler: auto}`.

A name takes the place of `auto` when a file is read, before all checks, so that no resume of the
stored spec chooses again. The choices follow the measurements in docs/benchmarks.md. What must
not live here: samplers, and what a rule does (`sweeps.stopping`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sweeps.errors import Issue, KeyPath, UserError
from sweeps.spec.search_checks import num_points
from sweeps.spec.sections import AUTO, SearchConfig
from sweeps.stopping.asha import AshaPromote
from sweeps.stopping.registry import rule_of
from sweeps.stopping.rule import NoStopping
from trainable.config import BudgetConfig

_KEYS = {"search": "sampler", "early_stopping": "scheduler"}
"""The sections that may be written as `auto`, and the key that they then have."""
_STARTUP = SearchConfig.model_fields["startup_trials"].default
_LONG = 10**9


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What the choice depends on.

    Attributes:
        trials: The number of trials: as many as the space has points, at most.
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
    """A name that `auto` took; `why` is the rest of a sentence that begins with the name."""

    path: KeyPath
    name: str
    why: str

    def as_dict(self) -> dict[str, str]:
        """Return the choice for JSON."""
        return {"key": ".".join(map(str, self.path)), "taken": self.name, "why": self.why}


def _sampler(at: Circumstances) -> tuple[str, str]:
    """Return a sampler, and the rest of a sentence that begins with its name."""
    if at.needs_learning:
        return "tpe", "as arguments and warm starts are for a sampler that learns"
    if at.is_population:
        return "random", "as all members of a population start before a sampler could learn"
    if at.trials <= at.startup:
        return "random", (
            f"as tpe would draw all {at.trials} trials at random, too (startup_trials: "
            f"{at.startup})"
        )
    return "tpe", (
        "as it found better values than random search; gp did so, too, but takes 16 times as long "
        "for a suggestion"
    )


def _rule(at: Circumstances) -> tuple[str, str]:
    """Return a stopping rule, and the rest of a sentence that begins with its name."""
    if at.trials == 1:
        return NoStopping.name, "as one trial has no other to be compared with"
    if not at.rungs:
        return NoStopping.name, (
            f"as a budget of {at.reports} has no report so early that stopping saves anything"
        )
    return AshaPromote.name, (
        "as with tpe and with gp it has the best mean ranks of all measured searches"
    )


_CHOOSE = {"search": _sampler, "early_stopping": _rule}


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
    """Replace each `auto` by what it takes; return what was taken."""
    list(short_forms(data))
    asked = [section for section, key in _KEYS.items() if _section(data, section).get(key) == AUTO]
    if not asked:
        return []
    at = _circumstances(data)
    choices = [AutoChoice((section, _KEYS[section]), *_CHOOSE[section](at)) for section in asked]
    for section, choice in zip(asked, choices, strict=True):
        data[section] = {**data[section], _KEYS[section]: choice.name}
    return choices


def refuse_another_choice(choices: Sequence[AutoChoice]) -> None:
    """Refuse `auto` in a resume."""
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


def _circumstances(data: Mapping[str, Any]) -> Circumstances:
    search, stopping = _section(data, "search"), _section(data, "early_stopping")
    reports = _reports(data.get("budget", {}))
    startup = _whole(search.get("startup_trials"), _STARTUP)
    trials = _whole(data.get("trials"), _LONG)
    points = num_points(data, min(trials, max(startup, 1) + 1))
    points = trials if points is None else min(trials, points)
    return Circumstances(
        trials=points,
        startup=startup,
        rungs=_rungs(stopping, reports),
        reports=reports,
        needs_learning=bool(search.get("arguments") or search.get("warm_start")),
        is_population=rule_of(data).is_population,
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
