"""Checks across the fields and sections of a spec, and of arguments, which no model knows.

They work on plain data, so that they also run if another part is wrong, and all problems are
reported in one pass. What must not live here: rules of one field or section, which are beside the
field, and whether a class takes an argument (`trainable.optim`).
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from redaction.secrets import is_secret
from sweeps.errors import Issue, KeyPath
from sweeps.formatting import shown
from sweeps.spec.error_messages import (
    ARGUMENTS,
    FOLLOWS,
    RANGE_ERRORS,
    describe,
    expectation,
    field_at,
    is_argument,
    nearest,
    section_of,
    unknown_key,
)
from sweeps.spec.search_checks import search_faults, sound_constraints
from sweeps.spec.search_space import UNFIT, SearchSpace, mutable, searchable_fields
from sweeps.spec.searched_workers import WORKERS, workers_faults
from sweeps.spec.sections import CREDENTIALS, LONGEST_KEY, ResourcesConfig
from sweeps.spec.space import Choice, Distribution, QUniform, Scalar, as_option, is_number
from sweeps.spec.yaml_scalars import write_flow, written
from sweeps.stopping.registry import DEFAULT_RULE, RULES, WITHOUT_SECTION, rule_of
from sweeps.stopping.rule import StoppingRule
from trainable.config import BudgetConfig, TrainConfig
from trainable.store.notes import PREFIX

_LEAST_SHARE = 0.0001
"""Ray counts CPUs and GPUs in ten-thousandths."""
_ONE_METRIC_SAMPLERS = {"cmaes"}

Show = Callable[[KeyPath, object], str]


def cross_field_checks(
    root: type[BaseModel],
    data: Mapping[str, Any],
    space: Mapping[str, Distribution | None],
    show: Show = lambda _path, value: written(value),
    drawn: int = 0,
) -> Iterator[Issue]:
    """Check the fields of a spec against each other."""
    yield from _objective_faults(data)
    yield from _test_metric_faults(data)
    yield from _constraint_faults(data)
    yield from _early_stopping_faults(data, space)
    yield from _repeats_faults(data)
    yield from _evaluation_faults(data, space)
    yield from _share_faults(data, show)
    yield from _rate_faults(data, show)
    yield from argument_faults(data)
    sound = sound_constraints(data, space)
    for key in space:
        yield from _space_faults(root, key, space, data.get(_section_of(key)), sound, show)
    yield from workers_faults(data, space)
    yield from search_faults(data, space, show, drawn)


def _test_metric_faults(data: Mapping[str, Any]) -> Iterator[Issue]:
    """Refuse a metric on test data: nothing may be chosen by it."""
    metric, limited = data.get("metric"), data.get("constraints")
    named: list[tuple[KeyPath, object]] = [(("metric",), metric)]
    if isinstance(metric, list):
        named = [(("metric", index), one) for index, one in enumerate(metric)]
    if isinstance(limited, dict):
        named += [(("constraints", one), one) for one in limited]
    for path, one in named:
        if isinstance(one, str) and one.startswith(PREFIX):
            yield Issue(
                path,
                f"{written(one)} is measured on test data, which must choose neither a trial nor "
                f"a checkpoint; name a metric on validation data, such as "
                f"val/{one.removeprefix(PREFIX)}",
            )


def _objective_faults(data: Mapping[str, Any]) -> Iterator[Issue]:
    """Check that each metric has a mode, and that several metrics fit the rest of the spec."""
    metric, mode = data.get("metric"), data.get("mode")
    if not isinstance(metric, str | list) or not isinstance(mode, str | list):
        return
    count, modes = (len(one) if isinstance(one, list) else 1 for one in (metric, mode))
    if count != modes:
        each = ", ".join((["min", "max"] * count)[:count])
        yield Issue(
            ("mode",),
            f"{modes} for {count} {'metrics' if count > 1 else 'metric'}; each metric has a mode "
            f"of its own; write for example {f'[{each}]' if count > 1 else 'min'}",
        )
    if not isinstance(metric, list):
        return
    for index, name in enumerate(metric):
        if name in metric[:index]:
            yield Issue(("metric", index), f"{written(name)} is listed twice; list each one once")
    rule, sampler = rule_of(data), _at(data, ("search", "sampler"))
    *able, last = (name for name, one in RULES.items() if not one.needs_one_metric)
    for path, takes_one, does, fix in (
        (
            ("early_stopping", "scheduler"),
            rule.needs_one_metric,
            f"{rule.name} compares trials by",
            f"write {', '.join(able)} or {last}, or",
        ),
        (
            ("stop", "value"),
            _at(data, ("stop", "value")) is not None,
            "this criterion watches",
            "leave it out, or write",
        ),
        (
            ("stop", "plateau", "trials"),
            _at(data, ("stop", "plateau", "trials")) is not None,
            "this criterion watches",
            "leave it out, or write",
        ),
        (
            ("search", "warm_start"),
            bool(_at(data, ("search", "warm_start"))),
            "a warm start works with",
            "leave it out, or write",
        ),
        (
            ("search", "sampler"),
            sampler in _ONE_METRIC_SAMPLERS,
            f"{sampler} learns from",
            "write tpe or gp, or",
        ),
    ):
        if takes_one:
            message = f"{does} one metric, and there are {count}; {fix} a single metric"
            yield Issue(path, message)


def _constraint_faults(data: Mapping[str, Any]) -> Iterator[Issue]:
    """Refuse constraints beside trials that have no values of the limited metrics."""
    if data.get("constraints") and _at(data, ("search", "warm_start")):
        yield Issue(
            ("search", "warm_start"),
            "a sweep keeps only its own limited metrics, so which of the earlier trials are "
            "feasible is not known; leave it out, or leave constraints out",
        )


def _early_stopping_faults(
    data: Mapping[str, Any], space: Mapping[str, Distribution | None]
) -> Iterator[Issue]:
    rule, budget = rule_of(data), _valid_budget(data.get("budget", {}))
    if rule.is_population:
        yield from _population_faults(data, space, rule)
    if (key := rule.first_epoch_key) is None or budget is None:
        return
    first = _at(data, ("early_stopping", key))
    if first is None:
        first = rule.model_fields[key].default
    if not isinstance(first, int) or first < budget.reports:
        return
    name = "budget.epochs" if budget.report_word == "epoch" else "the budget's reports"
    word, last = budget.report_word, budget.reports
    if rule.is_population:
        why = f"{rule.name} compares trials before their last {word}"
        fix = f"write a smaller interval, or more {word}s"
    else:
        why = f"early stopping needs a rung before the last {word}"
        fix = f"write a number from 1 to {last - 1}" if last > 1 else f"give {name} 2 or more"
        fix += f", or {'' if last > 1 else 'write '}scheduler: {WITHOUT_SECTION.name}"
    yield Issue(("early_stopping", key), f"{first} is not below {name} ({last}); {why}; {fix}")


def _valid_budget(data: object) -> BudgetConfig | None:
    try:
        return BudgetConfig.model_validate(data)
    except ValidationError:  # reported elsewhere
        return None


def _evaluation_faults(
    data: Mapping[str, Any], space: Mapping[str, Distribution | None]
) -> Iterator[Issue]:
    """Check that all trials are evaluated on the same samples."""
    if (batches := _at(data, ("budget", "val_batches"))) and "train.batch_size" in space:
        yield Issue(
            ("budget", "val_batches"),
            f"{batches} batches have other samples in each trial, because "
            "train.batch_size is searched; trials are compared on the same samples; remove it, "
            "or give the task fewer validation samples",
        )


def _population_faults(
    data: Mapping[str, Any], space: Mapping[str, Distribution | None], rule: type[StoppingRule]
) -> Iterator[Issue]:
    """Check what a population needs: members, parameters to search and to keep equal, links."""
    trials, scheduler, seeds = data.get("trials"), rule.name, _num_seeds(data)
    if _at(data, ("early_stopping", "exempt")):
        yield Issue(
            ("early_stopping", "exempt"),
            f"{scheduler} stops no trial, so that none can be exempt; leave it out",
        )
    if isinstance(trials, int) and trials < 2:
        yield Issue(
            ("trials",),
            f"{trials} trials are not a population; {scheduler} compares trials with each other; "
            "write 4 or more",
        )
    for key in UNFIT:
        if key in space:
            yield Issue(
                ("space", key),
                f"{key} cannot be searched by {scheduler}: trials copy each other's weights, so a "
                "step must be the same in all of them; set it in the file itself",
                at_key=True,
            )
    sound = {key: one for key, one in space.items() if one is not None}
    if len(sound) == len(space) and not mutable(SearchSpace(sound)):
        yield Issue(
            ("early_stopping", "scheduler"),
            f"{scheduler} changes parameters below train.optimizer. and train.clip. while trials "
            "train, and the space has none; search for example train.optimizer.lr, or write "
            f"scheduler: {DEFAULT_RULE.name}",
        )
    if seeds > 1:
        yield Issue(
            ("repeats",),
            f"the members of a population ({scheduler}) copy checkpoints from each other, and "
            f"{seeds} seeds of one member would be {seeds} members; leave repeats out, or write "
            "another scheduler",
        )
    if _at(data, ("storage", "checkpoints")) is not None:
        yield Issue(
            ("storage", "checkpoints"),
            f"{scheduler} copies checkpoints between trials as hard links, and an object store "
            "has no links; leave it out, or write another scheduler",
        )


def _repeats_faults(data: Mapping[str, Any]) -> Iterator[Issue]:
    """Refuse several configurations that would all be the same, each with several seeds."""
    trials, seeds = data.get("trials"), _num_seeds(data)
    if seeds > 1 and not data.get("space") and isinstance(trials, int) and trials > 1:
        yield Issue(
            ("repeats",),
            f"the space is empty, and all {trials} trials would be the same configuration with "
            f"the same {seeds} seeds; write trials: 1, or leave repeats out: trials without a "
            "space differ in their seeds",
        )
    repeats, task, space = (data.get(key) for key in ("repeats", "task", "space"))
    if isinstance(repeats, dict) and repeats.get("folds") is not None:
        for name in ("fold", "folds"):
            if isinstance(task, dict) and name in task:
                yield Issue(("task", name), _FOLD_IS_GIVEN, at_key=True)
            if isinstance(space, dict) and f"task.{name}" in space:
                yield Issue(("space", f"task.{name}"), _FOLD_IS_GIVEN, at_key=True)


_FOLD_IS_GIVEN = "is decided by repeats.folds, for each seed anew; leave it out"


def _num_seeds(data: Mapping[str, Any]) -> int:
    """Return with how many seeds each configuration trains; 1 if that is wrong."""
    repeats = data.get("repeats")
    seeds = repeats
    if isinstance(repeats, dict):
        seeds = repeats.get("folds") or repeats.get("seeds")
    return seeds if isinstance(seeds, int) else 1


def _share_faults(data: Mapping[str, Any], show: Show) -> Iterator[Issue]:
    """Refuse a share of a CPU or a GPU below Ray's unit."""
    for path in (("resources", "cpu"), ("resources", "gpu")):
        if is_number(value := _at(data, path)) and 0 < value < _LEAST_SHARE:
            yield Issue(
                path,
                f"{show(path, value)} is too small; Ray counts in ten-thousandths; write "
                f"{_LEAST_SHARE:g} or more",
            )


def _rate_faults(data: Mapping[str, Any], show: Show) -> Iterator[Issue]:
    """Refuse decay rates that no optimizer accepts."""
    betas = _at(data, ("train", "optimizer", "betas"))
    for index, rate in enumerate(betas if isinstance(betas, list | tuple) else ()):
        path = ("train", "optimizer", "betas", index)
        if is_number(rate) and not 0 <= rate < 1:
            yield Issue(
                path,
                f"{show(path, rate)} is not a decay rate; it must be at least 0 and below 1; "
                "write for example 0.9",
            )


def _space_faults(
    root: type[BaseModel],
    key: str,
    space: Mapping[str, Distribution | None],
    section: object,
    sound: SearchSpace,
    show: Show,
) -> Iterator[Issue]:
    path = ("space", key)
    if key.startswith("task."):
        argument = key.removeprefix("task.")
        if argument == "name" or not argument or "." in argument:
            yield Issue(
                path,
                f"'{key}' cannot be searched; a space varies arguments of one task; "
                "write task.ARGUMENT",
                True,
            )
        return
    if is_argument(tuple(key.split("."))):
        yield from reserved_faults(path, key)
        return
    fields = searchable_fields()
    if key.endswith(".arguments"):
        yield Issue(
            path,
            f"'{key}' holds several arguments; a space varies one of them; write {key}.NAME",
            at_key=True,
        )
        return
    if key not in fields:
        yield Issue(path, _no_such_parameter(root, key, list(fields)), at_key=True)
        return
    distribution = space[key]
    if distribution is None:
        return
    head, *parts = key.split(".")
    known = {other: values[0] for other, values in _conditions(distribution, space)}
    section = copy.deepcopy(section) if isinstance(section, dict) else {}
    for other, first in known.items():
        if _section_of(other) == head:
            set_path(section, other.split(".")[1:], first)
    before = {loc for loc, _ in _errors_in(head, section)}
    for index, value in distribution.boundary_values():
        at = (*path, distribution.name) if index is None else (*path, distribution.name, index)
        tried = copy.deepcopy(section)
        value = distribution.configured(value)
        if not set_path(tried, parts, value):
            return
        errors = _errors_in(head, tried)
        # A union reports once for each of its arms; the last one is the widest.
        if own := [error for loc, error in errors if loc[: len(parts)] == (*parts,)][-1:]:
            error, info = own[0], fields[key]
            by_range = error["type"] in RANGE_ERRORS | {"value_error"}
            if not by_range and not isinstance(distribution, Choice):
                message = _wrong_kind(distribution, key, error, info)
                yield Issue((*path, distribution.name), message, at_key=True)
                return
            text = shown(value) if index is None else show(at, value)
            yield Issue(at, describe(error, info, key, text))
            continue
        point = {**known, key: as_option(value)}
        open_ones = space.keys() - point.keys()  # parameters with any value
        if not sound.allows(point) or any(
            key in one.keys and open_ones & set(one.keys) for one in sound.constraints
        ):
            continue
        # An error across fields counts if it is new, and no other searched field can avoid it.
        for loc, error in errors:
            message = str(error.get("ctx", {}).get("error", ""))
            named = {".".join(map(str, (head, *loc, w))) for w in re.findall(r"\w+", message)}
            others = space.keys() & named - {key}
            if loc not in before and not any(_may_exist(one, point, space) for one in others):
                yield Issue(at, message)
                break


def _conditions(
    distribution: Distribution | None, space: Mapping[str, Distribution | None]
) -> Iterator[tuple[str, tuple[Scalar, ...]]]:
    """Yield all conditions under which a parameter exists, also the indirect ones."""
    waiting, seen = list(distribution.when) if distribution else [], set()
    while waiting:
        other, values = waiting.pop()
        if other not in seen and (parent := space.get(other)) is not None:
            seen.add(other)
            waiting += parent.when
            yield other, values


def _may_exist(
    key: str, known: Mapping[str, Scalar], space: Mapping[str, Distribution | None]
) -> bool:
    """Return whether a parameter may exist in a trial that has these values."""
    return all(
        other not in known or known[other] in values
        for other, values in _conditions(space[key], space)
    )


def _section_of(key: str) -> str:
    return key.partition(".")[0]


def _errors_in(head: str, section: dict[str, Any]) -> list[tuple[tuple[str | int, ...], Any]]:
    try:
        (TrainConfig if head == "train" else ResourcesConfig).model_validate(section)
    except ValidationError as error:
        items = error.errors(include_url=False)
        return [(item["loc"], item) for item in items if item["type"] != FOLLOWS]
    return []


def _wrong_kind(distribution: Distribution, key: str, error: Any, info: Any) -> str:
    takes = expectation(error["type"], info, error.get("ctx", {}))
    whole = takes.startswith("a whole number")
    fix = "use choice: [...]"
    if whole:
        fix = "use int or logint"
        if isinstance(distribution, QUniform):
            low, high, step = map(int, distribution.arguments())
            exact = [low, high, step] == distribution.arguments()
            fix = f"write {{int: [{low}, {high}], step: {step}}}" if exact else fix
    return f"{distribution.name} draws {distribution.draws}; {key} takes {takes}; {fix}"


def _no_such_parameter(root: type[BaseModel], key: str, fields: Sequence[str]) -> str:
    inside = [name for name in fields if name.startswith(f"{key}.")]
    if inside:
        some = ", ".join(inside[:8]) + (", ..." if len(inside) > 8 else "")
        return (
            f"'{key}' is a section; a space names single fields by their dotted path; "
            f"write one of: {some}"
        )
    if not key.startswith("train.") and field_at(root, key.split(".")) is not None:
        return (
            f"'{key}' cannot be searched; a space varies keys below train. and task., and "
            f"{WORKERS}; set it in the file itself"
        )
    ends = [name for name in fields if name.endswith(f".{key}")]
    meant = ends[0] if len(ends) == 1 else nearest(key, fields)
    if meant is None:
        guess = unknown_key(root, (*_known_head(root, key), key.split(".")[-1]))
        return f"'{key}' names no field of the spec; {guess.partition('; ')[2]}"
    return f"'{key}' names no field of the spec; did you mean '{meant}'?"


def _known_head(root: type[BaseModel], key: str) -> tuple[str, ...]:
    path = tuple(key.split("."))[:-1]
    while path and ((info := field_at(root, path)) is None or section_of(info) is None):
        path = path[:-1]
    return path


def set_path(data: dict[str, Any], path: Sequence[str], value: object) -> bool:
    """Set a value by its path; return False if the path goes through a single value."""
    for part in path[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            return False
    data[path[-1]] = value
    return True


_SAMPLER = ("search", "arguments")
LONGEST_VALUE = 6000  # characters; the tracking store's limit for a parameter


def argument_faults(data: Mapping[str, Any]) -> Iterator[Issue]:
    """Check the arguments of task, sampler, optimizer and schedule, and the keys of the space."""
    task = data.get("task")
    if isinstance(task, dict):
        yield from _form_faults(task, ("task",))
    yield from _secret_faults(task, ("task",))
    yield from _secret_faults(data.get("space"), ("space",))
    yield from _secret_faults(_at(data, _SAMPLER), _SAMPLER)
    for place in ARGUMENTS:
        if isinstance(given := _at(data, place), dict):
            yield from _form_faults(given, place)
            yield from _secret_faults(given, place)


def reserved_faults(path: KeyPath, key: str) -> Iterator[Issue]:
    """Refuse to search an argument that has a key of its own, or none."""
    section, _, name = key.rpartition(".arguments.")
    if section == "train.optimizer" and name in ("lr", "params"):
        yield Issue(
            path,
            f"'{key}' is no argument; the learning rate is train.optimizer.lr, and the parameters "
            "come from the task; write train.optimizer.lr, or remove it",
            at_key=True,
        )


def _at(data: object, path: Sequence[str]) -> object:
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def _form_faults(given: Mapping[str, Any], section: tuple[str, ...]) -> Iterator[Issue]:
    """Check arguments, which have no model: the ledger and tracking must accept them."""
    before = len(".".join(section)) + 1
    for key, argument in given.items():
        path: KeyPath = (*section, key)
        if len(key) + before > LONGEST_KEY:
            yield Issue(
                path,
                f"the key has {len(key)} characters; tracking accepts at most "
                f"{LONGEST_KEY - before}; choose a shorter one",
                True,
            )
        if len(text := write_flow(argument)) > LONGEST_VALUE:
            yield Issue(
                path,
                f"the value has {len(text)} characters; tracking accepts at most "
                f"{LONGEST_VALUE}; keep data in a file and name the file",
            )
        for place, value in _scalars(argument, path):
            if isinstance(value, float) and not math.isfinite(value):
                yield Issue(
                    place,
                    f"{write_flow(value)} is not finite; numbers in a spec are "
                    "finite; write a number, or null",
                )


def _secret_faults(value: object, path: KeyPath) -> Iterator[Issue]:
    """Refuse secrets in the parts whose keys the user chooses."""
    rule = "a spec is stored and tracked unencrypted; let the task read"
    if isinstance(value, str) and CREDENTIALS.search(value):
        yield Issue(path, f"the address holds credentials; {rule} them from the environment")
    for key, inner in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        name = str(key).rpartition(".")[2]
        if is_secret(name) and not isinstance(inner, bool | None):
            yield Issue(
                (*path, key),
                f"{name} looks like a secret; {rule} it from the environment, or give it another "
                "name",
                at_key=True,
            )
        else:
            yield from _secret_faults(inner, (*path, key))


def _scalars(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _scalars(inner, (*path, key))
    else:
        yield path, value
