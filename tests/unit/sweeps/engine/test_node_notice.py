"""The user's command, run by real shells, and what a watch calls."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sweeps.engine import node_notice
from sweeps.engine.node_notice import NoticeHandlers, wait_for_notice, watching
from tests.integration.commandline import wait_until


class Told:
    """What a watch has called."""

    def __init__(self) -> None:
        self.left, self.warnings = threading.Event(), list[str]()
        self.handlers = NoticeHandlers(self.left.set, self._move, self.warnings.append)

    def _move(self, node: str, address: str) -> None:
        pytest.fail(f"one machine has no node {node} at {address}")


def _never(_: float) -> bool:
    pytest.fail("it runs once")


def test_exit_code_0_is_the_notice(tmp_path: Path) -> None:
    file, pauses = tmp_path / "notice", []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            file.touch()

    assert wait_for_notice(f"test -e {file} | cat; test -e {file}", 0.5, pause) is None
    assert pauses == [0.5] * 3
    assert wait_for_notice("false", 0.1, lambda _: True) is None


@pytest.mark.parametrize("command", ["no-such-program --now", "/etc/passwd"])
def test_command_that_cannot_run_is_named(command: str) -> None:
    fault = wait_for_notice(command, 0.1, _never)
    assert fault is not None
    for part in ("preemption.command cannot be run (sh: ", command.split()[0], "correct it"):
        assert part in fault


def test_command_that_takes_too_long_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(node_notice, "COMMAND_SECONDS", 0.3)
    pid, began = tmp_path / "pid", time.monotonic()
    slow = f"sh -c 'echo $$ > {pid}; sleep 60'; true"
    assert wait_for_notice(slow, 0.1, lambda _: True) is None
    assert time.monotonic() - began < 30
    wait_until(lambda: not Path("/proc", pid.read_text().strip()).exists(), seconds=10)


def test_driver_of_one_machine_leaves_once(tmp_path: Path) -> None:
    told, file = Told(), tmp_path / "notice"
    with watching(f"test -e {file}", 0.05, told.handlers, in_cluster=False):
        assert not told.left.wait(0.3)
        file.touch()
        assert told.left.wait(10)
    assert told.warnings == []


@pytest.mark.parametrize("command", [None, "false"])
def test_nothing_is_called_without_a_notice(command: str | None) -> None:
    told = Told()
    with watching(command, 0.05, told.handlers, in_cluster=False):
        assert not told.left.wait(0.2)
    assert not told.left.wait(0.3), "the end of a watch is no notice"
    assert told.warnings == []


def test_driver_warns_once_of_a_command_that_cannot_run() -> None:
    told = Told()
    with watching("no-such-program", 0.01, told.handlers, in_cluster=False):
        wait_until(lambda: told.warnings, seconds=10)
        assert not told.left.wait(0.2)
    assert len(told.warnings) == 1


class FakeCluster:
    """Nodes, as Ray describes them; the first is the head, the second the driver's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import ray

        self.alive, self.draining, self.drained = list("hdab"), set[str](), list[str]()
        context = type("Context", (), {"gcs_address": "head:1", "get_node_id": lambda _: "d"})
        monkeypatch.setattr(ray, "get_runtime_context", context)
        monkeypatch.setattr(ray, "nodes", self._nodes)
        monkeypatch.setattr(node_notice, "draining_nodes", lambda: set(self.draining))
        monkeypatch.setattr(node_notice, "drain_node", lambda node, *_: self.drained.append(node))

    def _nodes(self) -> list[dict[str, Any]]:
        heads = {"h": {"node:__internal_head__": 1.0}}
        return [
            {
                "NodeID": node,
                "Alive": node in self.alive,
                "NodeManagerAddress": f"{node}:1",
                "Resources": heads.get(node, {}),
            }
            for node in "hdab"
        ]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    return FakeCluster(monkeypatch)


def test_each_node_is_told_once(cluster: FakeCluster) -> None:
    moved: list[tuple[str, str]] = []
    left: list[int] = []
    handlers = NoticeHandlers(
        lambda: left.append(1), lambda *node: moved.append(node), lambda _: None
    )
    nodes = node_notice._Nodes(None, 1.0, handlers)
    nodes.look()
    cluster.draining.add("a")
    nodes.look()
    nodes.look()
    assert (moved, left, cluster.drained) == ([("a", "a:1")], [], [])
    cluster.alive.remove("b")
    cluster.draining |= {"b", "d"}
    nodes.look()
    assert (moved, left) == ([("a", "a:1")], [1]), "a node that is gone has no trials"
    cluster.draining.add("h")
    nodes.look()
    assert len(left) == 2


def test_node_whose_command_gives_notice_is_drained(cluster: FakeCluster) -> None:
    told, moved = Told(), list[tuple[str, str]]()
    handlers = told.handlers._replace(move=lambda *node: moved.append(node))
    nodes = node_notice._Nodes(None, 1.0, handlers)
    nodes._noticed.add("a")
    nodes.look()
    nodes.look()
    assert (moved, cluster.drained) == ([("a", "a:1")], ["a", "a"]), (
        "until Ray says that it drains"
    )
    cluster.draining.add("a")
    nodes.look()
    assert (moved, cluster.drained) == ([("a", "a:1")], ["a", "a"])
    assert not told.left.is_set()
    nodes._noticed.add("d")
    nodes.look()
    assert told.left.is_set()
    assert cluster.drained == ["a", "a"], "the driver leaves its own machine by itself"
