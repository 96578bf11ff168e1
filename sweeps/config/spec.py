"""The spec of a sweep: its models, its checks, and its way from YAML and back.

A spec is composed of a training run's own sections (`trainable.config`) and of what only a sweep
has. Every check that needs no machine and no data is made here, and all of them in one pass. What
must not live here: reading YAML (`source`), the wording of problems (`problems`), distributions
(`space`).
"""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
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

from redaction.secrets import redact_clipped
from sweeps.config import yaml_reader
from sweeps.config.cross_checks import cross_field_checks, set_path, written
from sweeps.config.document import Document
from sweeps.config.error_messages import field_at, key_path, section_of, translate, unknown_key
from sweeps.config.search_checks import search_space
from sweeps.config.search_space import SearchSpace
from sweeps.config.sections import (
    EarlyStoppingConfig,
    FailuresConfig,
    Metric,
    Modes,
    ResourcesConfig,
    SearchConfig,
    Space,
    StopConfig,
    StorageConfig,
    TrackingConfig,
)
from sweeps.config.space import Distribution
from sweeps.config.space_parser import parse_distribution
from sweeps.config.yaml_scalars import write_flow, write_key
from sweeps.early_stopping.registry import WITHOUT_SECTION
from sweeps.errors import Issue, KeyPath, LocatedIssue, SpecError, UserError
from sweeps.paths import check_name
from trainable.config import (
    BudgetConfig,
    CheckpointConfig,
    Mode,
    Section,
    TaskConfig,
    TrainConfig,
    TrialConfig,
)
from trainable.rules import NEWEST, rules_of
from trainable.seeding import derive_seed

__all__ = [
    "EarlyStoppingConfig",
    "FailuresConfig",
    "ResourcesConfig",
    "SearchConfig",
    "SweepSpec",
    "TrackingConfig",
    "load_placed",
    "load_spec",
    "parse_placed",
    "parse_spec",
    "trial_yaml",
]

VERSION = 1
MAX_OVERRIDE = 131_072
"""Characters of one `KEY=VALUE`: as many as Linux takes in one word of a command line."""


class SweepSpec(Section):
    """A sweep, resolved: what is tried, how each trial trains, and where it is recorded."""

    model_config = ConfigDict(arbitrary_types_allowed=True, hide_input_in_errors=True)

    version: int = VERSION
    """The version of this format."""
    name: Annotated[str, AfterValidator(check_name)] = Field(examples=["digits"])
    """The sweep's name, and its directory below the root."""
    task: TaskConfig = Field(examples=["digits"])
    """What is trained: a built-in task, or `package.module:ClassName`; arguments beside `name`."""
    metric: Metric = Field(examples=["val/loss"])
    """What decides which trial is the best; of several, the first decides which checkpoint of a
    trial is, and no trial is the best that another one beats in all of them."""
    mode: Modes = Field(examples=["min"])
    """Whether less or more of `metric` is better; one for each."""
    trials: int = Field(ge=1, examples=[24])
    """How many trials the sweep has, all in all."""
    seed: int = Field(default=0, ge=0)
    """The seed of the search, from which each trial's own is derived."""
    concurrency: int | None = Field(default=None, ge=1, examples=[4])
    """Trials at the same time; null: as many as the resources allow."""
    budget: BudgetConfig = BudgetConfig()
    space: Space = Field(default_factory=dict)
    """Dotted path into this file -> distribution. Empty: only the trials' seeds differ."""
    search: SearchConfig = SearchConfig()
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig(scheduler=WITHOUT_SECTION.name)
    stop: StopConfig = StopConfig()
    resources: ResourcesConfig = ResourcesConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    storage: StorageConfig = StorageConfig()
    failures: FailuresConfig = FailuresConfig()
    training_rules: Literal[1, 2] = NEWEST
    """The version of the training rules; a sweep keeps the one that it was begun with."""

    @field_validator("version")
    @classmethod
    def _version_is_known(cls, version: int) -> int:
        if message := _version_fault(version):
            raise UserError(message)
        return version

    @field_validator("task", mode="before")
    @classmethod
    def _task_by_name(cls, task: object) -> object:
        return {"name": task} if isinstance(task, str) else task

    @model_serializer(mode="wrap")
    def _leave_to_each_trial(
        self, write: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        data: dict[str, Any] = write(self)
        if "train.optimizer.name" in self.space:  # so each trial has defaults of its own
            data["train"]["optimizer"] = self.train.optimizer.model_dump(
                mode=info.mode, exclude_unset=True
            )
        return data

    @model_validator(mode="after")
    def _parts_fit_together(self, info: ValidationInfo) -> SweepSpec:
        # The loader runs the same checks itself, beside those of single fields, to
        # report all in one pass.
        if info.context is not _LOADING and (
            faults := list(cross_field_checks(SweepSpec, _dump(self), self.space))
        ):
            raise UserError(faults)
        return self

    @property
    def metrics(self) -> tuple[str, ...]:
        """All metrics, the one that decides which checkpoint is a trial's best first."""
        return (self.metric,) if isinstance(self.metric, str) else self.metric

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The mode of each metric."""
        return (self.mode,) if isinstance(self.mode, str) else self.mode

    @property
    def modules(self) -> list[str]:
        """The modules of others that a run of it imports, whose code then runs; nothing else in a
        spec is code.
        """
        return sorted({*self.trial_modules, *_module_of(self.search.sampler)})

    @property
    def trial_modules(self) -> list[str]:
        """Those of them that trials import; a sampler is the driver's affair."""
        return _module_of(self.task.name)

    @property
    def objective_description(self) -> str:
        """Metrics and modes in words: `min of val/loss and max of val/accuracy`."""
        each = zip(self.modes, self.metrics, strict=True)
        return " and ".join(f"{mode} of {metric}" for mode, metric in each)

    def max_trials(self, wanted: int) -> int:
        """Return how many trials the sweep can have of so many: a population has the members that
        it has, and a grid is tried once.
        """
        if self.early_stopping.rule.is_population:
            return self.trials
        if self.search.sampler != "grid":
            return wanted
        first = len(self.search.try_first)
        points = itertools.islice(self.search_space().grid(), max(0, wanted - first))
        return min(wanted, first + sum(1 for _ in points))

    def trial_config(self, number: int, params: Mapping[str, object]) -> TrialConfig:
        """Return the configuration of one trial.

        Args:
            number: The trial's number in the sweep; its seed is derived from it.
            params: Values by dotted path, as drawn from `space`.

        Raises:
            SpecError: The values do not fit together, or name no field.
        """
        data = {
            key: value for key, value in _dump(self).items() if key in TrialConfig.model_fields
        }
        data["seed"] = derive_seed(self.seed, "trial", number)
        if rules_of(self.training_rules).shared_data:
            data["data_seed"] = derive_seed(self.seed, "data")
        doc = Document(f"trial {number}", data, {})
        for key, value in params.items():
            path, message = _spec_path(key)
            if message or path[0] not in ("train", "task"):
                doc.add(
                    Issue(
                        (key,),
                        message or "is no parameter of a trial; they lie below train. and task.",
                    )
                )
            else:
                known = self.space.get(key)
                set_path(data, path, known.configured(value) if known else value)
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
        """Return a point of the space, to look at a trial before any is drawn."""
        space = self.search_space()
        first = space.point(lambda _key, distribution: distribution.boundary_values()[0][1])
        return first if space.allows(first) else space.drawn(0) or first

    def search_space(self) -> SearchSpace:
        """Return `space` with its conditions and with the constraints of `search`."""
        return search_space(self.space, self.search, self.train, self.task)

    def to_yaml(self) -> str:
        """Return the spec, defaults filled in, as YAML that `load_spec` reads to an equal spec.

        Where the optimizer is searched, defaults that depend on it are left out: they are each
        trial's own.
        """
        data = _dump(self)
        if set(data["task"]) == {"name"}:
            data["task"] = data["task"]["name"]
        return "".join(_write_block(data, ""))


def trial_yaml(config: TrialConfig) -> str:
    """Return the configuration of one trial as YAML, for its directory."""
    return "".join(_write_block(config.model_dump(mode="json"), ""))


def load_spec(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    name: str | None = None,
    tracking_uri: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> SweepSpec:
    """Read and check a spec file. See `load_placed`."""
    return load_placed(path, overrides, name=name, tracking_uri=tracking_uri, environ=environ)[0]


def parse_spec(
    text: str,
    label: str,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    drawn: int | None = 0,
) -> SweepSpec:
    """Read a spec from text. See `parse_placed`."""
    return parse_placed(text, label, overrides, environ=environ, drawn=drawn)[0]


def load_placed(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    name: str | None = None,
    tracking_uri: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[SweepSpec, Document]:
    """Read and check a spec file; return the spec, and where each of its keys was written.

    Args:
        path: The YAML file; messages spell it as given.
        overrides: `KEY=VALUE` each, applied in order after the file.
        name: Replaces the spec's `name` (the option `--name`).
        tracking_uri: Replaces the spec's `tracking.uri` (the option `--tracking-uri`).
        environ: Where `${NAME}` is looked up; default: the process environment.

    Raises:
        SpecError: With every problem that was found.
    """
    environ = os.environ if environ is None else environ
    doc = yaml_reader.read(path, environ)
    return _validate(doc, overrides, {"name": name, "tracking-uri": tracking_uri}, environ)


def parse_placed(
    text: str,
    label: str,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    drawn: int | None = 0,
) -> tuple[SweepSpec, Document]:
    """Read a spec from text; `label` stands for the file in messages. See `load_placed`.

    Args:
        drawn: How many trials its sweep has, whose points to try first are past. None for one that
            its sweep has: it was checked when it was written, by the rules of then.
    """
    environ = os.environ if environ is None else environ
    return _validate(yaml_reader.parse(text, label, environ), overrides, {}, environ, drawn)


_LOADING = object()


def _module_of(name: str) -> list[str]:
    """The module of `module:Class`; none of a name of our own."""
    return [name.partition(":")[0]] if ":" in name else []


def _version_fault(version: object) -> str | None:
    if isinstance(version, bool) or not isinstance(version, int) or version == VERSION:
        return None
    verdict = "newer than this program" if version > VERSION else "no version of a spec"
    fix = "upgrade gradsweep" if version > VERSION else f"write {VERSION}"
    return f"version {version} is {verdict}; supported: {VERSION}; {fix}"


def _validate(
    doc: Document,
    overrides: Sequence[str],
    options: Mapping[str, str | None],
    environ: Mapping[str, str],
    drawn: int | None = 0,
) -> tuple[SweepSpec, Document]:
    for override in overrides:
        _override(doc, override, environ)
    for option, value in options.items():
        if value is not None:
            path = ("name",) if option == "name" else ("tracking", "uri")
            doc.put(path, yaml_reader.parse_text(value, f"--{option} {value}"))
    if message := _version_fault(doc.data.get("version")):
        # Whatever else a newer version holds would only be noise.
        doc.problems.clear()
        doc.add(Issue(("version",), message))
        raise doc.error() or AssertionError
    spec, faults = _all_faults(doc)
    if drawn is not None:
        faults += _cross_faults(doc, drawn)
    # A key that should not be there, or a value known to be wrong, explains what follows from it.
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
            space[key] = None  # reported where the section is
    return cross_field_checks(
        SweepSpec, doc.data, space, lambda path, _value: doc.place(path).shown, drawn
    )


def _all_faults(doc: Document) -> tuple[SweepSpec | None, list[Issue]]:
    """Validate, and validate again without the wrong values until nothing new is found.

    A section's own check runs only once its fields are valid; without the second look it would be
    reported one run later.
    """
    data = copy.deepcopy(doc.data)
    faults: list[Issue] = []
    dropped: set[str] = set()
    while True:
        try:
            spec = SweepSpec.model_validate(data, context=_LOADING)
        except ValidationError as error:
            found = translate(SweepSpec, error, data, lambda path, _value: doc.place(path).shown)
        else:
            return (None if dropped else spec), faults
        # A check that speaks of a value which was dropped speaks of its default.
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
    """Remove the value that a fault is about, or what holds it; return its key, or None when there
    is none."""
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


def _override(doc: Document, text: str, environ: Mapping[str, str]) -> None:
    if len(text) > MAX_OVERRIDE:
        doc.extend(
            f"-s {redact_clipped(text, 60)}",
            f"has {len(text)} characters; an override has at most {MAX_OVERRIDE}; keep data in a "
            "file, and give its name",
        )
        return
    where = f"-s {text}"
    key, equals, value = text.partition("=")
    if not equals:
        doc.extend(
            where, f"there is no '='; an override is KEY=VALUE; write -s {key or 'KEY'}=VALUE"
        )
        return
    path, message = _spec_path(key)
    if message:
        doc.extend(where, [LocatedIssue(where, key, message)])
        return
    try:
        parsed = yaml_reader.parse_value(value, where, environ)
    except SpecError as error:
        doc.extend(where, error.problems)
        return
    if path[0] == "task" and len(path) > 1 and isinstance(doc.data.get("task"), str):
        doc.data["task"] = {"name": doc.data["task"]}
        doc.places["task", "name"] = doc.places["task",]
    doc.put(path, parsed)


def _spec_path(key: str) -> tuple[tuple[str, ...], str | None]:
    """Return the path that a dotted key names in a spec, and a message when there is none."""
    path = key_path(key)
    if path[0] in ("space", "task") and len(path) == 2 and path[1]:
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
    """Yield the lines of a mapping: what holds mappings as a block, all else in one line."""
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
