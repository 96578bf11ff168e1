"""The attributes in which a ledger keeps what Optuna has no field for, and how they are read.

What must not live here: SQL (`reader`), and what a trial's fields mean (`trials`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, NamedTuple

from redaction.escapes import printable, visible
from sweeps.ledger.failed_attempts import failed_attempts_in, reopened_in
from sweeps.ledger.over_seeds import Repeats
from sweeps.ledger.reasons import clipped
from sweeps.statistics.feasibility import Limit, Limits
from sweeps.stopping.metric_values import Value

ATTEMPT = "attempt "
"""Study attributes, numbered from 1: the host, command and versions of each driver."""
SECONDS = "seconds"
"""A study attribute: for how many seconds the trials have run."""
RUN_FROM = "run_from"
"""A study attribute: the host, directory and inode of the sweep's files, and the directory of its
code, when a driver last opened it."""
PLAN = "plan"
"""A study attribute: what a driver expected the sweep to take, when it began to train."""
ABORT = "stopped_itself"
"""A study attribute: the failure for which the last driver stopped the sweep; null: for none."""
SIGNALS = "signals"
"""A trial attribute: the health signals of its last report."""
LACKS_MODEL = "lacks_model"
"""A trial attribute: that a custom loop saves a state without a model, so none can be exported."""
LOST_WORKERS = "lost_workers"
"""A trial attribute: why workers were lost that another one replaced, in sentences."""
MOST_LOST_WORKERS = 20
"""How many of these sentences are kept."""
GENERATION = "generation"
"""A study attribute: the epoch of the last exploit decision of a population."""
WARM_START = "gradsweep:warm_start"
"""A study's system attribute: the trials of earlier sweeps. Read only on request."""
DEVICES = "devices"
"""An entry of a trial's progress: CPU-seconds, GPU-seconds, and its seconds that these count."""
LINEAGE = "lineage"
"""A trial attribute: each change of a population's trial, with donor, epoch and parameters."""
ACCUMULATION = "accumulation"
"""A trial attribute: micro-batches per step, if it differs from the configuration."""
PLACE = "place"
"""A trial attribute: its place among the trials of the search, if it is not its number."""
EXEMPT = "exempt"
"""A trial attribute: that the trial is exempt from early stopping."""
WOULD_STOP = "would_stop"
"""A trial attribute of an exempt trial: at which report it would have been stopped, and why."""
PROMOTED = "promoted"
"""A trial attribute: the report of the rung from which it was last promoted."""
PRIORS = "priors"
"""A trial attribute: the digest of the priors around which its values were drawn."""
ROLE = "role"
"""A trial attribute: role, origin and common seed, where they are not those of `TrialSummary`."""
REPEATS = "repeats"
"""A study attribute: the spec's `repeats`, if each configuration trains with several seeds."""
CONSTRAINTS = "constraints"
"""A study attribute: the limits of the spec's `constraints`, if there are any."""
LIMITED = "limited"
"""In a trial's progress: the metrics that only have limits, at the report of its value."""
SELECT = "select"
"""A study attribute: the spec's `select`, if it is not `checkpoint`."""
ENDED = "ended"
"""A trial attribute: how many of the sweep's trials had ended, this one included. Times do not
order the ends reliably, because a clock may be set back."""
REPORT = "report "
"""Trial attributes of a sweep with several metrics or with limits on others, by epoch: all values.
Optuna stores one value per report, and TPE fails on such a trial if it is pruned and the study has
several directions."""

Role = Literal["search", "finish", "confirm", "repeat"]
"""Why a trial exists: the search suggested it, or it trains the point of another one, its origin:
to the end that early stopping took from it, again to confirm its value, or with another seed."""
COUNTED: tuple[Role, ...] = ("search", "finish")
"""The roles of trials that count among the best on their own."""
ORIGIN_COLUMNS: dict[Role, str] = {"finish": "finishes", "confirm": "confirms"}
"""What tables call the origin of an extra trial, by its role; tags add `gradsweep.`."""
SERIES_MODULES: dict[Role, str] = {"confirm": "sweeps.trust.confirm"}
"""The modules of extra trials that are added in turns; see `reconcile.extra_training`."""
SERIES = "series"
"""A study attribute: the role of the last such extra trials, and what was asked for."""


class Abort(NamedTuple):
    """The failure for which a driver stopped a sweep before all of its trials had ended."""

    key: str
    """The key of the spec that says so: `failures`, or a key below it."""
    why: str
    """Which trials failed and how, in one line."""
    trial: int
    """The number of the last of these trials."""
    kind: str
    """The kind of the failure."""


class PbtPerturbation(NamedTuple):
    """A change by PBT: a trial resumes from another trial's checkpoint with other parameters."""

    epoch: int
    """Epochs completed by then."""
    donor: int
    """The number of the other trial."""
    params: dict[str, Any]
    """The new parameters."""


def is_of_search(attributes: Mapping[str, Any]) -> bool:
    """Return whether the search suggested a trial, by the trial's user attributes."""
    return ROLE not in attributes or bool(attributes[ROLE]["role"] == "search")


def repeated_by(attributes: Mapping[str, Any]) -> int | None:
    """Return the configuration that a trial trains with a further seed; None for other roles."""
    role = attributes.get(ROLE, {})
    return int(role["origin"]) if role.get("role") == "repeat" else None


def role_attributes(
    role: Role, origin: int | None, seed_index: int | None, *, split: bool = False
) -> dict[str, Any]:
    """Return the user attributes by which `trial_fields` knows why a trial exists."""
    splits = {"split": True} if split else {}
    return {ROLE: {"role": role, "origin": origin, "seed_index": seed_index, **splits}}


def _role_in(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return dict(attributes.get(ROLE, {"role": "search"}))


def _exemption_in(attributes: Mapping[str, Any]) -> dict[str, Any]:
    epoch, reason = attributes.get(WOULD_STOP, (None, None))
    return {
        "exempt": bool(attributes.get(EXEMPT, False)),
        "would_stop_at": None if epoch is None else int(epoch),
        "would_stop_reason": None if reason is None else printable(str(reason)),
    }


def trial_fields(suggested: dict[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial's fields from its stored parameters and user attributes."""
    attributes = clipped(attributes)
    progress = attributes.get("progress", {})
    lineage = tuple(PbtPerturbation(*one) for one in attributes.get(LINEAGE, ()))
    return {
        "suggested": suggested,
        "lineage": lineage,
        "params": lineage[-1].params if lineage else suggested,
        "attempts": int(attributes.get("attempts", 0)),
        # The user's code wrote these texts.
        "reason": printable(reason) if (reason := attributes.get("reason")) else None,
        "traceback": visible(text) if (text := attributes.get("traceback")) else None,
        "step": int(progress.get("step", 0)),
        "epoch": int(progress.get("epoch", 0)),
        "started_at": _local(progress.get("started_ms")),
        "ended_at": _local(progress.get("ended_ms")),
        "seconds": None if (time := progress.get("seconds")) is None else float(time),
        **_device_seconds(progress),
        "best_step": progress.get("best_step"),
        "best_epoch": progress.get("best_epoch"),
        "limited": tuple(progress.get(LIMITED, ())),
        "signals": tuple(attributes[SIGNALS]) if SIGNALS in attributes else None,
        "lacks_model": bool(attributes.get(LACKS_MODEL, False)),
        "lost_workers": tuple(printable(str(one)) for one in attributes.get(LOST_WORKERS, ())),
        "accumulation": attributes.get(ACCUMULATION),
        "finish_order": attributes.get(ENDED, 0),
        "failed_attempts": failed_attempts_in(attributes),
        "reopened": reopened_in(attributes),
        **_role_in(attributes),
        "stored_place": attributes.get(PLACE),
        "promoted_at": attributes.get(PROMOTED),
        **_exemption_in(attributes),
        "from_priors": PRIORS in attributes,
    }


def _device_seconds(progress: Mapping[str, Any]) -> dict[str, Any]:
    """Return the device-seconds of a trial, if any were counted."""
    if DEVICES not in progress:
        return {}
    cpu, gpu = progress[DEVICES]
    return {"cpu_seconds": float(cpu), "gpu_seconds": float(gpu)}


def _local(at_ms: int | None) -> datetime | None:
    return None if at_ms is None else datetime.fromtimestamp(at_ms / 1000)


def reports_in(attributes: Mapping[str, Any]) -> dict[int, list[float]]:
    """Return the values by epoch from the attributes of a trial with several metrics."""
    found = {k.removeprefix(REPORT): v for k, v in attributes.items() if k.startswith(REPORT)}
    return {epoch: found[str(epoch)] for epoch in sorted(map(int, found))}


def compared_values(
    attributes: Mapping[str, Any], intermediate: Mapping[int, float]
) -> Mapping[int, Value]:
    """Return what each report of a trial brought, as stopping rules receive it."""
    several = {epoch: tuple(values) for epoch, values in reports_in(attributes).items()}
    return several or intermediate


def attempts_in(attributes: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the tags of each driver from a study's attributes, in order."""
    names = (f"{ATTEMPT}{number}" for number in itertools.count(1))
    return [attributes[name] for name in itertools.takewhile(attributes.__contains__, names)]


def repeats_in(attributes: Mapping[str, Any]) -> Repeats | None:
    """Return how many seeds each configuration gets, from a study's attributes; None: one."""
    return Repeats(*attributes[REPEATS]) if REPEATS in attributes else None


def limits_in(attributes: Mapping[str, Any], num_metrics: int) -> Limits:
    """Return the limits on reported metrics, from a study's attributes."""
    return Limits(num_metrics, tuple(Limit(*one) for one in attributes.get(CONSTRAINTS, ())))


def abort_in(attributes: Mapping[str, Any]) -> Abort | None:
    """Return the stored failure that stopped the sweep, from a study's attributes."""
    found = attributes.get(ABORT)
    if found is None:
        return None
    key, why, trial, kind = found
    return Abort(str(key), printable(str(why)), int(trial), str(kind))
