"""Connect to a running Ray cluster, check its nodes, upload the code, and detect its loss.

The driver never starts or stops the cluster; when it ends, even by SIGKILL, Ray ends its job. What
must not live here: the address (`cluster_address`), how trials share nodes (`resources`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any, TextIO

from sweeps.engine.cluster_address import ClusterRefused, is_loopback, locate, tcp_probe
from sweeps.engine.ray_compat.environment import CLUSTER_WORKERS, configure_tune, set_cluster_env
from sweeps.engine.ray_compat.ray_internals import (
    is_version_mismatch,
    node_of_lost_actor,
    preserve_signal_handlers,
    query_head,
    raylet_socket,
    refuses_token,
    visit_uploaded,
)
from sweeps.engine.ray_watch import PATIENCE_SECONDS, Loss, LossHandler, watched
from sweeps.engine.resources import LEAST_GPU_MEMORY, Gpu, Machine
from sweeps.errors import WRONG_INPUT
from sweeps.formatting import format_bytes
from sweeps.spec.spec import SweepSpec
from sweeps.stores import CHECKPOINTS_KEY, withheld_variables
from trainable.store.private_files import UMASK_VARIABLE

_CONNECT_SECONDS = 25.0
"""How long connecting may take; Ray itself would wait for minutes."""
_BYTES_PER_SECOND = 5 * 2**20
"""The lowest expected speed of packing and sending the code package."""
_PROBE_SECONDS = 3.0


@dataclass(frozen=True)
class Cluster:
    """A cluster to which this process is connected.

    Attributes:
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
        """Watch the cluster while the context is open, and then end the driver's job."""
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
        """Return whether an actor was lost with its node or with the whole cluster."""
        # Without a head, Ray reports actors as lost and does not report their nodes.
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
    spec: SweepSpec,
    *,
    tell: Callable[[str], None],
    tell_last: Callable[[TextIO, str], None],
) -> Iterator[Cluster]:
    """Connect to a cluster and check it; must precede the first import of ray in a process."""
    address = locate(address)
    set_cluster_env(loopback=is_loopback(address))
    package = package_code(Path.cwd(), root, spec.trial_modules)
    if package is not None and (warning := package.warning()):
        tell(warning)
    size = package.size if package is not None else 0
    with _exit_after(_CONNECT_SECONDS + size / _BYTES_PER_SECOND, address, tell_last):
        raylet = _connect(address, package, withheld_variables(spec))
    try:
        nodes = {node["NodeID"]: node for node in _nodes() if node["Alive"]}
        yield Cluster(address, tuple(check_nodes(nodes, root, spec.storage.checkpoints)), raylet)
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


LARGE = 50 * 2**20
"""Files larger than this many bytes count as data and are not uploaded."""
LIMIT = 500 * 2**20
"""The maximum size of a package in bytes; Ray accepts 512 MiB."""
MOST_FILES = 20_000
_NEVER = (".git", ".venv", "venv", "__pycache__", "node_modules", ".*_cache", "*.pyc")
_SHOWN = 5
_SPECIAL = re.compile(r"([*?\[\]!#\\ ])")


@dataclass(frozen=True)
class CodePackage:
    """The code that is uploaded from a directory.

    Attributes:
        excludes: The files there that are not uploaded, as patterns of `.gitignore`.
        left: The files that are too large to upload, with their sizes in bytes.
        size: The size of the uploaded files in bytes.
    """

    directory: Path
    excludes: tuple[str, ...]
    left: tuple[tuple[str, int], ...]
    size: int

    def warning(self) -> str | None:
        """Return a warning about files that are too large to upload; None if all are uploaded."""
        if not self.left:
            return None
        return (
            f"not uploaded, because larger than {format_bytes(LARGE)} each: {_named(self.left)}; "
            "put such files on storage that every node sees, and use absolute paths"
        )


def package_code(directory: Path, root: Path, modules: Iterable[str]) -> CodePackage | None:
    """Choose the files to upload."""
    names = [*modules]
    packages = {name.partition(".")[0] for name in names}
    if not any(PathFinder.find_spec(package, [str(directory)]) for package in packages):
        return None
    excludes = [*_NEVER]
    if root.is_relative_to(directory) and root != directory:
        excludes.append(_pattern(str(root.relative_to(directory))))
    sizes = _sizes(directory, excludes)
    for file in _sources(directory, names):
        if file not in sizes:
            raise ClusterRefused(
                f"{directory / file} is not uploaded to the cluster's nodes: .gitignore or "
                ".rayignore names it; the task's module must be uploaded; remove it from that "
                "file, or set RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1"
            )
    left = {name: size for name, size in sizes.items() if size > LARGE}
    small = {name: size for name, size in sizes.items() if size <= LARGE}
    total = sum(small.values())
    if total > LIMIT:
        raise ClusterRefused(
            f"{directory}: {format_bytes(total)} would be uploaded to the cluster's nodes; the "
            f"limit is {format_bytes(LIMIT)}; the largest are {_named(_entries(small))}; list "
            "what the task does not import in .rayignore, or move it elsewhere"
        )
    return CodePackage(
        directory,
        (*excludes, *map(_pattern, sorted(left))),
        tuple(sorted(left.items(), key=_by_size)),
        total,
    )


def _sources(directory: Path, modules: Iterable[str]) -> Iterator[str]:
    """Yield the source files of modules and of their parent packages, if in the directory."""
    for module in modules:
        for parts in accumulate(module.split("."), lambda above, name: f"{above}/{name}"):
            for file in (f"{parts}.py", f"{parts}/__init__.py"):
                if (directory / file).is_file():
                    yield file


def _sizes(directory: Path, excludes: list[str]) -> dict[str, int]:
    """Return the files that Ray would upload, by path, with their sizes in bytes."""
    sizes: dict[str, int] = {}

    def note(path: Path) -> None:
        if path.is_file():
            sizes[str(path.relative_to(directory))] = path.stat().st_size
        if len(sizes) > MOST_FILES:
            raise ClusterRefused(
                f"{directory}: more than {MOST_FILES:,} files would be uploaded to the cluster's "
                f"nodes; most are in {_named(_entries(dict.fromkeys(sizes, 1)), str)}; start "
                "the sweep in the directory of its code, or list the others in .rayignore"
            )

    visit_uploaded(directory, excludes, note)
    return sizes


def _entries(sizes: dict[str, int]) -> list[tuple[str, int]]:
    """Return the total size of each entry of the top level, the largest first."""
    sums: dict[str, int] = {}
    for name, size in sizes.items():
        top, slash, _ = name.partition("/")
        sums[top + slash] = sums.get(top + slash, 0) + size
    return sorted(sums.items(), key=_by_size)


def _by_size(entry: tuple[str, int]) -> tuple[int, str]:
    return -entry[1], entry[0]


def _named(entries: Iterable[tuple[str, int]], form: object = None) -> str:
    say = str if form is str else format_bytes
    return ", ".join(f"{name} ({say(size)})" for name, size in [*entries][:_SHOWN])


def _pattern(path: str) -> str:
    """Return the pattern of `.gitignore` that matches one path below the directory."""
    return "/" + _SPECIAL.sub(r"\\\1", path)


SECONDS = 75.0
"""How long all nodes together may take to answer. By default, Ray's head takes up to 65 s to
notice a dead node."""
_SEEN_SECONDS = 10.0
"""How long a network file system may take to show a node's file to the driver."""
_STALE_SECONDS = 600.0
"""The age after which the directory of another check counts as abandoned."""
_PREFIX = ".nodes-"
_DISTRIBUTION = "gradsweep"
_DRIVER_FILE = "driver"


def check_nodes(
    nodes: Mapping[str, Mapping[str, Any]], root: Path, store: str | None = None
) -> list[Machine]:
    """Check every node on which a trial may run."""
    checked = {
        node: info for node, info in nodes.items() if {"CPU", "GPU"} & info["Resources"].keys()
    }
    if not checked:
        raise ClusterRefused(
            "no node of the cluster has CPUs, and trials need some; add a node with "
            "`ray start --address=ADDRESS`"
        )
    ours, mark = version(_DISTRIBUTION), secrets.token_hex(16)
    with _shared_directory(root) as directory:
        (directory / _DRIVER_FILE).write_text(mark, encoding="utf-8")
        answers = _query(checked, directory, mark, ours, store)
        checked = _without_dead_nodes(checked, answers)
        faults = [
            f"node {node_name(info)}: {fault}"
            for node, info in checked.items()
            if (
                fault := fault_of(answers[node], ours, root)
                or _unseen(directory / node, mark, root)
            )
        ]
    if faults:
        raise ClusterRefused("\n".join(faults))
    found = {node: answer for node, answer in answers.items() if not isinstance(answer, str)}
    return [machine_of(info, found[node]) for node, info in checked.items()]


def fault_of(answer: Mapping[str, Any] | str, ours: str, root: Path) -> str | None:
    """Return the fault that a node's answer shows, with a remedy; None if it shows none."""
    if isinstance(answer, str):
        return f"{answer}; every node must be able to run a trial; repair or remove the node"
    theirs = answer["version"]
    if theirs != ours:
        has = f"{_DISTRIBUTION} {theirs}" if theirs else f"no {_DISTRIBUTION}"
        return (
            f"has {has}; this process has {ours}, and all must have the same; install it there: "
            f"pip install {_DISTRIBUTION}=={ours}"
        )
    if answer["fault"]:
        return f"{root}: {answer['fault']}; {_shared(root)}"
    if answer["store"]:
        return f"{'.'.join(CHECKPOINTS_KEY)}: {answer['store']}"
    return None


def store_fault(prefix: str, version: str) -> str | None:
    """Return why a trial cannot save checkpoints below a prefix, with a remedy; None if it can.

    Runs on a node, in the environment that its trials have.
    """
    from trainable.store.objects import StoreUnusable, probe

    try:
        probe(prefix)
    except StoreUnusable as error:
        return f"{error}; a trial there has the environment that `ray start` had"
    except ImportError as error:  # Gradsweep is installed without its dependencies
        return (
            f"{prefix} cannot be reached ({error}); an object store needs fsspec and pyarrow; "
            f"install them there: pip install {_DISTRIBUTION}=={version}"
        )
    return None


def node_name(info: Mapping[str, Any]) -> str:
    """Return a node's name for messages: its given name or its host's, and its address."""
    address = info["NodeManagerAddress"]
    given = info.get("NodeName")
    name = given if given and given != address else info["NodeManagerHostname"]
    return f"{name} at {address}"


def machine_of(info: Mapping[str, Any], answer: Mapping[str, Any]) -> Machine:
    """Return a node's resources: those that Ray counts, and the GPUs' memory, from the node."""
    offered = info["Resources"]
    found = [Gpu(name, memory) for name, memory in answer["gpus"]]
    count = int(offered.get("GPU", 0))
    # A GPU of unknown memory is never shared.
    unknown = Gpu("unknown", LEAST_GPU_MEMORY)
    return Machine(
        name=node_name(info),
        cpus=int(offered.get("CPU", 0)),
        memory=int(offered.get("memory", 0)),
        gpus=tuple((found + [unknown] * count)[:count]),
    )


def _query(
    nodes: Mapping[str, Mapping[str, Any]],
    directory: Path,
    mark: str,
    ours: str,
    store: str | None,
) -> dict[str, Mapping[str, Any] | str]:
    """Run the check on all nodes at once; for a node that fails, the answer is the reason."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    check = ray.remote(num_cpus=0, max_retries=0)(_make_check())
    pending = {}
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        task = check.options(scheduling_strategy=strategy)
        pending[task.remote(str(directory), node, mark, ours, store)] = node
    done, late = ray.wait([*pending], num_returns=len(pending), timeout=SECONDS)
    answers: dict[str, Mapping[str, Any] | str] = {}
    for future in late:
        answers[pending[future]] = f"did not answer within {SECONDS:g} s"
        ray.cancel(future, force=True)
    for future in done:
        try:
            answers[pending[future]] = ray.get(future)
        # Of any type: the node or its worker died, or the code package could not be unpacked.
        except Exception as error:
            words = " ".join(str(error).split())[-300:]
            answers[pending[future]] = f"could not be checked ({type(error).__name__}: {words})"
    return answers


def _without_dead_nodes(
    nodes: Mapping[str, Mapping[str, Any]], answers: Mapping[str, Mapping[str, Any] | str]
) -> dict[str, Mapping[str, Any]]:
    """Drop nodes that the head reports as dead by now; keep all if none would remain."""
    dead = {node for node, answer in answers.items() if isinstance(answer, str)}
    if dead:
        dead &= {info["NodeID"] for info in _nodes() if not info["Alive"]}
    return {node: info for node, info in nodes.items() if node not in dead} or dict(nodes)


def _make_check() -> Callable[[str, str, str, str, str | None], dict[str, Any]]:
    """Return the check for a node: nested, so that Ray pickles it by value for bare nodes."""

    def check(
        directory: str, name: str, mark: str, ours: str, store: str | None
    ) -> dict[str, Any]:
        import os
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        found: dict[str, Any] = {"version": None, "fault": None, "store": None, "gpus": []}
        try:
            found["version"] = installed("gradsweep")
        except PackageNotFoundError:
            return found
        if found["version"] != ours:
            return found
        try:
            with open(os.path.join(directory, "driver"), encoding="utf-8") as theirs:
                if theirs.read() != mark:
                    found["fault"] = "has other files there than the driver"
            with open(os.path.join(directory, name), "w", encoding="utf-8") as own:
                own.write(mark)
                own.flush()
                os.fsync(own.fileno())
        except FileNotFoundError:
            found["fault"] = "the driver's files are not there"
        except OSError as error:
            found["fault"] = f"cannot be read and written there ({error.strerror})"
        from sweeps.engine.resources import visible_gpus

        found["gpus"] = [(gpu.name, gpu.memory) for gpu in visible_gpus(None)]
        if store is not None:
            from sweeps.engine.cluster import store_fault

            found["store"] = store_fault(store, ours)
        return found

    return check


def _unseen(written: Path, mark: str, root: Path) -> str | None:
    """Return why the driver does not see a node's file; waits for slow network file systems."""
    deadline = time.monotonic() + _SEEN_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if written.read_text(encoding="utf-8") == mark:
                return None
        if time.monotonic() > deadline:
            return f"{root}: the driver does not see the node's files; {_shared(root)}"
        time.sleep(0.1)


def _shared(root: Path) -> str:
    return (
        "every node must see the same files there, as the same user; mount a shared file system "
        f"at {root} on each, or choose one with --root"
    )


@contextlib.contextmanager
def _shared_directory(root: Path) -> Iterator[Path]:
    """Create a temporary directory in the root, and remove those of killed drivers."""
    missing = [each for each in (root, *root.parents) if not each.exists()]
    root.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    # Use the clock of the storage, which may differ from this machine's.
    stale = directory.stat().st_mtime - _STALE_SECONDS
    for other in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it
            if other.stat().st_mtime < stale:
                shutil.rmtree(other)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        # Remove the root, too, if this call has created it.
        for each in missing:  # the innermost first; a directory with other files stays
            with contextlib.suppress(OSError):
                each.rmdir()
