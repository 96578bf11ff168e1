"""The resources of trials as far as this machine tells them before a run.

A cluster is never asked: only a run connects to it and refuses what it cannot hold. What must not
live here: how trials share the nodes that exist (`resources`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import NamedTuple

from sweeps.engine.cluster_address import VARIABLE, find_address
from sweeps.engine.resources import (
    Gpu,
    GroupTooLarge,
    Machine,
    ResourceError,
    ResourcePlan,
    StepMemory,
    plan_sweep,
)
from sweeps.spec.spec import SweepSpec

_NOT_ASKED = f"{VARIABLE} names a cluster, which only a run asks"
_MOST_NODES = 10_000
"""More machines than any cluster has: a spec that takes more is wrong."""


class PlannedResources(NamedTuple):
    """The resources of each trial, before a run."""

    plan: ResourcePlan
    memory: int | None
    """The memory of the machine in bytes; None where trials need a cluster."""
    caution: str | None
    """What the plan is for, unless it is this machine alone."""


def planned_resources(
    spec: SweepSpec,
    machine: Machine,
    step: StepMemory | None = None,
    environ: Mapping[str, str] = os.environ,
) -> PlannedResources:
    """Plan for this machine, or for the smallest cluster of a trial that it cannot hold."""
    is_named = find_address(None, environ) is not None

    _, workers = spec.searched_workers or (1, spec.resources.workers)
    try:
        caution = f"{_NOT_ASKED}; the plan is for this machine" if is_named else None
        return PlannedResources(plan_sweep(spec, [machine], step), machine.memory, caution)
    except ResourceError as error:
        if isinstance(error, GroupTooLarge):
            node, count = machine, math.ceil(workers / error.fitting)
            caution = (
                f"{error.what}: it takes a cluster, which `sweep run` joins by --address or "
                f"{VARIABLE}; the plan is for {count} machines like this one"
            )
        elif is_named:
            node, count = _holding_one(spec), workers
            caution = (
                f"{machine} cannot hold one worker of a trial; {_NOT_ASKED}; the plan is for one "
                "trial at a time on nodes that can, and its times are those of this machine"
            )
        else:
            raise
        if count > _MOST_NODES:
            raise
        return PlannedResources(plan_sweep(spec, [node] * count, step), None, caution)


def _holding_one(spec: SweepSpec) -> Machine:
    """Return a node that holds one worker of a trial, and no other."""
    gpu = 0 if spec.resources.gpu == "auto" else spec.resources.gpu
    gpus = (Gpu("unknown", 0),) * math.ceil(gpu)
    return Machine("node", math.ceil(spec.resources.cpu), 0, gpus)
