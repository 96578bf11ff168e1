"""Connect to a running Ray cluster, and detect its loss.

The driver never starts, stops or cleans up the cluster. When the driver ends, even by SIGKILL, Ray
ends the driver's job with all its actors. What must not live here: finding the address
(`cluster_address`), the check of each node (`node_checks`), and uploading code (`code_upload`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from sweeps.engine.cluster_address import ClusterRefused, is_loopback, locate, tcp_probe
from sweeps.engine.code_upload import CodePackage, package_code
from sweeps.engine.node_checks import check_nodes
from sweeps.engine.ray_compat.environment import (
    CLUSTER_WORKERS,
    configure_tune,
    set_cluster_env,
)
from sweeps.engine.ray_compat.ray_internals import (
    is_version_mismatch,
    node_of_lost_actor,
    preserve_signal_handlers,
    query_head,
    raylet_socket,
    refuses_token,
)
from sweeps.engine.ray_watch import PATIENCE_SECONDS, Loss, LossHandler, watched
from sweeps.engine.resources import Machine
from sweeps.exit_codes import WRONG_INPUT
from trainable.private_files import UMASK_VARIABLE

_CONNECT_SECONDS = 25.0
"""How long connecting may take; Ray itself would wait for minutes."""
_BYTES_PER_SECOND = 5 * 2**20
"""The lowest expected speed of packing and sending the code package."""
_PROBE_SECONDS = 3.0


@dataclass(frozen=True)
class Cluster:
    """A cluster to which this process is connected.

    Attributes:
        address: The address of its head, `HOST:PORT`.
        nodes: The resources of each node on which trials may run.
        raylet: The socket of the node through which this process is connected.
    """

    address: str
    nodes: tuple[Machine, ...]
    raylet: str

    def describe(self) -> str:
        """Return a description of the cluster for messages."""
        count = len(self.nodes)
        return f"on {count} node{'s' if count > 1 else ''} of the Ray cluster at {self.address}"

    @contextlib.contextmanager
    def running(
        self, concurrency: int, lost: LossHandler
    ) -> Iterator[Callable[[Exception | None], bool]]:
        """Watch the cluster while the context is open, and then end the driver's job.

        Args:
            concurrency: How many trials may wait for an actor at once.
            lost: Called when the cluster is lost.

        Yields:
            `node_died`.
        """
        configure_tune(concurrency)
        with watched(self._find_loss, lost, disconnect):
            yield self.node_died

    def health_error(self) -> str | None:
        """Return why the cluster cannot be reached now; None if it can."""
        if (cause := tcp_probe(self.address, _PROBE_SECONDS)) is not None:
            return f"its head at {self.address} does not answer ({cause})"
        try:
            with socket.socket(socket.AF_UNIX) as node:
                node.connect(self.raylet)
        except OSError as error:
            return f"its node on this machine is gone ({error.strerror})"
        return None

    def node_died(self, error: Exception | None) -> bool:
        """Return whether an actor was lost with its node or with the whole cluster.

        Without a head, Ray reports actors as lost and does not report their nodes.

        Args:
            error: Ray's error about the end of the actor.
        """
        if self.health_error() is not None:
            return True
        if (lost := node_of_lost_actor(error)) is None:
            return False
        node = next((n for n in _nodes() if n["NodeID"] == lost), None)
        # The head notices a dead node late, so the node's port is tested, too.
        return node is not None and (
            not node["Alive"]
            or tcp_probe(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}", _PROBE_SECONDS)
            is not None
        )

    def _find_loss(self) -> Loss | None:
        if (cause := self.health_error()) is None:
            return None
        return Loss(f"the Ray cluster is lost: {cause}", PATIENCE_SECONDS)


@contextlib.contextmanager
def connected(
    address: str,
    root: Path,
    modules: Iterable[str],
    *,
    store: str | None = None,
    hidden_env: Iterable[str] = (),
    tell: Callable[[str], None],
    tell_last: Callable[[TextIO, str], None],
) -> Iterator[Cluster]:
    """Connect to a cluster and check its nodes, before a sweep is created.

    Must precede the first import of ray in a process.

    Args:
        address: The result of `find_address`.
        root: The directory of all sweeps, which every node must see.
        modules: The modules that trials import; those in the working directory are uploaded.
        store: The prefix, `s3://...`, that every node must reach; None: checkpoints are below
            the root.
        hidden_env: Environment variables that are empty in workers.
        tell: Receives a sentence about files that are not uploaded.
        tell_last: Receives standard error and the reason, right before this process exits.

    Raises:
        ClusterRefused: The cluster cannot be reached or refuses the connection, or a node cannot
            run trials.
        ExitRequested: A signal arrived.
    """
    address = locate(address)
    set_cluster_env(loopback=is_loopback(address))
    package = package_code(Path.cwd(), root, modules)
    if package is not None and (warning := package.warning()):
        tell(warning)
    size = package.size if package is not None else 0
    with _exit_after(_CONNECT_SECONDS + size / _BYTES_PER_SECOND, address, tell_last):
        raylet = _connect(address, package, hidden_env)
    try:
        nodes = {node["NodeID"]: node for node in _nodes() if node["Alive"]}
        yield Cluster(address, tuple(check_nodes(nodes, root, store)), raylet)
    finally:
        disconnect()


def _nodes() -> list[dict[str, Any]]:
    import ray

    nodes: Any = ray.nodes  # Ray has no types for it
    return list(nodes())


def disconnect() -> None:
    """End this process' job on the cluster, which keeps running."""
    import ray

    if ray.is_initialized():
        ray.shutdown()


def _connect(address: str, package: CodePackage | None, hidden_env: Iterable[str]) -> str:
    """Connect, and return the socket of the local node."""
    import ray

    hashing = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}  # as in this process
    hidden = dict.fromkeys(hidden_env, "")
    sharing = {name: os.environ[name] for name in (UMASK_VARIABLE,) if name in os.environ}
    environment: dict[str, Any] = {"env_vars": CLUSTER_WORKERS | hashing | sharing | hidden}
    if package is not None:
        environment["working_dir"] = str(package.directory)
        environment["excludes"] = list(package.excludes)
    try:
        _check_token(address)
        with warnings.catch_warnings(), preserve_signal_handlers():
            warnings.simplefilter("ignore", FutureWarning)
            ray.init(
                address=address,
                runtime_env=environment,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
            )
    except Exception as error:  # Ray has no narrower type for wrong versions, tokens and ports
        disconnect()
        raise ClusterRefused(refusal(address, error)) from error
    return raylet_socket()


def _check_token(address: str) -> None:
    """Send the head a request, because `ray.init` retries for 20 s with a wrong token."""
    errors = os.dup(2)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)  # Ray's C++ library prints to it
    try:
        query_head(address, _CONNECT_SECONDS)
    finally:
        os.dup2(errors, 2)
        os.close(errors)


def refusal(address: str, error: BaseException) -> str:
    """Return the message for an error of Ray when connecting."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    if any(map(refuses_token, chain)):
        return (
            f"the Ray cluster at {address} refuses this process: its token is missing or wrong; "
            "a process needs the cluster's token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH to the values on its nodes"
        )
    words = next(filter(None, map(_words, reversed(chain))), "")
    if is_version_mismatch(words):
        return (
            f"the Ray cluster at {address} cannot be used: {words}; both must be the same; "
            "install the cluster's versions here, or these versions on its nodes"
        )
    return (
        f"the Ray cluster at {address} cannot be used: {words or type(error).__name__}; run "
        "`ray status` on its head, or correct the address"
    )


def _words(error: BaseException) -> str:
    """Return an error's text in one line; if it contains a traceback, only the last line."""
    said = str(error)
    return " ".join((said.splitlines()[-1] if "Traceback" in said else said).split())


@contextlib.contextmanager
def _exit_after(
    seconds: float, address: str, tell_last: Callable[[TextIO, str], None]
) -> Iterator[None]:
    """Exit the process after a time limit, because Ray's calls here cannot be interrupted."""

    errors = os.fdopen(os.dup(2), "w")

    def leave() -> None:
        tell_last(
            errors,
            f"no head of a Ray cluster answered at {address} within {seconds:.0f} s; HOST:PORT "
            "must be the address that `ray start --head` printed, and RAY_AUTH_TOKEN must be the "
            "cluster's token; correct them",
        )
        os._exit(WRONG_INPUT)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        errors.close()
