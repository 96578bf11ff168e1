"""The sections that only a sweep has, with the rules of their fields.

What must not live here: checks across sections (`cross_checks`), and the sections of a training
run (`trainable.config`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    create_model,
    field_validator,
    model_validator,
)

from redaction.secrets import is_secret
from sweeps.errors import Issue, UserError, WrongDuration
from sweeps.formatting import described, parse_duration, shown
from sweeps.paths import check_name
from sweeps.spec.constraints import parse_constraint
from sweeps.spec.error_messages import nearest
from sweeps.spec.space import Distribution, is_number
from sweeps.spec.space_parser import parse_distribution
from sweeps.statistics.over_seeds import SeedValue, combine
from sweeps.stopping.registry import DEFAULT_RULE, RULES, parameters
from sweeps.stopping.rule import StoppingRule
from tracking.address import is_database
from trainable.config import Mode, Number, Section, equal_to

Select = Literal["checkpoint", "final"]
"""What a trial's value is: its best one, which a checkpoint has, or that at its end."""
LONGEST_KEY = 250  # characters; the tracking store's limit
_LONGEST_METRIC = LONGEST_KEY - len("best/")
CREDENTIALS = re.compile(r"://[^/?#\s]*@")
_ANY_AT = re.compile(r"://\S*@")
_USER_ALONE = re.compile(r"://[^/?#\s:@]*@")
_BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_OBJECTS = re.compile(rf"s3://{_BUCKET}(/(?!\.{{1,2}}(/|$))[\w.-]+)*/?", re.ASCII)
_PASSWORD = re.compile(rf"{_ANY_AT.pattern}|[?&]\w*password=")
_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w{0,200})\}", re.ASCII)


def _check_gpu(value: object) -> object:
    rule = "a GPU ask is 'auto', 0, a share below 1, or a whole number"
    text = described(value)
    if value == "auto":
        return value
    if not is_number(value) or not math.isfinite(value):
        raise UserError(f"{text} is not a GPU ask; {rule}; write auto, 0.5 or 1")
    if value < 0:
        raise UserError(f"{text} is negative; {rule}; write 0 for none")
    if value > 1 and not float(value).is_integer():
        raise UserError(
            f"{text} is neither below 1 nor whole; {rule}; write 0.5 to share a GPU "
            "between two trials, or 2 for two GPUs"
        )
    return value


def _several(check: Callable[[object], str | None]) -> Callable[[object], object]:
    """Return a validator of lists that reports each wrong item at its own position."""

    def validate(value: object) -> object:
        assert isinstance(value, list | tuple)
        if len(value) < 2:
            raise UserError(
                f"the list holds {len(value)}; a list is for two metrics or more; "
                "write a single one without brackets"
            )
        faults = [
            Issue((index,), message)
            for index, item in enumerate(value)
            if (message := check(item)) is not None
        ]
        if faults:
            raise UserError(faults)
        return value

    return validate


def _metric_fault(item: object) -> str | None:
    if isinstance(item, str) and 0 < len(item) <= _LONGEST_METRIC:
        return None
    return (
        f"{described(item)} is not the name of a metric; a name has 1 to {_LONGEST_METRIC} "
        "characters; write for example val/loss"
    )


def _mode_fault(item: object) -> str | None:
    if item in ("min", "max"):
        return None
    return f"{described(item)} is not known here; valid: min, max; write one of them"


def _kind(value: object) -> str:
    return "several" if isinstance(value, list | tuple) else "one"


Metric = Annotated[
    Annotated[str, Field(min_length=1, max_length=_LONGEST_METRIC), Tag("one")]
    | Annotated[
        tuple[str, ...],
        Field(strict=False),
        BeforeValidator(_several(_metric_fault)),
        Tag("several"),
    ],
    Discriminator(_kind),
]
"""One metric, or a list of two or more."""
Modes = Annotated[
    Annotated[Mode, Tag("one")]
    | Annotated[
        tuple[Mode, ...],
        Field(strict=False),
        BeforeValidator(_several(_mode_fault)),
        Tag("several"),
    ],
    Discriminator(_kind),
]
"""The mode of one metric, or a list with one for each."""


SAMPLERS = ("tpe", "gp", "cmaes", "nsgaii", "random", "qmc", "grid")
"""Samplers that can be chosen by name."""
AUTO = "auto"
"""Stands for a sampler or a stopping rule that is taken when a sweep is created."""
LEARN_NOTHING = ("random", "qmc", "grid")
"""Samplers that ignore the results of earlier trials."""
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def check_sampler(value: object) -> object:
    """Return a sampler's name, or `module:Class`."""
    if isinstance(value, str) and (value in (*SAMPLERS, AUTO) or _CLASS.fullmatch(value)):
        return value
    valid = f"valid: {', '.join((*SAMPLERS, AUTO))}, or module:Class of an Optuna sampler"
    meant = nearest(value, (*SAMPLERS, AUTO)) if isinstance(value, str) else None
    fix = f"did you mean '{meant}'?" if meant else "write one of them"
    raise UserError(f"{described(value)} is not known here; {valid}; {fix}")


def check_points(value: object) -> object:
    """Return a list of points, each a mapping of keys to values, or `defaults`."""
    if value == "defaults":
        return value
    rule = "`try_first` is a list of points, each a mapping of keys of the space to values"
    example = "write [{train.optimizer.lr: 0.01}]"

    def faults(index: int, point: object) -> Iterator[Issue]:
        if not isinstance(point, dict) or not point:
            yield Issue((index,), f"{described(point)} is not a point; {rule}; {example}")

    return _each(value, faults, f"{rule}; {example}")


def check_constraints(value: object) -> object:
    """Return a list of texts that are constraints."""
    if isinstance(value, dict):
        raise UserError(
            f"{described(value)} is not a list; search.constraints compares parameters; limits on "
            "reported metrics are in the section constraints, beside search"
        )

    def faults(index: int, text: object) -> Iterator[Issue]:
        if not isinstance(text, str):
            yield Issue((index,), f"{described(text)} is not a constraint; {rule}")
            return
        try:
            parse_constraint(text)
        except UserError as error:
            yield from (Issue((index, *f.path), f.message) for f in error.faults)

    rule = "`constraints` is a list of comparisons, each a text; write ['task.low < task.high']"
    return _each(value, faults, rule)


def sweep_names(value: object) -> object:
    """Return one name or several as a list of valid names."""

    def faults(index: int, name: object) -> Iterator[Issue]:
        if not isinstance(name, str):
            yield Issue((index,), f"{described(name)} is not a name; {rule}")
        elif names.index(name) < index:
            yield Issue((index,), f"{shown(name)} is listed twice; list each sweep once")
        else:
            try:
                check_name(name)
            except UserError as error:
                yield from (Issue((index,), fault.message) for fault in error.faults)

    rule = "`warm_start` names earlier sweeps below the same root; write [first, second]"
    names: Any = [value] if isinstance(value, str) else value
    return _each(names, faults, rule)


def _each(
    value: object, faults: Callable[[int, object], Iterator[Issue]], rule: str
) -> list[object]:
    if not isinstance(value, list):
        raise UserError(f"{described(value)} is not a list; {rule}")
    if found := [fault for index, item in enumerate(value) for fault in faults(index, item)]:
        raise UserError(found)
    return value


class SearchConfig(Section):
    """How the next trial's parameters are chosen."""

    sampler: Annotated[str, BeforeValidator(check_sampler)] = "tpe"
    """The algorithm that suggests parameters: a built-in name, or `module:Class` of an Optuna
    sampler, which may be your own. `auto`: one is taken when the sweep is created, and stored."""
    startup_trials: int = Field(default=10, ge=0)
    """The sampler draws at random until so many trials have ended with a result."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the sampler's constructor."""
    try_first: Annotated[
        Literal["defaults"] | list[dict[str, Any]], BeforeValidator(check_points)
    ] = "defaults"
    """The first points, in order: key of the space -> value; other parameters are drawn.
    `defaults`: one point, the values that the file and the task have without a search."""
    constraints: Annotated[list[str], BeforeValidator(check_constraints)] = Field(
        default_factory=list
    )
    """Comparisons between parameters that every trial must satisfy."""
    warm_start: Annotated[list[str], BeforeValidator(sweep_names)] = Field(default_factory=list)
    """Earlier sweeps below the same root, from whose trials the sampler learns, too."""
    priors: Literal["defaults", "history"] | None = Field(
        default=None, examples=["defaults"], exclude_if=equal_to(None)
    )
    """`defaults`: searched parameters of the optimizer without a `prior` have the optimizer's
    default as a weak one; `history`: parameters without a `prior` have one from earlier sweeps of
    the same task below the same root; null: only parameters with a `prior` have one."""

    @property
    def points(self) -> list[dict[str, Any]]:
        """The first points. A sweep resolves `defaults` to a point when it is created."""
        return [] if isinstance(self.try_first, str) else self.try_first


_HAS = "a constraint has max, min or both; write {max: 5}"


class OutcomeConstraint(Section):
    """What a trial may have of one metric in the report of its value."""

    max: Number | None = Field(default=None, examples=[5], exclude_if=equal_to(None))
    """A larger value is infeasible; null: no limit."""
    min: Number | None = Field(default=None, examples=[0.9], exclude_if=equal_to(None))
    """A smaller value is infeasible; null: no limit."""

    @model_validator(mode="after")
    def _limits_something(self) -> OutcomeConstraint:
        if self.max is None and self.min is None:
            raise UserError(f"it has no limit; {_HAS}")
        if self.max is not None and self.min is not None and self.min > self.max:
            raise UserError(
                f"min is {self.min:g} and max {self.max:g}: no value is feasible; swap them"
            )
        return self


def check_outcomes(value: object) -> object:
    """Return a mapping of metrics to limits."""
    rule = "`constraints` limits reported metrics; write {val/latency_ms: {max: 5}}"
    if isinstance(value, list):
        raise UserError(
            f"a list is not a mapping; {rule}; comparisons between parameters are in "
            "search.constraints"
        )
    if not isinstance(value, dict):
        raise UserError(f"{described(value)} is not a mapping; {rule}")
    faults = []
    for metric, one in value.items():
        if (message := _metric_fault(metric)) is not None:
            faults.append(Issue((str(metric),), message, at_key=True))
        elif not isinstance(one, dict | OutcomeConstraint):
            message = f"{described(one)} is not a limit; {rule}"
            faults.append(Issue((metric,), message))
        elif unknown := [key for key in dict(one) if key not in OutcomeConstraint.model_fields]:
            message = f"unknown key {described(unknown[0])}; {_HAS}"
            faults.append(Issue((metric, unknown[0]), message, at_key=True))
    if faults:
        raise UserError(faults)
    return value


class EarlyStoppingSection(Section):
    """Which trials are stopped before the end of their budget; without this section, none."""

    scheduler: str = DEFAULT_RULE.name
    """The stopping rule, by its name."""
    patience: int | None = Field(default=None, ge=1, examples=[5], exclude_if=equal_to(None))
    """Beside any rule: a trial is complete after so many reports without a new best; null: at the
    end of its budget."""

    exempt: Number = Field(default=0, ge=0, le=1, examples=[0.05], exclude_if=equal_to(0))
    """This share of the trials, chosen at random, trains to the end whatever the rule says. Such
    trials show how often the rule stops a trial wrongly; others are stopped as without them."""

    @property
    def rule(self) -> StoppingRule:
        """The stopping rule with its parameters."""
        rule = RULES[self.scheduler]
        return rule(**{key: getattr(self, key) for key in rule.model_fields})


def early_stopping_section(
    rules: Mapping[str, type[StoppingRule]],
) -> type[EarlyStoppingSection]:
    """Return the section for some stopping rules: their names, and the parameters of all."""
    sentences = [f"`{name}` {rule.description}" for name, rule in rules.items()]
    sentences.append(f"`{AUTO}`: one is taken when the sweep is created, and stored.")
    fields: dict[str, Any] = {
        "scheduler": (
            Literal[(*rules, AUTO)],
            Field(default=DEFAULT_RULE.name, description=" ".join(sentences)),
        ),
        **{key: (one.annotation, one) for key, one in parameters(rules.values()).items()},
    }
    return create_model(
        "EarlyStoppingConfig",
        __base__=EarlyStoppingSection,
        __doc__=EarlyStoppingSection.__doc__,
        __module__=__name__,
        **fields,
    )


if TYPE_CHECKING:
    EarlyStoppingConfig = EarlyStoppingSection
else:
    EarlyStoppingConfig = early_stopping_section(RULES)


class PlateauConfig(Section):
    """When a sweep has stopped improving."""

    trials: int | None = Field(default=None, ge=1, examples=[20])
    """The sweep ends when so many trials in a row, complete or pruned, have not improved its best
    value; null: never."""
    min_delta: Number = Field(default=0, ge=0)
    """Only a change by more than this counts as an improvement."""

    @model_validator(mode="after")
    def _delta_needs_trials(self) -> PlateauConfig:
        if self.trials is None and self.min_delta:
            raise ValueError(
                f"min_delta is {self.min_delta:g} and trials is null: without a number of trials "
                "there is no plateau; write for example trials: 20"
            )
        return self


class StopConfig(Section):
    """What ends the whole sweep before all of its trials have run; without this section, nothing.
    Trials that run at that time are stopped."""

    hours: Number | None = Field(default=None, gt=0, examples=[2])
    """The hours during which trials may run, over all attempts of the sweep; null: no limit."""
    value: float | None = Field(default=None, examples=[0.05])
    """The sweep ends when its best trial has reached this value of `metric`; null: never."""
    plateau: PlateauConfig = PlateauConfig()


class ResourcesConfig(Section):
    """The resources of one trial."""

    cpu: Number = Field(default=1, gt=0)
    """CPUs of each process of a trial, and the number of its threads. Loader processes are not
    counted."""
    gpu: Annotated[Literal["auto"] | Number, BeforeValidator(_check_gpu)] = "auto"
    """GPUs of each process of a trial: a share below 1, a whole number, or auto: equal shares,
    with enough memory for the measured steps; with several workers 1. 0 hides all GPUs from the
    trial."""
    workers: int = Field(default=1, ge=1, examples=[2], exclude_if=equal_to(1))
    """The processes (ranks) of one trial, which share each batch; `cpu` and `gpu` are those of
    each process. A trial that has begun keeps its number, unless a resume accepts the change. It
    may be searched."""
    placement: Literal["pack", "spread"] = Field(default="pack", exclude_if=equal_to("pack"))
    """Where the workers of one trial run on a cluster: on as few nodes as possible (pack), or on
    as many (spread)."""
    reuse_workers: bool = Field(default=False, exclude_if=equal_to(False))
    """Whether trials of one process train one after the other in the same process. It saves the
    start of a process for each trial. What a task changes outside of its trial (globals, class
    attributes, caches, settings of libraries) then reaches the next trial, so that results depend
    on the order of the trials, and a resumed sweep may differ from an uninterrupted one."""


def _without_credentials(uri: str) -> str:
    """Check that a URI may be stored unencrypted, and return it."""
    remedy = "leave them out and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    # The path of a file may have an '@'. In the URI of a server it follows credentials.
    if uri.startswith(("sqlite:", "file:")):
        found = CREDENTIALS.search(uri)
    elif is_database(uri):  # its user name is no secret, only its password
        found = _PASSWORD.search(_USER_ALONE.sub("://", uri, count=1))
        remedy = "leave the password out and set PGPASSWORD or PGPASSFILE"
    else:
        found = _ANY_AT.search(uri)
    if found:
        raise UserError(
            "the address holds credentials; a spec is stored and tracked "
            f"unencrypted; {remedy} in the environment"
        )
    return uri


class TrackingConfig(Section):
    """Where the results are recorded."""

    uri: str | None = Field(default=None, min_length=1)
    """The tracking server or database, without a password; null: a store in the root directory."""
    every: int = Field(default=1, ge=1)
    """Steps between two recorded points of a curve; the first point and the last of each epoch
    are always recorded."""

    @field_validator("uri")
    @classmethod
    def _no_credentials(cls, uri: str | None) -> str | None:
        return None if uri is None else _without_credentials(uri)


class NotifyConfig(Section):
    """Where a sweep posts a notification when it ends, stops or fails, when a trial fails, and for
    each new best trial."""

    webhook: str | None = Field(default=None, examples=["${SLACK_WEBHOOK_URL}"])
    """The environment variable with the address that gets notifications as JSON, written as
    `${NAME}`. The address is a secret and is not stored. null: nothing is posted."""

    @field_validator("webhook")
    @classmethod
    def _is_a_variable(cls, text: str | None) -> str | None:
        if text is None:
            return None
        found = _REFERENCE.fullmatch(text)
        if found is None:
            raise UserError(
                "the value is not the name of a variable; the address of a webhook is a secret, "
                "and a spec is stored and tracked unencrypted; put the address in an environment "
                "variable, and write for example ${SLACK_WEBHOOK_URL}"
            )
        if not is_secret(found[1]):
            raise UserError(
                f"{text} is not named like a secret; only the values of variables that are named "
                "so are hidden in logs and messages; choose a name that ends with _WEBHOOK or "
                "_WEBHOOK_URL"
            )
        return text

    @property
    def variable(self) -> str | None:
        """The name of the environment variable with the address."""
        return None if self.webhook is None else self.webhook.removeprefix("${").removesuffix("}")


class StorageConfig(Section):
    """Where the checkpoints of a sweep are stored."""

    checkpoints: str | None = Field(default=None, min_length=1)
    """The object store of the checkpoints, `s3://BUCKET/PREFIX`. The environment has its endpoint
    and credentials (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`). null: the
    sweep's directory."""

    @field_validator("checkpoints")
    @classmethod
    def _is_object_store(cls, address: str | None) -> str | None:
        if address is None:
            return None
        if _ANY_AT.search(address):
            raise UserError(
                "the address holds credentials; a spec is stored and tracked unencrypted; leave "
                "them out and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
            )
        if not _OBJECTS.fullmatch(address):
            raise UserError(
                f"{shown(address)} is not a prefix in an object store; checkpoints are below "
                "s3://BUCKET/PREFIX, made of letters, digits, '.', '-', '_' and single '/', or in "
                "the sweep's directory; write for example s3://my-bucket/sweeps, or null"
            )
        return address.rstrip("/")


_STEP_TIMEOUT = "30m"
_SHORTEST_INTERVAL = 0.1


def _check_step_timeout(value: object) -> object:
    """Return seconds, `off` or None."""
    if value is None or value == "off":
        return value
    rule = "the longest time without progress is a duration above 0, off, or null for automatic"
    seconds = _seconds(value, rule, _STEP_TIMEOUT)
    if seconds <= 0:
        raise UserError(f"{shown(value)} is not above 0; {rule}; write {_STEP_TIMEOUT}, or off")
    return seconds


def _check_interval(value: object) -> object:
    """Return seconds."""
    rule = "the time between two runs of the command is a duration of at least 0.1 s"
    seconds = _seconds(value, rule, "5s")
    if seconds < _SHORTEST_INTERVAL:
        raise UserError(f"{shown(value)} is too short; {rule}; write for example 5s")
    return seconds


def _seconds(value: object, rule: str, example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UserError(
            f"{described(value)} is not a duration; {rule}; write for example {example}"
        )
    try:
        return parse_duration(format(value, "f") if isinstance(value, float) else str(value), "")
    except WrongDuration:
        raise UserError(
            f"{shown(value)} is not a duration, or longer than a year; {rule}; write for example "
            f"{example}"
        ) from None


class FailuresConfig(Section):
    """What happens when a trial fails for another reason than its parameters."""

    max_retries: int = Field(default=0, ge=0, examples=[2])
    """How often a trial is retried that made no progress for `step_timeout`, or that lost its
    process three times in a row without a new checkpoint. Other losses of a process are not
    counted: the trial resumes from its newest checkpoint."""
    same_failure_limit: int = Field(default=3, ge=0)
    """The sweep stops when this many trials fail in the same way, and none succeeds in between; 0:
    never. Failures that depend on parameters do not count: non-finite losses, lack of memory, and
    refused values of searched keys."""
    out_of_memory: Literal["fail", "halve_batch"] = "fail"
    """What a trial does when memory runs out: fail, or resume from its newest checkpoint with
    twice as many micro-batches of half the size, so that its steps stay the same."""
    step_timeout: Annotated[
        float | Literal["off"] | None, BeforeValidator(_check_step_timeout)
    ] = Field(default=None, examples=["30m"])
    """How long a trial may make no progress, such as 30m. Progress is a step, an evaluated batch,
    a finished save, or a yield of a custom loop. After this time its worker writes the stacks of
    its threads to trial.log and is killed, and the trial fails. null: 20 times the slowest
    operation of the same kind so far, at least 10 minutes, and 6 hours for the first; off: no
    limit. Opening the run may always take 10 minutes. Workers on other hosts are not watched. In a
    trial of several workers, each waits so long for the others, by default 30 minutes; one that
    does not come counts as lost. The first may take both times together."""


class PreemptionConfig(Section):
    """How a machine says that it is about to be taken away. Trials there then save at their next
    step and continue on another node; without one, the sweep stops, to be resumed."""

    command: str | None = Field(default=None, min_length=1, examples=["test -e /tmp/notice"])
    """A command of `sh` that runs on each machine of the sweep. It ends with exit code 0 when the
    machine is about to be taken away, and with another one until then. One that takes longer than
    10 s is killed, and gives no notice. null: only Ray and signals give notice."""
    every: Annotated[float, BeforeValidator(_check_interval)] = Field(default=5.0, examples=["5s"])
    """The time between two runs of the command, such as 5s."""


def has_no_command(preemption: PreemptionConfig) -> bool:
    """Return whether the section says nothing; a spec is then written without it."""
    return preemption.command is None


Space = dict[
    str,
    Annotated[
        Distribution,
        BeforeValidator(parse_distribution),
        PlainSerializer(methodcaller("to_data")),  # that of the distribution's own class
    ],
]


class RepeatsConfig(Section):
    """With how many seeds each configuration trains; `repeats: 3` is short for `{seeds: 3}`."""

    seeds: int = Field(default=1, ge=1, examples=[3])
    """Trainings of each configuration. All configurations have the same seeds, so that they are
    compared on the same initial weights and order of samples. 1: each trial has its own seed."""
    folds: int | None = Field(default=None, ge=2, examples=[5])
    """Cross-validation: each configuration trains with so many seeds, and the task's argument
    `fold` is 0, 1, ... of its argument `folds`, so that each seed holds out another part."""
    value: SeedValue = "mean"
    """What the value of a configuration is: the mean or the median of the values of its seeds."""

    @model_validator(mode="before")
    @classmethod
    def _one_seed_for_each_fold(cls, given: object) -> object:
        if not isinstance(given, dict) or not isinstance(folds := given.get("folds"), int):
            return given
        if given.get("seeds", folds) != folds:
            raise UserError(
                f"seeds is {described(given['seeds'])} beside {folds} folds; each fold trains "
                "with one seed; leave seeds out"
            )
        return given | {"seeds": folds}

    @property
    def word(self) -> str:
        """What one training of a configuration is called: `seed` or `fold`."""
        return "seed" if self.folds is None else "fold"

    def fold_of(self, seed: int) -> dict[str, int]:
        """Return the task's arguments for the fold of the `seed`-th training; without folds none.

        Seeds beyond the folds, such as those of extra trials, begin with the first fold again.
        """
        return {} if self.folds is None else {"fold": seed % self.folds, "folds": self.folds}

    def combine(self, values: Sequence[float]) -> float:
        """Return one number for the values of a configuration's seeds; at least one is needed."""
        return combine(values, self.value)


def is_off(repeats: RepeatsConfig) -> bool:
    """Return whether the section says nothing; a spec is then written without it."""
    return repeats == RepeatsConfig()


def from_short_form(value: object) -> Any:
    """Return the section that a number of seeds stands for; other values unchanged."""
    if isinstance(value, dict | RepeatsConfig):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(
            f"{described(value)} is no number of seeds; write for example 3, or "
            "{seeds: 3, value: median}"
        )
    return {"seeds": value}
