"""Messages about a spec, in one form: position, key, value, rule, remedy.

    file:line:column: key.path: what is wrong (the value); the rule; what to write instead

Here are "did you mean", the sentence about a sweep file of another tool, and the translation of
pydantic's errors. What must not live here: the error classes (`sweeps.errors`), reading files
(`yaml_reader`), and the rules of single fields (beside the fields).
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from sweeps.errors import Issue, KeyPath, UserError, dotted

# Names of other tools for the same thing: for suggestions only, never accepted as keys.
ALSO_KNOWN_AS = {
    "learning_rate": "lr",
    "num_trials": "trials",
    "n_trials": "trials",
    "num_samples": "trials",
    "wd": "weight_decay",
    "grad_clip": "max_norm",
    "max_grad_norm": "max_norm",
    "warmup_steps": "warmup",
    "warmup_ratio": "warmup",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "max_steps": "steps",
    "evaluate_every": "report_every",
    "eval_every": "report_every",
    "eval_steps": "report_every",
    "val_check_interval": "report_every",
    "limit_val_batches": "val_batches",
    "max_concurrent_trials": "concurrency",
    "gpus": "gpu",
    "cpus": "cpu",
    "direction": "mode",
    "reduction_factor": "reduction",
    "grace_period": "grace_epochs",
    "grace_reports": "grace_epochs",
    "interval_reports": "interval_epochs",
    "pruner": "scheduler",
    "amp": "precision",
    "tracking_uri": "uri",
    "time_budget_s": "hours",
    "target": "value",
}

_NULL_MEANS = {
    "train.clip.max_norm": "null switches clipping off",
    "train.clip.value": "null switches it off",
    "stop.hours": "null sets no limit",
    "stop.plateau.trials": "null switches it off",
    "concurrency": "null runs as many trials at once as the resources allow",
}


_OPTUNA_KEYS = {"direction", "directions", "n_trials", "pruner", "study_name"}
_OPTUNA_SPACES = {"params", "search_space", "distributions", "parameters", "config"}
_RANGE_KEYS = {"distribution", "values", "min", "max", "low", "high", "choices"}
_OPTUNA_CALL = re.compile(r"\s*(trial\.suggest_\w+|\w+Distribution|tag|interval|range|choice)\(")
_TUNE_CALL = re.compile(r"\s*(ray\.)?tune\.\w+\(")


_OUR_KEYS = {
    "program": "task",
    "method": "search.sampler",
    "sampler": "search.sampler",
    "direction": "mode",
    "directions": "mode",
    "run_cap": "trials",
    "n_trials": "trials",
    "num_samples": "trials",
    "study_name": "name",
    "early_terminate": "early_stopping",
    "pruner": "early_stopping",
    "scheduler": "early_stopping",
    **dict.fromkeys(("param_space", *_OPTUNA_SPACES), "space"),
}
"""The keys of other tools' sweep files, and where a spec has what they say."""


def describe_other_tool(data: Mapping[str, Any]) -> list[Issue]:
    """Return issues about a sweep file of W&B, Optuna or Ray Tune; empty about other files.

    The first is about the file, each further one about a key of it that a spec writes otherwise.
    """
    if "task" in data or isinstance(data.get("space"), dict):
        return []  # a spec
    spaces = [data[key] for key in _OPTUNA_SPACES if isinstance(data.get(key), dict)]
    hydra, params = data.get("hydra"), data.get("parameters")
    if (isinstance(hydra, dict) and "sweeper" in hydra) or (spaces and _OPTUNA_KEYS & set(data)):
        tool = "Optuna"
    elif isinstance(params, dict) and ("method" in data or _has_range(params)):
        tool = "W&B"
    elif "param_space" in data or "tune_config" in data or _has_tune_call(data):
        tool = "Ray Tune"
    elif any(map(_has_range, spaces)):
        tool = "Optuna"
    else:
        return []
    whole = (
        f"is a sweep of {tool}; `sweep` reads specs of its own form; write it as "
        f'the guide "Coming from {tool}" shows by example'
    )
    theirs = [key for key in data if key in _OUR_KEYS]
    return [
        Issue((), whole),
        *(
            Issue((key,), f"is {tool}'s; a spec has `{_OUR_KEYS[key]}`", at_key=True)
            for key in theirs
        ),
    ]


def _has_range(value: object) -> bool:
    if isinstance(value, dict):
        return bool(_RANGE_KEYS & set(value)) or any(map(_has_range, value.values()))
    return isinstance(value, str) and bool(_OPTUNA_CALL.match(value))


def _has_tune_call(value: object) -> bool:
    if isinstance(value, dict):
        return "grid_search" in value or any(map(_has_tune_call, value.values()))
    return isinstance(value, str) and bool(_TUNE_CALL.match(value))


def key_path(key: str) -> tuple[str, ...]:
    """Parse the dotted form of a key; a name below `space` or `task` may itself have dots."""
    head, _, rest = key.partition(".")
    return (head, rest) if rest and head in ("space", "task") else tuple(key.split("."))


ARGUMENTS = (("train", "optimizer", "arguments"), ("train", "schedule", "arguments"))
"""Sections of a trial whose keys the user's class or function defines."""


def is_argument(path: Sequence[str | int]) -> bool:
    """Whether a path is that of one argument of an optimizer or a schedule."""
    return len(path) == 4 and tuple(path[:3]) in ARGUMENTS and bool(path[3])


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the most similar name, or None if none is similar."""
    names = list(names)
    prefixed = [n for n in names if len(n) > 1 and word.lower().startswith(n.lower())]
    if prefixed:
        return max(prefixed, key=len)
    by_lower = {name.lower(): name for name in reversed(names)}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that is a section, or None for a plain value."""
    kind = info.annotation
    # An interval is a model with a validator, but a single value to the user.
    if isinstance(kind, type) and issubclass(kind, BaseModel) and not info.metadata:
        return kind
    return None


def leaves(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Return every plain field below a section by its dotted path."""
    found: dict[str, FieldInfo] = {}
    for name, info in model.model_fields.items():
        section = section_of(info)
        if section is None:
            found[prefix + name] = info
        else:
            found |= leaves(section, f"{prefix}{name}.")
    return found


def field_at(model: type[BaseModel], path: Sequence[str | int]) -> FieldInfo | None:
    """Return the field that a path leads to, or None."""
    info: FieldInfo | None = None
    section: type[BaseModel] | None = model
    for part in path:
        if section is None or part not in section.model_fields:
            return None
        info = section.model_fields[str(part)]
        section = section_of(info)
    return info


def unknown_key(root: type[BaseModel], path: KeyPath) -> str:
    """Return the message about an unknown key.

    `training_rules` is never suggested: the program writes it, not the user.
    """
    word = str(path[-1])
    owner = field_at(root, path[:-1])
    section = root if len(path) == 1 else section_of(owner) if owner else None
    names = [name for name in section.model_fields if name != "training_rules"] if section else []
    meant = nearest(word, [*names, *(k for k, v in ALSO_KNOWN_AS.items() if v in names)])
    if meant:
        return f"unknown key '{word}'; did you mean '{ALSO_KNOWN_AS.get(meant, meant)}'?"
    everywhere = leaves(root)
    term = ALSO_KNOWN_AS.get(nearest(word, ALSO_KNOWN_AS) or "", word)
    homes = [p for p in everywhere if p.rpartition(".")[2] == term]
    if len(homes) == 1:
        where = "" if "." in homes[0] else " at the top of the file, outside any section"
        return f"unknown key '{word}' here; did you mean '{homes[0]}'{where}?"
    return f"unknown key '{word}'; valid keys: {', '.join(names)}"


_SECTION = "a section with keys of its own"
_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "model_type": _SECTION,
    "model_attributes_type": _SECTION,
    "dict_type": _SECTION,
    "tuple_type": "a list",
    "list_type": "a list",
}
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_LENGTHS = {
    "string_too_short": "must not be empty",
    "string_too_long": "holds at most {max_length} characters",
    "too_short": "takes {min_length} values",
    "too_long": "takes {max_length} values",
}
RANGE_ERRORS = frozenset(
    {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"}
)

FOLLOWS = "default_factory_not_called"
"""A default depends on another field that is wrong; the other field's error suffices."""


def expectation(kind: str, info: FieldInfo | None, ctx: Mapping[str, Any]) -> str:
    """Describe the values that a field accepts, such as `a whole number at least 1`."""
    if kind == "literal_error":
        return "one of: " + ", ".join(_options(ctx))
    bounds = _bounds(info)
    return _EXPECTED[kind] + (f" {bounds}" if bounds else "")


def describe(error: Mapping[str, Any], info: FieldInfo | None, key: str, shown: str) -> str:
    """Return the message for a pydantic error on one value: value, rule, remedy."""
    kind, ctx = error["type"], error.get("ctx", {})
    write = _example(info, key)
    if kind == "literal_error":
        options = _options(ctx)
        meant = nearest(shown.strip("'"), options)
        fix = f"did you mean '{meant}'?" if meant else "write one of them"
        return f"{shown} is not known here; valid: {', '.join(options)}; {fix}"
    if kind in RANGE_ERRORS:
        rule = _bounds(info) or ", ".join(
            f"{_BOUNDS[k]} {v:g}" for k, v in ctx.items() if k in _BOUNDS
        )
        if kind == "finite_number":
            rule = f"finite and {rule}" if rule else "finite"
        return f"{shown} is out of range; it must be {rule}{write}"
    if _EXPECTED.get(kind) is _SECTION and not (info and info.is_required()):
        write = "; write the keys below it, or leave it out for the defaults"
    if kind in _EXPECTED:
        decimal = re.fullmatch(r"'([-+]?\d+),(\d+(?:[eE][-+]?\d+)?)'", shown)
        if decimal and kind.startswith(("float", "int")):
            write = f"; did you mean {decimal[1]}.{decimal[2]}? The decimal mark is a point"
        return f"{shown} has the wrong type; expected {expectation(kind, info, ctx)}{write}"
    if kind == "value_error":
        return f"{shown} is not valid; {ctx['error']}"
    if kind in _LENGTHS:
        return f"{shown} has the wrong length; it {_LENGTHS[kind].format(**ctx)}{write}"
    return f"{shown} is not valid; {error['msg'][:1].lower()}{error['msg'][1:]}{write}"


def missing(root: type[BaseModel], path: KeyPath) -> str:
    """Return the message about a missing required key."""
    info = field_at(root, path)
    example = info.examples[0] if info and info.examples else "digits"
    return f"is missing; it has no default; add `{path[-1]}: {example}`"


def translate(
    root: type[BaseModel],
    error: ValidationError,
    data: Any,
    show: Callable[[KeyPath, object], str],
) -> list[Issue]:
    """Translate pydantic's errors into issues, with paths in `data` and complete messages."""
    faults: dict[KeyPath, Issue] = {}
    for item in error.errors(include_url=False):
        if item["type"] == FOLLOWS:
            continue
        path, value = _written_path(item["loc"], data)
        info = field_at(root, path)
        kind, reason = item["type"], item.get("ctx", {}).get("error")
        if isinstance(reason, UserError):
            found = [Issue(path + f.path, f.message, f.at_key) for f in reason.faults]
        elif kind == "missing" and isinstance(item["loc"][-1], int):
            place = item["loc"][-1] + 1
            found = [
                Issue(path, f"{show(path, value)} is too short; value {place} is missing; add it")
            ]
        elif kind == "missing":
            inner = (*path, item["loc"][-1])
            found = [Issue(inner, missing(root, inner))]
        elif kind == "extra_forbidden":
            found = [Issue(path, unknown_key(root, path), at_key=True)]
        elif kind == "value_error" and (path == () or (info and section_of(info))):
            found = [Issue(_named_field(root, path, str(reason)), str(reason))]
        else:
            found = [Issue(path, describe(item, info, dotted(path), show(path, value)))]
        for fault in found:
            # A union reports an error for each of its types; the last and widest is kept.
            faults[fault.path] = fault
    return list(faults.values())


def _written_path(loc: Sequence[str | int], data: Any) -> tuple[KeyPath, Any]:
    """Return the part of pydantic's location that exists in the data, and the value there."""
    path: KeyPath = ()
    for part in loc:
        if isinstance(data, list):
            data = dict(enumerate(data))
        if not isinstance(data, dict) or part not in data:
            break
        data = data[part]
        path = (*path, part)
    return path, data


def _named_field(root: type[BaseModel], path: KeyPath, message: str) -> KeyPath:
    """Return the path of the field whose name begins the message of a section's own check."""
    first = message.split(maxsplit=1)[0]
    return (*path, first) if field_at(root, (*path, first)) else path


def _options(ctx: Mapping[str, Any]) -> list[str]:
    return re.findall(r"'([^']*)'", str(ctx["expected"])) or [str(ctx["expected"])]


def _bounds(info: FieldInfo | None) -> str:
    if info is None:
        return ""
    parts = [
        f"{word} {getattr(rule, name):g}"
        for rule in [*info.metadata, *_union_metadata(info.annotation)]
        for name, word in _BOUNDS.items()
        if isinstance(getattr(rule, name, None), int | float)
    ]
    return " and ".join(parts)


def _union_metadata(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return []
    return [m for arm in typing.get_args(annotation) for m in getattr(arm, "__metadata__", ())]


def _example(info: FieldInfo | None, key: str) -> str:
    if info is None:
        return ""
    example = info.examples[0] if info.examples else info.get_default(call_default_factory=False)
    null = f" ({_NULL_MEANS[key]})" if key in _NULL_MEANS else ""
    if isinstance(example, bool):
        return f"; write {str(example).lower()}{null}"
    if isinstance(example, int | float | str) and example != "":
        return f"; write for example {example}{null}"
    return f"; {_NULL_MEANS[key]}" if null else ""
