"""What `check` says of trials that this machine cannot hold."""

from __future__ import annotations

import pytest

from sweeps.engine.planned_resources import planned_resources
from sweeps.engine.resources import Gpu, GroupTooLarge, Machine, ResourceError
from sweeps.spec.spec import SweepSpec
from tests.specs import make_spec

GIB = 1024**3
NAMED = {"RAY_ADDRESS": "10.0.0.5:6379"}


def _spec(resources: str, space: str = "{}") -> SweepSpec:
    return make_spec(space=space, resources=f"{{{resources}}}")


def _machine(cpus: int, gpus: int = 0) -> Machine:
    return Machine("vm", cpus, 64 * GIB, (Gpu("H100", 80 * GIB),) * gpus)


@pytest.mark.parametrize("environ", [{}, NAMED])
@pytest.mark.parametrize(
    ("resources", "space", "machine", "machines", "expected"),
    [
        ("workers: 8", "{}", _machine(2), 4, (1, 0, 8, 1)),
        ("workers: 8, gpu: 1, cpu: 4", "{}", _machine(16, 4), 2, (4, 1, 8, 1)),
        ("workers: 7", "{}", _machine(3), 3, (1, 0, 7, 1)),
        ("cpu: 2", "{resources.workers: {int: [1, 4]}}", _machine(4), 2, (2, 0, 4, 1)),
    ],
)
def test_group_larger_than_this_machine_is_planned_for_a_cluster(
    resources: str,
    space: str,
    machine: Machine,
    machines: int,
    expected: tuple[float, float, int, int],
    environ: dict[str, str],
) -> None:
    found = planned_resources(_spec(resources, space), machine, environ=environ)
    made = found.plan
    assert (made.cpu, made.gpu, made.workers, made.concurrency) == expected
    assert found.memory is None
    assert found.caution is not None
    assert f"more than {machine} can hold: it takes a cluster" in found.caution
    assert found.caution.endswith(f"for {machines} machines like this one")


@pytest.mark.parametrize("resources", ["gpu: 1", "cpu: 4", "workers: 3, gpu: 2, cpu: 8"])
def test_larger_worker_is_refused_unless_a_cluster_is_named(resources: str) -> None:
    spec = _spec(resources)
    with pytest.raises(ResourceError, match="more than any node has"):
        planned_resources(spec, _machine(2), environ={})
    found = planned_resources(spec, _machine(2), environ=NAMED)
    asked = spec.resources
    assert (found.plan.cpu, found.plan.workers) == (asked.cpu, asked.workers)
    assert found.plan.gpu == (0 if asked.gpu == "auto" else asked.gpu)
    assert (found.plan.concurrency, found.memory) == (1, None)
    assert found.caution is not None
    assert "cannot hold one worker of a trial; RAY_ADDRESS names a cluster" in found.caution


def test_machine_that_holds_the_trials_is_planned_for() -> None:
    here = planned_resources(_spec("workers: 2"), _machine(2), environ={})
    assert (here.plan.concurrency, here.memory, here.caution) == (1, 64 * GIB, None)
    named = planned_resources(_spec("workers: 2"), _machine(2), environ=NAMED)
    assert named[:2] == here[:2]
    assert named.caution is not None
    assert "which only a run asks; the plan is for this machine" in named.caution


def test_group_that_no_cluster_holds_is_refused() -> None:
    with pytest.raises(GroupTooLarge, match="can hold; a trial starts when all"):
        planned_resources(_spec("workers: 1000000000"), _machine(2), environ=NAMED)
