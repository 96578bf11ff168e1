"""A trial that this machine cannot hold: `check` says so, and `run` refuses it."""

from __future__ import annotations

from sweeps.engine.resources import Machine
from tests.integration.commandline import TINY, CommandLine

MACHINE = Machine.probe()
LARGE = f"{TINY}\nresources: {{workers: {MACHINE.cpus + 1}, cpu: 1, gpu: 0}}\n"
TWO_LIKE_THIS = f"more than {MACHINE} can hold: it takes a cluster"


def test_check_is_for_a_cluster(cli: CommandLine) -> None:
    cli.write("large.yaml", LARGE)
    shown = " ".join(cli.ok("check", "large.yaml").split())
    assert "the plan is for 2 machines like this one" in shown
    found = cli.json("check", "large.yaml")
    assert any(TWO_LIKE_THIS in one for one in found["warnings"])
    assert found["plan"]["trials_at_once"] == 1
    assert found["plan"]["machine_memory_bytes"] is None
    assert found["resources"]["workers"] == MACHINE.cpus + 1
    assert not cli.root.exists()


def test_run_is_refused(cli: CommandLine) -> None:
    cli.write("large.yaml", LARGE)
    ended = cli("run", "large.yaml")
    assert ended.returncode == 2
    assert f"more than {MACHINE} can hold; a trial starts when" in " ".join(ended.stderr.split())
    assert not cli.root.exists()
