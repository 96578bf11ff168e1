"""A Ray cluster that runs already: connecting to it, and noticing when it is gone.

It is never ours to start, to stop or to clean. What ends with the driver is the driver's own job,
actors and all: Ray sees to that, also when the driver is killed. What must not live here: the
address (`address`), a look at each node (`nodes`), what travels there (`travel`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from sweeps.engine import local_ray
from sweeps.engine.cluster_address import ClusterRefused, is_loopback, locate, tcp_probe
from sweeps.engine.code_upload import CodePackage, package_code
from sweeps.engine.node_checks import check_nodes
from sweeps.engine.resources import Machine
from sweeps.exit_codes import WRONG_INPUT

_CONNECT_SECONDS = 25.0
"""How long Ray may take to let us in; it would itself wait for minutes."""
_BYTES_PER_SECOND = 5 * 2**20
"""How fast what travels is at least packed and sent."""
_PATIENCE_SECONDS = 20.0
"""How long a head may be away. After 60 s Ray ends this process itself, without a sentence."""
_LOOK_EVERY = 1.0
_KNOCK_SECONDS = 3.0
_WORKERS = {
    # what a local Ray's workers inherit from the driver
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
}


@dataclass(frozen=True)
class Cluster:
    """A cluster that this process is connected to.

    Attributes:
        address: The head's, `HOST:PORT`.
        nodes: What each node offers on which trials may run.
        raylet: The socket of the node through which this process speaks to it.
    """

    address: str
    nodes: tuple[Machine, ...]
    raylet: str

    def describe(self) -> str:
        """Return it in words, for a person."""
        count = len(self.nodes)
        return f"on {count} node{'s' if count > 1 else ''} of the Ray cluster at {self.address}"

    @contextlib.contextmanager
    def watched(self, concurrency: int, lost: Callable[[str], NoReturn]) -> Iterator[None]:
        """Trials may run there for as long as the context is open; then the driver's job ends.

        Args:
            concurrency: How many trials may wait for an actor at once.
            lost: Called when the cluster is gone, with the reason, in whatever thread; leaves.
        """
        local_ray.configure_tune(concurrency)
        over, once = threading.Event(), threading.Lock()

        def leave(cause: str) -> NoReturn:
            once.acquire()  # whoever comes second waits for the process' end
            lost(cause)

        watch = threading.Thread(
            target=self._watch, args=(over, leave), name="cluster", daemon=True
        )
        watch.start()
        try:
            yield
        except Exception:  # of any kind, when the head is gone; that it is gone is the reason
            if (cause := self.health_error()) is not None:
                leave(cause)
            raise
        finally:
            disconnect()  # may wait for a head that has gone: the watch sees to that
            over.set()
            watch.join()

    def health_error(self) -> str | None:
        """Why the cluster cannot be reached now; None if it can."""
        if (cause := tcp_probe(self.address, _KNOCK_SECONDS)) is not None:
            return f"its head at {self.address} does not answer ({cause})"
        try:
            with socket.socket(socket.AF_UNIX) as node:
                node.connect(self.raylet)
        except OSError as error:
            return f"its node on this machine is gone ({error.strerror})"
        return None

    def node_died(self, error: Exception | None) -> bool:
        """Whether the node is gone on which an actor ran, or the whole cluster: without a head Ray
        tells of lost actors for want of an answer, and says nothing of their nodes.

        Args:
            error: What Ray said of the actor's end.
        """
        if self.health_error() is not None:
            return True
        import ray

        actor = getattr(error, "actor_id", None)
        if actor is None:
            return False
        address = ray._private.state.actors(actor).get("Address", {})
        node = next((n for n in _nodes() if n["NodeID"] == address.get("NodeID")), None)
        # The head takes a while to notice; whose port is closed has no node any more.
        return node is not None and (
            not node["Alive"]
            or tcp_probe(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}", _KNOCK_SECONDS)
            is not None
        )

    def _watch(self, over: threading.Event, leave: Callable[[str], NoReturn]) -> None:
        seen = time.monotonic()
        while not over.wait(_LOOK_EVERY):
            cause = self.health_error()
            if cause is None:
                seen = time.monotonic()
            elif time.monotonic() - seen > _PATIENCE_SECONDS and not over.is_set():
                leave(f"{cause}, for {_PATIENCE_SECONDS:g} s")


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
    """Connect to a cluster and look at its nodes; nothing is created before both have worked.

    Must precede the first import of ray in a process.

    Args:
        address: What `find_address` returned.
        root: Where sweeps lie, which every node must see.
        modules: What trials import, by name; what of it lies in this directory travels.
        store: The prefix, `s3://...`, that every node must reach; None: checkpoints lie below
            the root.
        hidden_env: Environment variables that workers get empty.
        tell: Told in a sentence what stays here.
        tell_last: Receives standard error, and why this process exits right after the call.

    Raises:
        ClusterRefused: It cannot be reached, does not let us in, or a node cannot run trials.
        Left: A signal came.
    """
    address = locate(address)
    _configure(address)
    luggage = package_code(Path.cwd(), root, modules)
    if luggage is not None and (told := luggage.told()):
        tell(told)
    size = luggage.size if luggage is not None else 0
    with _at_most(_CONNECT_SECONDS + size / _BYTES_PER_SECOND, address, tell_last):
        raylet = _connect(address, luggage, hidden_env)
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
    """End this process' job on the cluster, which goes on without it."""
    import ray

    if ray.is_initialized():
        ray.shutdown()


def _configure(address: str) -> None:
    """Set the environment that Ray in this process reads; the cluster's own is its own."""
    local_ray.set_ray_env()
    os.environ["RAY_BACKEND_LOG_LEVEL"] = "fatal"  # what it has to say is said in a sentence
    # Ray would end this process without a word when its node is gone and it has no living parent,
    # unless this process lives. Instead it raises an error.
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())
    if not is_loopback(address):  # see `sweeps/__init__.py`; this Ray listens where it listens
        os.environ.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)


def _connect(address: str, luggage: CodePackage | None, hidden_env: Iterable[str]) -> str:
    """Returns the socket of the node that we speak to it through."""
    import ray

    hashing = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}  # as here
    environment: dict[str, Any] = {"env_vars": _WORKERS | hashing | dict.fromkeys(hidden_env, "")}
    if luggage is not None:
        environment["working_dir"] = str(luggage.directory)
        environment["excludes"] = list(luggage.excludes)
    try:
        _greet(address)
        with warnings.catch_warnings(), local_ray.preserve_signal_handlers():
            warnings.simplefilter("ignore", FutureWarning)
            ray.init(
                address=address,
                runtime_env=environment,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
            )
    except Exception as error:  # of no narrower kind: versions, tokens, what listens at a port
        disconnect()
        raise ClusterRefused(refusal(address, error)) from error
    node: Any = ray._private.worker._global_node
    return str(node.raylet_socket_name)


def _greet(address: str) -> None:
    """Ask the head for something: of a wrong token Ray complains for 20 s before it gives up."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    errors = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # Ray complains there, too, past Python
    try:
        GcsClient(address=address).internal_kv_keys(b"", None, _CONNECT_SECONDS)
    finally:
        os.dup2(errors, 2)
        os.close(errors)


def refusal(address: str, error: BaseException) -> str:
    """Why Ray did not let us in, in a sentence with what to do."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    if any("authenti" in f"{type(one).__name__} {one}".lower() for one in chain):
        return (
            f"the Ray cluster at {address} does not let this process in: its token is missing or "
            "another one; who knows the cluster's token may use it; set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to what its nodes have"
        )
    words = next(filter(None, map(_words, reversed(chain))), "")
    if "version mismatch" in words.lower():
        return (
            f"the Ray cluster at {address} cannot be used: {words}; both must be the same; "
            "install the cluster's versions here, or these on its nodes"
        )
    return (
        f"the Ray cluster at {address} cannot be used: {words or type(error).__name__}; look with "
        "`ray status` on its head, or correct the address"
    )


def _words(error: BaseException) -> str:
    """What an error says in one line; of a traceback in it, the last one."""
    said = str(error)
    return " ".join((said.splitlines()[-1] if "Traceback" in said else said).split())


@contextlib.contextmanager
def _at_most(
    seconds: float, address: str, tell_last: Callable[[TextIO, str], None]
) -> Iterator[None]:
    """Leave the process when Ray waits for longer: none of its calls here can be interrupted."""

    errors = os.fdopen(os.dup(2), "w")

    def leave() -> None:
        tell_last(
            errors,
            f"whoever listens at {address} did not answer within {seconds:.0f} s as the head of "
            "a Ray cluster does, with this process' token; HOST:PORT must be what "
            "`ray start --head` printed, and RAY_AUTH_TOKEN the cluster's; correct them",
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
