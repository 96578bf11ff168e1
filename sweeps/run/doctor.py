"""Check what would make a sweep fail on this machine, with remedies; each check has a time limit.

Without torch, Ray and MLflow. Nothing changes but what dead drivers left, which is removed. What
must not live here: printing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import pwd
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil

from redaction.secrets import redact
from sweeps.engine.process_cleanup import clean_up_dead_drivers
from sweeps.engine.resources import Machine
from sweeps.engine.system_limits import shortages
from sweeps.errors import LedgerError, UserError
from sweeps.ledger.reader import LedgerReader
from sweeps.ledger.sqlite import database_damage
from sweeps.paths import SweepPaths, list_sweeps, tracking_place
from sweeps.spec.revisions import read_spec
from sweeps.spec.spec import SweepSpec
from sweeps.stores import check_owner, check_store, probe_store, tracker_at
from sweeps.sweep_lock import is_held, read_holder
from tracking.address import is_database, sqlite_file
from tracking.tracker import TrackingUnusable
from tracking.trusted_stores import StoreUntrusted, trusted
from trainable.errors import StorageError
from trainable.store.regular_files import probe_directory

_GIB = 1024**3
_PACKAGES = (
    "torch",
    "torchvision",
    "ray",
    "optuna",
    "mlflow",
    "pydantic",
    "ruamel.yaml",
    "safetensors",
)
_DISK_WARN, _DISK_FAIL = 5 * _GIB, _GIB // 2
_LOCAL_LOCKS = {"nolock", "local_lock=all", "local_lock=flock"}
"""Options of an NFS mount under which other hosts do not see a lock."""
_MEMORY_WARN = 4 * _GIB
_SHM_WARN = 2 * _GIB
_MLFLOW_VARIABLE = "MLFLOW_TRACKING_URI"
_SHOWN = 5  # inconsistencies of one sweep
_TIMEOUT = 3.0  # seconds for the tracking server to accept a connection


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report; `remedy` is empty at level `ok`."""

    level: Literal["ok", "warn", "fail"]
    what: str
    detail: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return the object that `--json` prints."""
        return asdict(self)


def diagnose(root: Path) -> list[Finding]:
    """Remove what dead drivers left behind, and check everything that a sweep depends on."""
    cleared = [
        *clean_up(root),
        *check_sweeps(root),
        *check_stores(root),
        *check_object_stores(root),
    ]
    return examine(root, cleared)


def examine(root: Path, extra: Sequence[Finding] = ()) -> list[Finding]:
    """Check everything that a sweep depends on."""
    return [
        Finding("ok", "Python", platform.python_version()),
        *_packages(),
        *_machine(Machine.probe()),
        *_storage(root),
        _shared_memory(Path("/dev/shm")),
        _loopback(),
        _account(),
        *_limits(),
        *_tracking(root),
        *_trusted_stores(),
        *extra,
    ]


def clean_up(root: Path) -> list[Finding]:
    """End the processes of dead drivers on this machine, and remove their files."""
    # Processes of drivers without a temporary directory are found only below `root`.
    known = [
        holder.token
        for paths in list_sweeps(root)
        if (holder := read_holder(paths.lock)) is not None and not is_held(paths.lock)
    ]
    drivers, processes = clean_up_dead_drivers(*known)
    if not drivers:
        return [Finding("ok", "left-overs", "none of dead drivers")]
    detail = f"ended {processes} processes of {drivers} dead drivers"
    return [Finding("ok", "left-overs", detail)]


def check_sweeps(root: Path) -> list[Finding]:
    """Find inconsistencies between ledger, checkpoints and tracking below `root`; repair none."""
    from sweeps.view.sweep_view import SweepView

    found = []
    for paths in list_sweeps(root):
        try:
            view = SweepView(paths)
            corrections = view.corrections()
        except (ValueError, OSError, LedgerError, StorageError) as error:
            found.append(Finding("fail", paths.name, str(error), "correct this, then resume"))
            continue
        if errors := list(map(str, corrections)):
            more = f"; and {len(errors) - _SHOWN} more" if len(errors) > _SHOWN else ""
            found.append(
                Finding(
                    "warn",
                    paths.name,
                    "; ".join(errors[:_SHOWN]) + more,
                    f"a resume repairs what it can; {view.resume_hint()}",
                )
            )
    return found


def check_stores(root: Path) -> list[Finding]:
    """Find damaged databases below `root`, and runs that tracking stores have lost."""
    from sweeps.run.store_comparison import Missing, lost_runs  # loads Optuna

    found = []
    for paths, spec in _specs(root):
        for file in (paths.ledger, paths.outbox / "outbox.db"):
            if (damage := database_damage(file)) is not None:
                remedy = "restore it from a backup"
                if file != paths.ledger:
                    remedy = f"recreate it with: {paths.command('sync', '--verify')}"
                found.append(Finding("fail", paths.name, f"{file} is damaged ({damage})", remedy))
        # `sweep sync` compares tracking servers, because they need MLflow.
        if not is_database(tracking_place(spec.tracking.uri, root)[0]):
            continue
        with contextlib.suppress(ValueError, OSError, LedgerError):  # `check_sweeps` reports it
            ledger = LedgerReader(paths.ledger)
            lost = lost_runs(paths, spec, ledger.records(), ledger.sweep_id, os.environ)
            if lost and not is_held(paths.lock):  # a live driver may be sending them
                runs = 1 + len(ledger.trials)
                detail = f"the tracking store lacks, of {runs} runs: {Missing.of(lost)}"
                remedy = f"send them again with: {paths.command('sync', '--verify')}"
                found.append(Finding("warn", paths.name, detail, remedy))
    return found


def check_object_stores(root: Path) -> list[Finding]:
    """Check that the object stores of the sweeps below `root` accept checkpoints."""
    found = {}
    for paths, spec in _specs(root):
        where = spec.storage.checkpoints
        if where is None or where in found:
            continue
        try:
            probe_store(paths, spec, new=False)
        except (UserError, StoreUntrusted) as error:
            remedy = "correct this, then resume"
            found[where] = Finding("fail", "object store", str(error), remedy)
        else:
            found[where] = Finding("ok", "object store", f"{where} accepts checkpoints")
    return list(found.values())


def _specs(root: Path) -> Iterator[tuple[SweepPaths, SweepSpec]]:
    for paths in list_sweeps(root):
        # `check_sweeps` reports specs that cannot be read.
        with contextlib.suppress(ValueError, OSError):
            yield paths, read_spec(paths.spec).spec


def _packages() -> Iterator[Finding]:
    for name in _PACKAGES:
        try:
            yield Finding("ok", name, version(name))
        except PackageNotFoundError:
            yield Finding(
                "fail",
                name,
                "is not installed",
                "reinstall gradsweep: its dependencies come with it",
            )


def _machine(machine: Machine) -> Iterator[Finding]:
    yield Finding("ok", "CPUs", f"{machine.cpus} usable by this process")
    size = f"{machine.memory / _GIB:.1f} GiB"
    if machine.memory < _MEMORY_WARN:
        yield Finding(
            "warn",
            "memory",
            f"{size}; each trial's process takes about 1 GiB",
            "set concurrency: 1",
        )
    else:
        yield Finding("ok", "memory", size)
    if not machine.gpus:
        yield Finding("ok", "GPUs", "none visible; trials run on the CPU")
    for index, gpu in enumerate(machine.gpus):
        yield Finding(
            "ok", f"GPU {index}", f"{gpu.name}, {gpu.memory / _GIB:.0f} GiB, driver {_driver()}"
        )


def _driver() -> str:
    import pynvml

    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _storage(root: Path) -> Iterator[Finding]:
    # The first sweep creates the root; until then check the directory that will contain it.
    home = root
    while not home.exists() and home != home.parent:
        home = home.parent
    try:
        probe_directory(home)
    except OSError as error:
        remedy = "choose another directory with --root, or correct its permissions"
        detail = f"{home}: cannot write files there ({error.strerror})"
        yield Finding("fail", "storage", detail, remedy)
        return
    yield Finding(
        "ok",
        "storage",
        f"{root} is writable" if home == root else f"{root} can be created in {home}",
    )
    yield _locks(home)
    free = shutil.disk_usage(home).free
    detail = f"{free / _GIB:.1f} GiB free at {home}"
    if free < _DISK_WARN:
        level: Literal["warn", "fail"] = "fail" if free < _DISK_FAIL else "warn"
        yield Finding(level, "disk", detail, "free some space, or choose another disk with --root")
    else:
        yield Finding("ok", "disk", detail)


def _locks(directory: Path) -> Finding:
    """Check that file locks work, and that other hosts see them on a shared file system."""
    mounts = psutil.disk_partitions(all=True)
    within = [m for m in mounts if directory.resolve().is_relative_to(m.mountpoint)]
    mount = max(within, key=lambda m: len(m.mountpoint), default=None)
    remedy = "mount it with NFSv4 or without local_lock, or choose another --root"
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return Finding("fail", "locks", f"{directory}: cannot lock ({error.strerror})", remedy)
    if mount is not None and _LOCAL_LOCKS.intersection(mount.opts.split(",")):
        detail = f"{mount.mountpoint} ({mount.fstype}) does not share locks with other hosts"
        more = "run each sweep from this host only; or "
        return Finding("warn", "locks", detail, more + remedy)
    return Finding("ok", "locks", f"{directory} supports file locks")


def _shared_memory(path: Path) -> Finding:
    if not path.is_dir():
        return Finding(
            "ok", "shared memory", f"{path} does not exist here; Ray uses the temporary directory"
        )
    usage = shutil.disk_usage(path)
    detail = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free at {path}"
    if usage.free < _SHM_WARN:
        return Finding(
            "warn",
            "shared memory",
            f"{detail}; Ray then moves objects through the disk",
            "start the container with --shm-size=4g, or free space in it",
        )
    return Finding("ok", "shared memory", detail)


def _account() -> Finding:
    user = os.getuid()
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        home = os.environ.get("HOME", "")
        detail = f"user ID {user} has no entry in the password database; HOME is {home or 'unset'}"
        if home:
            return Finding("ok", "account", detail)
        return Finding("fail", "account", detail, "set HOME to a directory that it may write to")
    return Finding("ok", "account", name)


def _limits() -> Iterator[Finding]:
    found = shortages()
    if not found:
        yield Finding("ok", "limits", "temporary space, inodes and ulimits suffice")
    for one in found:
        detail, _, remedy = one.rpartition("; ")
        yield Finding("fail", "limits", detail, remedy)


def _trusted_stores() -> Iterator[Finding]:
    """Yield the stores to which credentials may be sent, if there are any."""
    try:
        if found := trusted():
            yield Finding("ok", "trusted stores", ", ".join(found))
    except StoreUntrusted as error:
        yield Finding("fail", "trusted stores", str(error), "correct this")


def _loopback() -> Finding:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=_TIMEOUT),
        ):
            return Finding("ok", "loopback", "127.0.0.1 accepts connections")
    except OSError as error:
        return Finding(
            "fail",
            "loopback",
            f"127.0.0.1 refuses connections ({error.strerror or error})",
            "allow local connections in the firewall or sandbox; Ray and the "
            "tracking store need them",
        )


def _is_own(paths: SweepPaths) -> bool:
    """Return whether a sweep may have stores connected to; a shared root has others, too."""
    try:
        check_owner(paths.directory)
    except StoreUntrusted:
        return False
    return True


def _tracking(root: Path) -> Iterator[Finding]:
    """Check the tracking stores of the sweeps below `root`; without one, of a new sweep."""
    named = {spec.tracking.uri: paths for paths, spec in _specs(root) if _is_own(paths)}
    for uri, paths in named.items() or [(None, SweepPaths(root, "none"))]:
        try:
            check_store(paths.directory, tracking_place(uri, root)[0])
        except StoreUntrusted as error:
            detail, _, remedy = str(error).rpartition("; ")
            yield Finding("fail", "tracking", detail, remedy)
        else:
            yield _tracking_store(root, uri)
    if _MLFLOW_VARIABLE in os.environ:
        yield Finding(
            "warn",
            "tracking",
            f"{_MLFLOW_VARIABLE} is set and ignored; a sweep records to its own tracking.uri",
            "run with --tracking-uri, or write tracking.uri into the spec",
        )


def _tracking_store(root: Path, uri: str | None) -> Finding:
    where = tracking_place(uri, root)[0]
    address, visible = urlsplit(where), redact(where)
    if address.scheme not in ("http", "https"):
        try:
            tracker_at(uri, root).probe(thorough=True)
        except TrackingUnusable as error:
            return Finding("fail", "tracking", error.message, "correct this, then resume")
        file = sqlite_file(where)
        if uri is None and file is not None and not file.exists():
            return Finding("ok", "tracking", "embedded in the root directory")
        return Finding("ok", "tracking", f"{visible} can be read")
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=_TIMEOUT).close()
    except (OSError, ValueError) as error:  # ValueError: an invalid port
        return Finding(
            "fail",
            "tracking",
            f"{visible} cannot be reached ({error})",
            "start the server, correct tracking.uri, or run with --offline and `sweep sync` later",
        )
    return Finding("ok", "tracking", f"{visible} accepts connections")
