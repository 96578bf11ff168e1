"""The sections that only a sweep has, with the rules of their fields, and the rule for names.

What must not live here: how sections fit together (`checks`), and a training run's own sections
(`trainable.config`).
"""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, field_validator

from sweeps.problems import Refused
from sweeps.scalars import shown
from sweeps.space import Distribution, parse_distribution
from tracking.address import is_database
from trainable.config import Section

_LONGEST_NAME = 100
# The tracking store's own, beside the sweeps' directories.
_RESERVED_NAMES = {"mlflow.db", "mlartifacts"}
CREDENTIALS = re.compile(r"://[^/?#\s]*@")
_ANY_AT = re.compile(r"://\S*@")
_USER_ALONE = re.compile(r"://[^/?#\s:@]*@")
_PASSWORD = re.compile(rf"{_ANY_AT.pattern}|[?&]\w*password=")


class InvalidName(Refused):
    """A sweep's name cannot become a directory."""


def check_name(name: str) -> str:
    """Return a sweep's name when it may become a directory; the only way from names to paths.

    Raises:
        InvalidName: With value, rule and remedy.
    """
    visible = shown(name)
    rule = "a name becomes a directory"
    if not name:
        raise InvalidName(f"the name is empty; {rule}; write for example digits")
    if len(name.encode(errors="replace")) > _LONGEST_NAME:
        raise InvalidName(
            f"{visible} has {len(name)} characters; {rule} and holds at most "
            f"{_LONGEST_NAME} bytes; choose a shorter one"
        )
    if any(unicodedata.category(c).startswith("C") for c in name):
        raise InvalidName(
            f"{visible} holds a control character; {rule}; use letters, digits, '-' and '_'"
        )
    if "/" in name or "\\" in name:
        raise InvalidName(
            f"{visible} holds a path separator; {rule} of that name below the root; "
            "use --root to choose another place"
        )
    if name[0] in ".-" or ".." in name or name != name.strip():
        raise InvalidName(
            f"{visible} begins with '.', '-' or a blank, ends with a blank, or holds "
            f"'..'; {rule}; use letters, digits, '-' and '_'"
        )
    if name.lower() in _RESERVED_NAMES:
        raise InvalidName(
            f"{visible} is where the embedded tracking store lives; {rule} beside it; "
            "choose another name"
        )
    return name


def _plain_number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


Number = Annotated[float, PlainSerializer(_plain_number)]
"""A number that is written without '.0' when it is whole."""


def _check_gpu(value: object) -> object:
    rule = "a GPU ask is 'auto', 0, a share below 1, or a whole number"
    text = shown(value) if not isinstance(value, list | dict) else "a list or a mapping"
    if value == "auto":
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Refused(f"{text} is not a GPU ask; {rule}; write auto, 0.5 or 1")
    if value < 0:
        raise Refused(f"{text} is negative; {rule}; write 0 for none")
    if value > 1 and not float(value).is_integer():
        raise Refused(
            f"{text} is neither below 1 nor whole; {rule}; write 0.5 to share a GPU "
            "between two trials, or 2 for two GPUs"
        )
    return value


class SearchConfig(Section):
    """How the next trial's parameters are chosen."""

    sampler: Literal["tpe", "random", "gp", "cmaes", "qmc"] = "tpe"
    """The algorithm that proposes parameters."""
    startup_trials: int = Field(default=10, ge=0)
    """Trials drawn at random before the sampler learns from results."""


class EarlyStoppingConfig(Section):
    """Which trials are stopped before their budget is spent; without this section, none."""

    scheduler: Literal["asha", "none"] = "asha"
    """`asha` continues the best 1/reduction of each rung; `none` lets every trial finish."""
    grace_epochs: int = Field(default=1, ge=1)
    """Epochs that every trial gets; below `budget.epochs`."""
    reduction: int = Field(default=3, ge=2)
    """One trial in this many is continued beyond a rung; also the factor between two rungs."""


class ResourcesConfig(Section):
    """What one trial gets."""

    cpu: Number = Field(default=1, gt=0)
    """CPUs of one trial; also the number of its threads. Loader processes come on top."""
    gpu: Annotated[Literal["auto"] | Number, BeforeValidator(_check_gpu)] = "auto"
    """GPUs of one trial: a share below 1, a whole number, or auto: an equal share of each, with
    room for what its steps were measured to take. 0 hides them from it."""


class TrackingConfig(Section):
    """Where people look at the results."""

    uri: str | None = Field(default=None, min_length=1)
    """The tracking server or database, without a password; null: a store in the root directory."""
    every: int = Field(default=1, ge=1)
    """Steps between two recorded points of a curve; the first and each epoch's last stay."""

    @field_validator("uri")
    @classmethod
    def _no_credentials(cls, uri: str | None) -> str | None:
        remedy = "leave them out and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        # A path may hold an '@'; in the address of a server it can only stand behind credentials.
        if uri is None or uri.startswith(("sqlite:", "file:")):
            found = CREDENTIALS.search(uri or "")
        elif is_database(uri):  # whose user is no secret: the password beside it is
            found = _PASSWORD.search(_USER_ALONE.sub("://", uri, count=1))
            remedy = (
                "leave the password out (postgresql://USER@HOST/DATABASE) and set PGPASSWORD or "
                "PGPASSFILE"
            )
        else:
            found = _ANY_AT.search(uri)
        if found:
            raise Refused(
                "the address holds credentials; a spec is stored and tracked in "
                f"clear; {remedy} in the environment"
            )
        return uri


class FailuresConfig(Section):
    """What happens when a trial dies of something that is not its parameters' fault."""

    max_retries: int = Field(default=0, ge=0, examples=[2])
    """How often more a trial is tried again that has lost its process three times in a row without
    having committed a checkpoint. Other losses are never counted: it goes on from its newest
    one."""
    same_failure_limit: int = Field(default=3, ge=0)
    """The sweep stops when this many trials fail in the same way with none getting through in
    between; 0: never. Non-finite losses and memory depend on parameters and do not count."""
    out_of_memory: Literal["fail", "halve_batch"] = "fail"
    """What a trial does when the memory does not suffice: fail, or take the same steps in twice as
    many micro-batches of half the size, from its newest checkpoint."""


Space = dict[
    str,
    Annotated[
        Distribution, BeforeValidator(parse_distribution), PlainSerializer(Distribution.to_data)
    ],
]
