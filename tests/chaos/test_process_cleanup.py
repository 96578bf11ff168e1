"""The next command removes what a dead driver left behind, and touches no other Ray.

The processes of a driver's Ray die with it, or soon after; what stays is their directory, and
whatever was just being started.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sweeps.engine.process_cleanup import find_orphans, scratch_directory
from tests.chaos.invariants import Sandbox
from tests.time_limits import scaled

_FOREIGN = """
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20,
         _node_ip_address="127.0.0.1")

@ray.remote
def work(x):
    return x + 1

print(ray.get(work.remote(1)), flush=True)
input()
print(ray.get(work.remote(2)), flush=True)
"""


@pytest.fixture
def foreign_ray() -> Iterator[subprocess.Popen[str]]:
    """Somebody else's Ray, which works."""
    child = subprocess.Popen(
        [sys.executable, "-c", _FOREIGN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "2\n"
    yield child
    child.kill()
    child.communicate()


@pytest.mark.chaos
@pytest.mark.parametrize("cleaner", ["doctor", "run"])
def test_next_command_cleans_up_only_the_dead_drivers_ray(
    sandbox: Sandbox, foreign_ray: subprocess.Popen[str], cleaner: str
) -> None:
    driver, _ = sandbox.run_to("forward", 20)
    assert driver.token is not None
    scratch = scratch_directory(driver.token)
    driver.kill()
    assert scratch.exists()
    if cleaner == "doctor":
        found = json.loads(sandbox.cli("doctor", "--json").stdout)
        (finding,) = [one for one in found if one["what"] == "left-overs"]
        assert "dead drivers" in finding["detail"]
    else:  # of another sweep, in another root
        other = sandbox.directory / "elsewhere"
        sandbox.cli.ok("run", "chaos.yaml", "--root", str(other), "-s", "trials=1")
    assert not scratch.exists()
    assert find_orphans(driver.token) == []
    assert foreign_ray.poll() is None
    printed, _ = foreign_ray.communicate("\n", timeout=scaled(60))
    assert printed == "3\n"
