"""The spec of a sweep: its model, the configuration of each trial, and reading and writing it.

A spec has the sections of a training run (`trainable.config`) and those of a sweep (`sections`).
All checks that need neither the machine nor the data are made when it is read, and all problems
are reported in one pass. What must not live here: distributions (`space`), parsing YAML
(`yaml_reader`), and the wording of problems (`error_messages`).
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from redaction.secrets import HIDDEN, redact_clipped
from sweeps.errors import Issue, KeyPath, LocatedIssue, SpecError, UserError
from sweeps.paths import check_name
from sweeps.spec import automatic, yaml_reader
from sweeps.spec.cross_checks import cross_field_checks, set_path
from sweeps.spec.document import Document
from sweeps.spec.error_messages import (
    describe_other_tool,
    field_at,
    is_argument,
    key_path,
    section_of,
    translate,
    unknown_key,
)
from sweeps.spec.search_checks import search_space
from sweeps.spec.search_space import SearchSpace
from sweeps.spec.searched_workers import WORKERS, config_path, searched_workers, workers_of
from sweeps.spec.sections import (
    EarlyStoppingConfig,
    FailuresConfig,
    Metric,
    Modes,
    NotifyConfig,
    OutcomeConstraint,
    PreemptionConfig,
    RepeatsConfig,
    ResourcesConfig,
    SearchConfig,
    Select,
    Space,
    StopConfig,
    StorageConfig,
    TrackingConfig,
    check_outcomes,
    from_short_form,
    has_no_command,
    is_off,
)
from sweeps.spec.space import Choice, Distribution
from sweeps.spec.space_parser import parse_distribution
from sweeps.spec.trial_run import TrialSeed
from sweeps.spec.yaml_scalars import write_flow, write_key, written
from sweeps.statistics.feasibility import Limits, reported_metrics
from sweeps.stopping.patience import Patience
from sweeps.stopping.registry import WITHOUT_SECTION
from trainable.config import (
    SPLIT_SEED,
    BudgetConfig,
    CheckpointConfig,
    Mode,
    Section,
    TaskConfig,
    TrainConfig,
    TrialConfig,
    checkpoint_at_reports,
    equal_to,
    is_own,
)
from trainable.seeding import derive_seed
from trainable.user_code.task_import import SCRIPT

__all__ = [
    "SweepSpec",
    "load_with_positions",
    "parse_spec",
    "parse_with_positions",
    "trial_yaml",
]

MAX_OVERRIDE = 131_072
"""Characters of one `KEY=VALUE`: the limit of Linux for one argument of a command line."""
VERSION = 1
_HIGHER = re.compile(
    "accuracy|acc|auc|auroc|auprc|f1|precision|recall|iou|miou|dice|bleu|rouge|r2|psnr|ssim|kappa|"
    "ndcg|mrr|reward"
)
_LOWER = re.compile("loss|error|err|mse|rmse|mae|mape|nll|perplexity|ppl|wer|cer|fid|divergence")
_SPLIT_SEEDS = 2**31  # every generator accepts so many seeds
LOADING = object()
"""The context of a validation by `spec`, which makes the cross-field checks itself, to report all
problems in one pass."""


class SweepSpec(Section):
    """A complete sweep: what is searched, how each trial trains, and where it is recorded."""

    model_config = ConfigDict(arbitrary_types_allowed=True, hide_input_in_errors=True)

    version: int = VERSION
    """The version of this format."""
    name: Annotated[str, AfterValidator(check_name)] = Field(examples=["digits"])
    """The sweep's name, and its directory below the root."""
    task: TaskConfig = Field(examples=["digits"])
    """The task: a built-in one, or `package.module:ClassName`. Its arguments are beside `name`."""
    metric: Metric = Field(examples=["val/loss"])
    """The metric that selects the best trial. With several, the first selects the best checkpoint
    of a trial, and the best trials are the Pareto front."""
    mode: Modes = Field(examples=["min"])
    """Whether a lower or a higher `metric` is better; one for each metric."""
    select: Select = "checkpoint"
    """What a trial's value is, by which the best is chosen. `checkpoint`: its best value, which
    its best checkpoint has, also if it was stopped early. `final`: its last value, and only
    complete trials count. A resume cannot change it."""
    trials: int = Field(ge=1, examples=[24])
    """The total number of trials; with `repeats`, of configurations."""
    seed: int = Field(default=0, ge=0)
    """The seed of the search, from which the seed of each trial is derived."""
    concurrency: int | None = Field(default=None, ge=1, examples=[4])
    """Trials that run in parallel; null: as many as the resources allow."""
    budget: BudgetConfig = BudgetConfig()
    space: Space = Field(default_factory=dict)
    """Dotted key of this file -> distribution. Empty: only the trials' seeds differ."""
    search: SearchConfig = SearchConfig()
    constraints: Annotated[dict[str, OutcomeConstraint], BeforeValidator(check_outcomes)] = Field(
        default_factory=dict, exclude_if=equal_to({})
    )
    """Limits on reported metrics, by metric: `{val/latency_ms: {max: 5}}`. A trial whose value
    comes from a report that misses one is infeasible, and never the best. A resume can change the
    limits, but not which metrics have one."""
    repeats: RepeatsConfig = Field(default=RepeatsConfig(), exclude_if=is_off)
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig(scheduler=WITHOUT_SECTION.name)
    stop: StopConfig = StopConfig()
    resources: ResourcesConfig = ResourcesConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    storage: StorageConfig = StorageConfig()
    failures: FailuresConfig = FailuresConfig()
    preemption: PreemptionConfig = Field(default=PreemptionConfig(), exclude_if=has_no_command)
    notify: NotifyConfig = NotifyConfig()
    training_rules: Literal[3] = 3
    """The version of the training rules; see `TrialConfig`."""

    _checkpoint_at_reports = model_validator(mode="before")(checkpoint_at_reports)

    @model_validator(mode="before")
    @classmethod
    def _without_auto(cls, data: Any) -> Any:
        if isinstance(data, dict):
            data = dict(data)
            automatic.resolve(data)
        return data

    @field_validator("version")
    @classmethod
    def _version_is_known(cls, version: int) -> int:
        if message := version_fault(version):
            raise UserError(message)
        return version

    @field_validator("task", mode="before")
    @classmethod
    def _task_by_name(cls, task: object) -> object:
        return {"name": task} if isinstance(task, str) else task

    @field_validator("repeats", mode="before")
    @classmethod
    def _repeats_by_number(cls, repeats: object) -> object:
        return from_short_form(repeats)

    @model_serializer(mode="wrap")
    def _leave_to_each_trial(
        self, write: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        data: dict[str, Any] = write(self)
        if (
            "train.optimizer.name" in self.space
        ):  # so that each trial gets its optimizer's defaults
            data["train"]["optimizer"] = self.train.optimizer.model_dump(
                mode=info.mode, exclude_unset=True
            )
        if self.repeats.folds is not None and "repeats" in data:  # not if others were asked for
            del data["repeats"]["seeds"]  # follows from the folds, which an override may change
        return data

    @model_validator(mode="after")
    def _parts_fit_together(self, info: ValidationInfo) -> SweepSpec:
        if info.context is not LOADING and (
            faults := list(cross_field_checks(SweepSpec, _dump(self), self.space))
        ):
            raise UserError(faults)
        return self

    @property
    def patience(self) -> Patience | None:
        """When a trial ends without a new best; None: at the end of its budget."""
        limit, minimize = self.early_stopping.patience, self.modes[0] == "min"
        if limit is None:
            return None
        return Patience(limit, minimize, self.budget.reports, self.budget.report_word)

    @property
    def is_of_script(self) -> bool:
        """Whether its trials are calls of a function, which only its script or notebook makes."""
        return self.task.name.startswith(f"{SCRIPT}:")

    @property
    def max_runs(self) -> int:
        """The most trainings that the search makes: each configuration with all of its seeds."""
        return self.num_trials * self.repeats.seeds

    @property
    def metrics(self) -> tuple[str, ...]:
        """All metrics; the first selects the best checkpoint of a trial."""
        return (self.metric,) if isinstance(self.metric, str) else self.metric

    @property
    def reported(self) -> tuple[str, ...]:
        """What each report must have: all metrics, then those that only have limits."""
        return reported_metrics(self.metrics, self.constraints)

    @property
    def limits(self) -> Limits:
        """The limits on reported metrics."""
        return Limits.of({k: dict(one) for k, one in self.constraints.items()}, self.metrics)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The mode of each metric."""
        return (self.mode,) if isinstance(self.mode, str) else self.mode

    @property
    def modules(self) -> list[str]:
        """The modules that a run imports; only `preemption.command` executes other code."""
        return sorted({*self.trial_modules, *_module_of(self.search.sampler)})

    @property
    def trial_modules(self) -> list[str]:
        """The modules that trials import; only the driver imports a sampler."""
        names = [self.task.name, *(name for _, name in self.own_names)]
        return sorted({module for name in names for module in _module_of(name)})

    @property
    def own_names(self) -> list[tuple[str, str]]:
        """The user's own optimizers and schedules that trials may have, each with its key."""
        return [
            (key, str(name))
            for key, fixed in (
                ("train.optimizer.name", self.train.optimizer.name),
                ("train.schedule.name", self.train.schedule.name),
            )
            for name in _options(self.space.get(key), fixed)
            if is_own(str(name))
        ]

    @property
    def objective_description(self) -> str:
        """Metrics and modes in words: `min of val/loss and max of val/accuracy`."""
        each = zip(self.modes, self.metrics, strict=True)
        return " and ".join(f"{mode} of {metric}" for mode, metric in each)

    def direction_warnings(self) -> list[str]:
        """Return a sentence for each metric whose name says that its mode is the wrong one.

        A name proves nothing, so a sweep is never refused for it.
        """
        found = []
        for metric, mode in zip(self.metrics, self.modes, strict=True):
            better = _better(metric)
            if better is not None and better != mode:
                higher = "higher" if better == "max" else "lower"
                found.append(
                    f"mode is {mode} for {metric}, whose name says that {higher} is better: the "
                    f"sweep would look for the worst trial and stop the best ones early; write "
                    f"{better}, unless the name misleads"
                )
        return found

    def max_trials(self, wanted: int) -> int:
        """Return how many trials the sweep can have, at most `wanted`.

        A population cannot grow, and no point is tried twice.
        """
        if self.early_stopping.rule.is_population:
            return self.trials
        size = self.search_space().num_points(wanted)
        return wanted if size is None else min(wanted, size)

    @property
    def searched_workers(self) -> tuple[int, int] | None:
        """The fewest and the most workers (ranks) of a trial; None: the number is not searched."""
        return searched_workers(self.resources, self.space)

    def workers_of(self, params: Mapping[str, object]) -> int:
        """Return how many workers (ranks) the trial with these parameters has."""
        return workers_of(self.resources, params)

    @property
    def num_trials(self) -> int:
        """How many trials the search makes: `trials`, or fewer if the space has fewer points."""
        return self.max_trials(self.trials)

    def trial_config(self, seed: TrialSeed | int, params: Mapping[str, object]) -> TrialConfig:
        """Return the configuration of one trial.

        Args:
            seed: What its seed is derived from; a number means the trial with that number.
            params: Values by dotted path, as drawn from `space`.

        Raises:
            SpecError: The values do not fit together, or a key is not a field.
        """
        data = {
            key: value for key, value in _dump(self).items() if key in TrialConfig.model_fields
        }
        seed = seed if isinstance(seed, TrialSeed) else TrialSeed("trial", seed)
        data["seed"] = derive_seed(self.seed, seed.purpose, seed.number)
        data["patience"] = self.early_stopping.patience
        if only_limited := self.reported[len(self.metrics) :]:
            modes = ("max" if self.constraints[one].max is None else "min" for one in only_limited)
            data["metric"], data["mode"] = self.reported, (*self.modes, *modes)
        data["workers"] = workers_of(self.resources, params)
        data["data_seed"] = derive_seed(self.seed, "data")
        if seed.decides_data:
            data["data_seed"] = derive_seed(self.seed, seed.purpose, "data", seed.number)
        if seed.split:
            drawn = derive_seed(self.seed, seed.purpose, "split", seed.number)
            data["task"] = {**data["task"], SPLIT_SEED: drawn % _SPLIT_SEEDS}
        data["task"] = {**data["task"], **self.repeats.fold_of(seed.number)}
        doc = Document(f"trial {seed.number}", data, {})
        for key, value in params.items():
            path, message = spec_path(key)
            if message or (path[0] not in ("train", "task") and key != WORKERS):
                doc.add(
                    Issue(
                        (key,),
                        message
                        or "is no parameter of a trial; they are below train. and task., and "
                        f"{WORKERS}",
                    )
                )
            else:
                known = self.space.get(key)
                set_path(data, config_path(key), known.configured(value) if known else value)
        if not doc.problems:
            try:
                return TrialConfig.model_validate(data)
            except ValidationError as error:
                for fault in translate(
                    SweepSpec, error, data, lambda _path, value: written(value)
                ):
                    doc.add(fault)
        raise SpecError([problem for _, _, problem in doc.problems])

    def example_params(self) -> dict[str, Any]:
        """Return a point of the space, to check a trial before any is drawn.

        It has the first value of each parameter, and the most workers: so few trials run at once
        that each could have as many.
        """
        space = self.search_space()
        first = space.point(_example)
        return first if space.allows(first) else space.draw(0) or first

    def search_space(self) -> SearchSpace:
        """Return `space` with its conditions and with the constraints of `search`."""
        return search_space(self.space, self.search, self.train, self.task, self.resources)

    def to_yaml(self) -> str:
        """Return the spec with all defaults as YAML; `parse_spec` reads an equal spec from it.

        If the optimizer is searched, defaults that depend on it are left out: each trial has its
        own.
        """
        data = _dump(self)
        if set(data["task"]) == {"name"}:
            data["task"] = data["task"]["name"]
        return "".join(_write_block(data, ""))


def trial_yaml(config: TrialConfig) -> str:
    """Return the configuration of one trial as YAML, for its directory."""
    return "".join(_write_block(config.model_dump(mode="json"), ""))


def _better(metric: str) -> str | None:
    """Return the mode that a metric's name suggests; None if it suggests none, or both."""
    words = re.split(r"[^a-z0-9]+", metric.rpartition("/")[2].lower())
    higher, lower = (any(map(kind.fullmatch, words)) for kind in (_HIGHER, _LOWER))
    if higher == lower:
        return None
    return "max" if higher else "min"


def _example(key: str, distribution: Distribution) -> Any:
    values = [value for _, value in distribution.boundary_values()]
    return max(values) if key == WORKERS else values[0]


def _module_of(name: str) -> list[str]:
    """Return the module of `module:Class` in a list; an empty list for a built-in name."""
    return [name.partition(":")[0]] if ":" in name else []


def _options(distribution: Distribution | None, fixed: str) -> Sequence[object]:
    return distribution.options if isinstance(distribution, Choice) else [fixed]


def version_fault(version: object) -> str | None:
    """Return why a spec of this version cannot be read; None if it can."""
    if isinstance(version, bool) or not isinstance(version, int) or version == VERSION:
        return None
    verdict = "newer than this program" if version > VERSION else "no version of a spec"
    fix = "upgrade gradsweep" if version > VERSION else f"write {VERSION}"
    return f"version {version} is {verdict}; supported: {VERSION}; {fix}"


def spec_path(key: str) -> tuple[tuple[str, ...], str | None]:
    """Return the path of a dotted key in a spec, and a message if it is not a field."""
    path = key_path(key)
    if path[0] in ("space", "task") and len(path) == 2 and path[1]:
        return path, None
    if path[0] == "constraints" and len(path) > 2 and path[-1] in OutcomeConstraint.model_fields:
        return ("constraints", ".".join(path[1:-1]), path[-1]), None
    if is_argument(path):
        return path, None
    for size in range(1, len(path) + 1):
        if field_at(SweepSpec, path[:size]) is not None:
            continue
        owner = field_at(SweepSpec, path[: size - 1])
        if owner is not None and section_of(owner) is None:
            above = ".".join(path[: size - 1])
            return (
                path,
                f"'{above}' is a single value; it has no keys below it; write -s {above}=VALUE",
            )
        return path, unknown_key(SweepSpec, path[:size])
    return path, None


def _dump(spec: SweepSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json")


def _write_block(data: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Yield the lines of a mapping: a mapping of mappings as a block, other values in one line."""
    for key, value in data.items():
        name = write_key(key)
        block = isinstance(value, dict) and any(
            isinstance(inner, dict) and inner for inner in value.values()
        )
        if block and not (indent == "" and key == "task"):
            yield f"{indent}{name}:\n"
            yield from _write_block(value, f"{indent}  ")
        else:
            yield f"{indent}{name}: {write_flow(value)}\n"


def parse_spec(
    text: str,
    label: str,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    drawn: int | None = 0,
) -> SweepSpec:
    """Read a spec from text. See `parse_with_positions`."""
    return parse_with_positions(text, label, overrides, environ=environ, drawn=drawn)[0]


def load_with_positions(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    name: str | None = None,
    tracking_uri: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[SweepSpec, Document]:
    """Read and check a spec file; return the spec, and the document with all positions."""
    environ = os.environ if environ is None else environ
    doc = yaml_reader.read(path, environ)
    others = describe_other_tool(doc.data)
    for issue in others:
        doc.add(issue)
    if others and (refused := doc.error()):
        raise refused
    return _validate(doc, overrides, {"name": name, "tracking-uri": tracking_uri}, environ)


def parse_with_positions(
    text: str,
    label: str,
    overrides: Sequence[str] = (),
    *,
    name: str | None = None,
    environ: Mapping[str, str] | None = None,
    drawn: int | None = 0,
) -> tuple[SweepSpec, Document]:
    """Read a spec from text; `label` stands for the file (`load_with_positions`)."""
    environ = os.environ if environ is None else environ
    doc = yaml_reader.parse(text, label, environ)
    return _validate(doc, overrides, {"name": name}, environ, drawn)


def _validate(
    doc: Document,
    overrides: Sequence[str],
    options: Mapping[str, str | None],
    environ: Mapping[str, str],
    drawn: int | None = 0,
) -> tuple[SweepSpec, Document]:
    _expand_short_forms(doc)
    for override in overrides:
        _override(doc, override, environ)
        _expand_short_forms(doc)
    for option, value in options.items():
        if value is not None:
            path = ("name",) if option == "name" else ("tracking", "uri")
            doc.put(path, yaml_reader.parse_text(value, f"--{option} {value}"))
    if message := version_fault(doc.data.get("version")):
        # Other problems of a newer version would not help the user.
        doc.problems.clear()
        doc.add(Issue(("version",), message))
        raise doc.error() or AssertionError
    doc.choices = automatic.resolve(doc.data)
    spec, faults = _all_faults(doc)
    if drawn is not None:
        faults += _cross_faults(doc, drawn)
    # A wrong key, or a value with a known problem, explains further problems of the same path.
    wrong_keys = {fault.path for fault in faults if fault.at_key}
    for fault in faults:
        inside = any(fault.path[:size] in wrong_keys for size in range(1, len(fault.path)))
        if not inside and not doc.has_problem(fault.path):
            doc.add(fault)
    if error := doc.error():
        raise error
    assert spec is not None
    return spec, doc


def _cross_faults(doc: Document, drawn: int) -> Iterator[Issue]:
    space: dict[str, Distribution | None] = {}
    raw = doc.data.get("space")
    for key, value in raw.items() if isinstance(raw, dict) else ():
        try:
            space[key] = parse_distribution(value)
        except UserError:
            space[key] = None  # the section's own validation reports it
    return cross_field_checks(
        SweepSpec, doc.data, space, lambda path, _value: doc.position(path).shown, drawn
    )


def _all_faults(doc: Document) -> tuple[SweepSpec | None, list[Issue]]:
    """Validate again without the wrong values, until there are no new problems.

    Pydantic runs a section's own check only if its fields are valid. Without the repetition the
    user would see its problem only after the others are corrected.
    """
    data = copy.deepcopy(doc.data)
    faults: list[Issue] = []
    dropped: set[str] = set()
    while True:
        try:
            spec = SweepSpec.model_validate(data, context=LOADING)
        except ValidationError as error:
            found = translate(
                SweepSpec, error, data, lambda path, _value: doc.position(path).shown
            )
        else:
            return (None if dropped else spec), faults
        # A message about a dropped value is about its default, and wrong.
        faults += [
            fault
            for fault in found
            if fault not in faults and not dropped & set(re.findall(r"\w+", fault.message))
        ]
        removed = {name for fault in found if (name := _drop(data, fault.path)) is not None}
        if not removed:
            return None, faults
        dropped |= removed
        dropped |= {part for fault in found for part in fault.path[-1:] if isinstance(part, str)}


def _drop(data: Any, path: KeyPath) -> str | None:
    """Remove the value of an issue, or its parent; return the removed key, or None."""
    if path[:1] == ("space",):
        path = path[:2]
    for index, part in enumerate(path):
        if not isinstance(data, dict) or part not in data:
            return None
        if index == len(path) - 1 or not isinstance(data[part], dict):
            del data[part]
            return str(part)
        data = data[part]
    return None


def _expand_short_forms(doc: Document) -> None:
    for section, key in automatic.short_forms(doc.data):
        doc.positions[section, key] = doc.positions[section,]


def _override(doc: Document, text: str, environ: Mapping[str, str]) -> None:
    if len(text) > MAX_OVERRIDE:
        doc.extend(
            f"-s {redact_clipped(text, 60)}",
            f"has {len(text)} characters; an override has at most {MAX_OVERRIDE}; keep data in a "
            "file, and write the file's name",
        )
        return
    key, equals, value = text.partition("=")
    path = key_path(key)
    where = f"-s {text}"
    if equals and path[0] in yaml_reader.HIDDEN_SECTIONS:
        where = f"-s {key}={HIDDEN}"
    if not equals:
        doc.extend(
            where, f"there is no '='; an override is KEY=VALUE; write -s {key or 'KEY'}=VALUE"
        )
        return
    path, message = spec_path(key)
    if message:
        doc.extend(where, [LocatedIssue(where, key, message)])
        return
    searched = doc.data.get("space")
    of, _, inner = path[-1].rpartition(".")
    if path[0] == "space" and isinstance(searched, dict) and of in searched:
        path = ("space", of, inner)  # what stands in or beside a distribution, such as a prior
    try:
        parsed = yaml_reader.parse_value(value, where, environ, path)
    except SpecError as error:
        doc.extend(where, error.problems)
        return
    if path[0] == "task" and len(path) > 1 and isinstance(doc.data.get("task"), str):
        doc.data["task"] = {"name": doc.data["task"]}
        doc.positions["task", "name"] = doc.positions["task",]
    if path[0] == "repeats" and len(path) > 1 and isinstance(doc.data.get("repeats"), int):
        doc.data["repeats"] = {"seeds": doc.data["repeats"]}
        doc.positions["repeats", "seeds"] = doc.positions["repeats",]
    doc.put(path, parsed)
