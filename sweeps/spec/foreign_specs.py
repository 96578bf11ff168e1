"""Recognise a sweep file of W&B, Optuna or Ray Tune, and write the equivalent spec.

The files themselves are never run: a user saves the equivalent, and corrects what only they know.
What must not live here: single distributions (`foreign_space`), and reading files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from redaction.escapes import printable
from redaction.secrets import redact
from sweeps.errors import SpecError
from sweeps.spec.cross_checks import set_path
from sweeps.spec.document import Document
from sweeps.spec.error_messages import ALSO_KNOWN_AS, key_path, leaves
from sweeps.spec.foreign_space import (
    Translated,
    is_searched,
    parse_call,
    translate_distribution,
)
from sweeps.spec.yaml_scalars import write_flow, write_key
from trainable.config import TrainConfig

_TASK = "my_task:MyTask"
_FIRST = ("name", "task", "metric", "mode", "trials", "seed", "concurrency", "budget")
"""The keys that stand before the space."""
_LAST = ("search", "early_stopping", "stop")
"""The keys that stand after it."""
_TRIALS = 20
"""How many trials a file without a limit gets."""
_SAMPLERS = {
    "tpe": ("bayes", "tpe", "optuna", "hyperopt", "bohb", "bayesopt", "ax", "hebo"),
    "gp": ("gp", "botorch"),
    "cmaes": ("cmaes", "cmaessampler", "nevergrad"),
    "nsgaii": ("nsgaii", "nsgaiii"),
    "qmc": ("qmc", "sobol"),
    "grid": ("grid", "bruteforce"),
    "random": ("random", "basicvariant", "variantgenerator"),
}
"""Samplers, and what other tools call them."""
_RULES = {
    "asha": ("asha", "asynchyperband", "successivehalving", "async_hyperband"),
    "median": ("median",),
    "pbt": ("pbt", "populationbased"),
    "pb2": ("pb2",),
    "hyperband": ("hyperband",),
}
"""Stopping rules, and what other tools call them; the first that is found in a name counts."""
_GRACE = ("grace_epochs", ("min_iter", "grace_period", "min_resource", "n_warmup_steps"), 1)
_REDUCTION = ("reduction", ("eta", "reduction_factor"), 2)
_RULE_OPTIONS = {
    "asha": (_GRACE, _REDUCTION),
    "hyperband": (_GRACE, _REDUCTION),
    "median": (_GRACE, ("min_trials", ("min_samples_required", "n_startup_trials"), 1)),
}
"""Parameters of stopping rules: our name, names of other tools, the least value."""
_WANDB_KEYS = (
    *("program", "method", "metric", "parameters", "early_terminate", "run_cap", "name"),
    *("description", "project", "entity"),
)
"""Keys of W&B that are translated, or that concern W&B alone."""
_OPTIMIZER = ("optimizer", "optim", "opt", "optimizer_name", "optimizer.name")
_NO_ALIAS = ("name", "value", "every")
"""Last parts of keys below `train` that a parameter of another tool hardly means."""


@dataclass
class ForeignSpec:
    """A sweep file of another tool, translated."""

    tool: str
    """The tool's name in messages."""
    data: dict[str, Any]
    """The spec, without `space`."""
    space: dict[str, Any] = field(default_factory=dict)
    todo: list[str] = field(default_factory=list)
    """What only the user knows."""
    notes: list[str] = field(default_factory=list)
    """What the translation does not keep."""

    @classmethod
    def of(cls, tool: str, name: str) -> ForeignSpec:
        """Return a spec with the required keys and nothing else."""
        task = {"name": _TASK}
        data = {"name": name, "task": task, "metric": "val/loss", "mode": "min", "trials": None}
        return cls(tool, data)

    @property
    def sampler(self) -> str | None:
        """The sampler, once it is known."""
        found: str | None = self.data.get("search", {}).get("sampler")
        return found

    def set(self, path: str, value: Any) -> None:
        """Set a key of the spec."""
        set_path(self.data, key_path(path), value)

    def to_yaml(self) -> str:
        """Return the spec as YAML, its keys in the usual order."""
        data = {**self.data, "trials": self.data["trials"] or _TRIALS}
        if set(data["task"]) == {"name"}:
            data["task"] = data["task"]["name"]
        lines = [f"{key}: {write_flow(data[key])}\n" for key in _FIRST if key in data]
        if self.space:
            lines.append("space:\n")
            lines += [
                f"  {write_key(key)}: {write_flow(one)}\n" for key, one in self.space.items()
            ]
        rest = (*_LAST, *(key for key in data if key not in (*_FIRST, *_LAST)))
        return "".join(
            [*lines, *(f"{key}: {write_flow(data[key])}\n" for key in rest if key in data)]
        )

    def add(self, name: str, value: Any) -> None:
        """Add a parameter: to the space if it is searched, else as a fixed value."""
        path = _path_of(name)
        found = translate_distribution(value)
        if found is None and isinstance(value, str) and re.search(r"sample_from|lambda", value):
            self.notes.append(f"{path}: a function; write it with `choice` and `when`")
            return
        if found is None:
            found = Translated(value, fixed=True)
        if found.note:
            self.notes.append(f"{path}: {found.note}")
        if found.is_grid:
            self.set("search.sampler", "grid")
        data = found.data
        if path == "train.optimizer.name":
            data = _lowered(data)
        if found.fixed:
            self.set(path, data)
        elif path.startswith(("train.", "task.")):
            self.space[path] = data
        else:
            self.notes.append(f"{path}: the same in all trials; its last value is used")
            self.set(path, next(iter(data.values()))[-1])


def refuse_foreign(doc: Document, check: Callable[[str, str], object]) -> None:
    """Refuse a sweep file of another tool with the equivalent spec; do nothing for other files.

    Args:
        doc: The file.
        check: Checks the text of a spec with a file's name; raises `SpecError`.

    Raises:
        SpecError: It is such a file.
    """
    found = recognise(doc.data, PurePath(doc.label).stem)
    if found is None:
        return
    text, file = found.to_yaml(), f"{found.data['name']}.yaml"
    todo = [*found.todo]
    if found.data["task"]["name"] == _TASK:
        todo.append("task: name your training code, a task or a loop")
    try:
        check(text, file)
    except SpecError as error:
        todo += [str(problem) for problem in error.problems]
    lines = [
        f"{redact(doc.label)}: is a sweep of {found.tool}; `sweep` reads specs of its own form; "
        f"below is the equivalent; save it as {file}, then: sweep check {file}",
        "",
        *map(redact, text.splitlines()),
        *(["", "complete it:", *todo] if todo else []),
        *(["", "not translated:", *map(redact, found.notes)] if found.notes else []),
    ]
    raise _ForeignError("\n".join(map(printable, lines)))


class _ForeignError(SpecError):
    """A file of another tool; its message has several lines."""

    def __init__(self, message: str) -> None:
        super().__init__([])
        self.args = (message,)


def recognise(data: Mapping[str, Any], file: str = "sweep") -> ForeignSpec | None:
    """Return the translation of another tool's sweep file.

    Args:
        data: The content of the file.
        file: The file's name without its ending, which the sweep's name must not be.

    Returns:
        None if it is no such file, or if its values have other types than the tool expects.
    """
    try:
        return _translated(data, file)
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError):
        return None


def _translated(data: Mapping[str, Any], file: str) -> ForeignSpec | None:
    if "task" in data or isinstance(data.get("space"), dict):
        return None  # a spec; single foreign distributions in it are refused where they stand
    params = data.get("parameters")
    is_optuna = any(key in data for key in ("direction", "directions", "n_trials", "pruner"))
    if isinstance(params, dict) and ("method" in data or (_has_space(params) and not is_optuna)):
        return _of_wandb(data, _name(data, file, "wandb"))
    if "param_space" in data or "tune_config" in data or _has_tune_calls(data):
        return _of_ray(data, _name(data, file, "ray_tune"))
    hydra = data.get("hydra")
    study = hydra.get("sweeper") if isinstance(hydra, dict) else data
    if not isinstance(study, dict):
        return None
    params = next((study[key] for key in _OPTUNA_SPACES if isinstance(study.get(key), dict)), {})
    if not _has_space(params):
        return None
    return _of_optuna(study, params, _name(study, file, "optuna"))


_OPTUNA_SPACES = ("params", "search_space", "distributions", "parameters", "config")


def _of_wandb(data: Mapping[str, Any], name: str) -> ForeignSpec:
    found = ForeignSpec.of("W&B", name)
    module = re.fullmatch(
        r"(?:\./)?((?:[A-Za-z_]\w*/)*[A-Za-z_]\w*)\.py", str(data.get("program"))
    )
    if module:
        loop = f"{module[1].replace('/', '.')}:run"
        found.set("task.name", loop)
        found.todo.append(
            f"task: {loop} must be a loop that yields its metrics; or name another task"
        )
    metric = data.get("metric")
    if isinstance(metric, dict):
        found.data["metric"] = metric.get("name", found.data["metric"])
        found.data["mode"] = _mode(metric.get("goal"))
        if "target" in metric:
            found.set("stop.value", metric["target"])
    found.set("search.sampler", _known(data.get("method"), _SAMPLERS, "random"))
    for key, value in _flat(data["parameters"]):
        found.add(key, value)
    rule = data.get("early_terminate")
    if isinstance(rule, dict):
        if "min_iter" not in rule and _is_whole(rule.get("max_iter")) and _is_whole(rule.get("s")):
            eta = int(rule.get("eta", 3))
            rule = {**rule, "min_iter": rule["max_iter"] // max(1, eta) ** min(rule["s"], 64)}
        _add_rule(found, {**rule, "type": "asha"})  # W&B's Hyperband decides as asha does
    _add_trials(found, data.get("run_cap"))
    found.notes += [f"{key}: has no equivalent" for key in data if key not in _WANDB_KEYS]
    return found


def _of_ray(data: Mapping[str, Any], name: str) -> ForeignSpec:
    found = ForeignSpec.of("Ray Tune", name)
    config = data.get("tune_config")
    config = {**data, **config} if isinstance(config, dict) else data
    found.data["metric"] = config.get("metric", found.data["metric"])
    found.data["mode"] = _mode(config.get("mode"))
    space = data.get("param_space", data.get("config"))
    if not isinstance(space, dict):
        space = {key: value for key, value in data.items() if is_searched(value)}
    for key, value in _flat(space):
        found.add(key.removeprefix("train_loop_config."), value)
    fallback = found.sampler or "random"  # Ray Tune draws at random by itself
    found.set("search.sampler", _known(config.get("search_alg"), _SAMPLERS, fallback))
    _add_rule(found, config.get("scheduler"))
    # With grid_search, num_samples is how often the whole grid is run.
    _add_trials(found, None if found.sampler == "grid" else config.get("num_samples"))
    if _is_whole(config.get("max_concurrent_trials")):
        found.set("concurrency", config["max_concurrent_trials"])
    if isinstance(seconds := config.get("time_budget_s"), int | float):
        found.set("stop.hours", float(f"{seconds / 3600:.4g}"))
    return found


def _of_optuna(study: Mapping[str, Any], params: Mapping[str, Any], name: str) -> ForeignSpec:
    found = ForeignSpec.of("Optuna", name)
    direction = study.get("directions", study.get("direction"))
    modes = [_mode(one) for one in direction] if isinstance(direction, list) else []
    if len(modes) > 1:
        found.data["mode"] = modes
        found.todo.append("metric: name the metrics in the order of the directions")
        found.data["metric"] = ["val/loss", *(f"metric_{n + 1}" for n in range(1, len(modes)))]
    else:
        found.data["mode"] = modes[0] if modes else _mode(direction)
        found.data["metric"] = study.get("metric", found.data["metric"])
    sampler = study.get("sampler")
    found.set("search.sampler", _known(sampler, _SAMPLERS, "tpe"))
    for key, value in _flat(params):
        found.add(key, value)
    options = _options(sampler)
    for path, value in {
        "search.startup_trials": options.get("n_startup_trials"),
        "seed": options.get("seed"),
        "concurrency": study.get("n_jobs"),
    }.items():
        if isinstance(value, int) and value >= 0 and (path, value) != ("concurrency", 0):
            found.set(path, value)
    _add_rule(found, study.get("pruner"))
    _add_trials(found, study.get("n_trials", study.get("num_trials")))
    return found


def _add_trials(found: ForeignSpec, count: object) -> None:
    """Set the number of trials: as in the file, or all points of a grid, or a beginning."""
    options = [data.get("choice") for data in found.space.values()]
    if _is_whole(count):
        found.data["trials"] = count
    elif found.sampler == "grid" and all(options):
        found.data["trials"] = math.prod(map(len, options))
    else:
        found.data["trials"] = _TRIALS
        found.notes.append(f"trials: the file has no limit; {_TRIALS} is a beginning")


def _add_rule(found: ForeignSpec, rule: object) -> None:
    """Set the stopping rule, and its parameters that have an equivalent."""
    scheduler = _known(rule, _RULES, "")
    if not scheduler:
        return
    found.set("early_stopping.scheduler", scheduler)
    options = _options(rule)
    for key, names, least in _RULE_OPTIONS.get(scheduler, ()):
        value = next((options[name] for name in names if _is_whole(options.get(name))), None)
        if value is not None:
            found.set(f"early_stopping.{key}", max(least, value))


def _options(value: object) -> Mapping[str, Any]:
    """Return the parameters of a scheduler or sampler, which is a mapping or a call."""
    call = parse_call(value) if isinstance(value, str) else None
    if call is not None:
        return call.named
    return value if isinstance(value, dict) else {}


def _known(value: object, table: Mapping[str, tuple[str, ...]], fallback: str) -> str:
    """Return what a name of another tool is called here.

    Args:
        value: The name, a class, a call, or a mapping with one of these as `type` or `_target_`.
        table: Our names, and parts of other names.
        fallback: For a name that is not in the table.
    """
    if isinstance(value, dict):
        value = next((value[key] for key in ("_target_", "type", "name") if key in value), None)
    if not isinstance(value, str):
        return fallback
    word = value.partition("(")[0].rpartition(".")[2].lower()
    return next((ours for ours, names in table.items() if any(n in word for n in names)), fallback)


def _path_of(name: str) -> str:
    """Return the key of a spec that a parameter of another tool means; else a task's argument."""
    if name.lower() in _OPTIMIZER:
        return "train.optimizer.name"
    last = name.rpartition(".")[2]
    word = ALSO_KNOWN_AS.get(last, last)
    if word in ("epochs", "seed"):
        return "budget.epochs" if word == "epochs" else "seed"
    fields = [
        path
        for path in leaves(TrainConfig, "train.")
        if path.rpartition(".")[2] == word and word not in _NO_ALIAS
    ]
    return fields[0] if len(fields) == 1 else f"task.{re.sub(r'[^A-Za-z0-9_]', '_', name)}"


def _flat(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield parameters, and nested ones by their dotted name."""
    for key, value in params.items():
        inner = value.get("parameters", value) if isinstance(value, dict) else None
        if isinstance(inner, dict) and inner and translate_distribution(value) is None:
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _has_tune_calls(data: object) -> bool:
    """Return whether a file has values of Ray Tune: `tune.uniform(0, 1)`, `grid_search`."""
    if isinstance(data, dict):
        return "grid_search" in data or any(map(_has_tune_calls, data.values()))
    return isinstance(data, str) and bool(re.match(r"\s*(ray\.)?tune\.\w+\(", data))


def _name(data: Mapping[str, Any], file: str, tool: str) -> str:
    """Return a name for the sweep, made of the characters that a name may have."""
    given = next((data[key] for key in ("name", "study_name") if data.get(key)), None)
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", str(given or f"from_{tool}")).strip("_-")[:50]
    return f"{name}_2" if name == file else name or f"from_{tool}"


def _mode(goal: object) -> str:
    return "max" if str(goal).lower() in ("max", "maximize", "maximise") else "min"


def _has_space(params: Mapping[str, Any]) -> bool:
    return any(is_searched(value) for _, value in _flat(params))


def _lowered(data: Any) -> Any:
    """Return the name of an optimizer, or a choice of names, in lower case."""
    if isinstance(data, dict) and isinstance(data.get("choice"), list):
        return {"choice": list(map(_lowered, data["choice"]))}
    return data.lower() if isinstance(data, str) else data


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
