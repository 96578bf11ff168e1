"""The NetworkPolicies of the KubeRay file: which pod reaches which, by Kubernetes' own rules.

What must not live here: the RayCluster itself (`tests/integration/test_docker_files.py`).
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

KUBERAY = Path(__file__).parents[2] / "docker" / "kuberay"
TRACKING = "192.0.2.10"
OBJECT_STORE = "198.51.100.10"
STRANGER = {"app": "stranger"}
OTHER_CLUSTER = {"ray.io/cluster": "another", "ray.io/node-type": "head"}
HERE = {"kubernetes.io/metadata.name": "default"}
SYSTEM = {"kubernetes.io/metadata.name": "kube-system"}
DNS = {"k8s-app": "kube-dns"}

Labels = dict[str, str]


def _documents(name: str) -> list[Any]:
    return list(YAML(typ="safe").load_all((KUBERAY / name).read_text(encoding="utf-8")))


POLICIES = _documents("networkpolicy.yaml")
(CLUSTER,) = [one for one in _documents("raycluster.yaml") if one["kind"] == "RayCluster"]


def _pod(group: Any, node_type: str) -> Labels:
    """The labels of a group's pods: the template's, and what KubeRay adds."""
    own = group["template"].get("metadata", {}).get("labels", {})
    labels: Labels = own | {
        "ray.io/cluster": CLUSTER["metadata"]["name"],
        "ray.io/node-type": node_type,
    }
    return labels


HEAD = _pod(CLUSTER["spec"]["headGroupSpec"], "head")
WORKERS = [_pod(group, "worker") for group in CLUSTER["spec"]["workerGroupSpecs"]]
PODS = [HEAD, *WORKERS]


def _selects(selector: Any, labels: Labels) -> bool:
    assert set(selector) <= {"matchLabels"}, "this test knows no other selector"
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def _is_peer(peer: Any, other: Labels | str, namespace: Labels) -> bool:
    if isinstance(other, str):
        block = peer.get("ipBlock")
        return bool(block and ipaddress.ip_address(other) in ipaddress.ip_network(block["cidr"]))
    if "ipBlock" in peer:
        return False
    at_home = (
        _selects(peer["namespaceSelector"], namespace)
        if "namespaceSelector" in peer
        else namespace == HERE
    )
    return at_home and _selects(peer.get("podSelector", {}), other)


def _lets(
    way: str, pod: Labels, other: Labels | str, port: tuple[str, int], namespace: Labels = HERE
) -> bool:
    """Whether a pod's policies let it be reached (Ingress), or reach (Egress), another."""
    mine = [
        one["spec"]
        for one in POLICIES
        if way in one["spec"]["policyTypes"] and _selects(one["spec"]["podSelector"], pod)
    ]
    if not mine:
        return True  # whom no policy selects is open
    return any(
        (not (peers := rule.get("from" if way == "Ingress" else "to")))
        or any(_is_peer(peer, other, namespace) for peer in peers)
        for spec in mine
        for rule in spec.get(way.lower(), [])
        if not rule.get("ports") or port in [(p["protocol"], p["port"]) for p in rule["ports"]]
    )


def test_the_policies_are_for_pods_of_the_ray_cluster() -> None:
    assert {(one["apiVersion"], one["kind"]) for one in POLICIES} == {
        ("networking.k8s.io/v1", "NetworkPolicy")
    }
    for one in POLICIES:
        assert any(_selects(one["spec"]["podSelector"], pod) for pod in PODS)
        assert not _selects(one["spec"]["podSelector"], STRANGER)
        assert not _selects(one["spec"]["podSelector"], OTHER_CLUSTER)
        # The API server drops, without a word, what stands in the wrong place.
        assert set(one["spec"]) <= {"podSelector", "policyTypes", "ingress", "egress"}
        for rule in one["spec"].get("ingress", []):
            assert set(rule) <= {"from", "ports"}
        for rule in one["spec"].get("egress", []):
            assert set(rule) <= {"to", "ports"}


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod["ray.io/node-type"])
@pytest.mark.parametrize("port", [6379, 8076, 40000])
def test_head_and_workers_reach_each_other(pod: Labels, port: int) -> None:
    for other in PODS:
        assert _lets("Egress", pod, other, ("TCP", port))
        assert _lets("Ingress", other, pod, ("TCP", port))


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod["ray.io/node-type"])
@pytest.mark.parametrize("port", [53, 443, 6379, 8076, 8265, 40000])
def test_other_pods_reach_nothing(pod: Labels, port: int) -> None:
    for stranger in (STRANGER, OTHER_CLUSTER):
        assert not _lets("Ingress", pod, stranger, ("TCP", port))
    assert not _lets("Ingress", pod, HEAD, ("TCP", port), {"kubernetes.io/metadata.name": "b"})
    assert not _lets("Ingress", pod, TRACKING, ("TCP", port))


def test_the_head_alone_reaches_the_tracking_server() -> None:
    assert _lets("Egress", HEAD, TRACKING, ("TCP", 443))
    assert not _lets("Egress", HEAD, TRACKING, ("TCP", 22))
    for worker in WORKERS:
        assert not _lets("Egress", worker, TRACKING, ("TCP", 443))


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod["ray.io/node-type"])
def test_pods_reach_only_dns_and_the_object_store(pod: Labels) -> None:
    for protocol in ("UDP", "TCP"):
        assert _lets("Egress", pod, DNS, (protocol, 53), SYSTEM)
    assert not _lets("Egress", pod, DNS, ("TCP", 443), SYSTEM)
    assert not _lets("Egress", pod, STRANGER, ("UDP", 53), SYSTEM)
    assert not _lets(
        "Egress", pod, DNS, ("UDP", 53)
    )  # a pod of our namespace that calls itself so
    assert _lets("Egress", pod, OBJECT_STORE, ("TCP", 443))
    for address in ("169.254.169.254", "10.96.0.1", "8.8.8.8", "198.51.100.11"):
        assert not _lets("Egress", pod, address, ("TCP", 443))
    for stranger in (STRANGER, OTHER_CLUSTER):
        assert not _lets("Egress", pod, stranger, ("TCP", 443))
