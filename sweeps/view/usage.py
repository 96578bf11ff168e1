"""What a sweep has taken: its time, against what was planned, and its space by kind of file.

A trial's time is that of its workers, all attempts together; on devices, times the CPUs and GPUs
of each attempt. Links are not followed. What must not live here: the plan (`engine.sweep_plan`),
how much is left (`sweep_progress`), and removing files (`run.removal`).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sweeps.formatting import counted, format_device_hours, format_duration
from sweeps.ledger.attributes import ORIGIN_COLUMNS
from sweeps.ledger.over_seeds import configurations
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import REMOVED, SweepPaths, artifact_root, list_sweeps
from sweeps.reconcile.stop_criteria import is_stopped_early
from sweeps.spec.revisions import read_spec
from sweeps.spec.spec import SweepSpec
from sweeps.stopping.patience import BY_PATIENCE
from sweeps.stores import check_store
from sweeps.view.sweep_view import SweepView, UnknownSweep

_MUCH_SLOWER = 1.5
"""From here on a sweep says why it took so many times as long as planned."""


@dataclass(frozen=True)
class Total:
    """A sum over trials, as far as it is known."""

    value: float
    known: int
    """Of how many trials it is known."""
    of: int
    """Of how many trials it would be."""

    @property
    def note(self) -> str:
        """Say that some are unknown; empty if none is."""
        of = counted(self.of, "trial")
        return "" if self.known == self.of else f" (of {self.known} of {of})"


@dataclass(frozen=True)
class Usage:
    """What a sweep has taken so far, and what early stopping and `patience` saved."""

    report_word: str
    trials: int
    epochs: int
    seconds: float
    trial_seconds: Total
    cpu_seconds: Total
    gpu_seconds: Total
    stopped: int
    spared_seeds: int
    """Further seeds, or folds, of stopped configurations, which never start."""
    seed_word: str
    saved_epochs: int
    saved_seconds: Total
    saved_device_seconds: Total
    """As `saved_seconds` at the speed of each stopped trial itself."""
    planned: dict[str, Any] | None
    extra: int = 0
    """How many trials train the point of another one again, beside the search."""
    extra_epochs: int = 0

    @property
    def device(self) -> str:
        """The device whose time counts: `GPU`, or `CPU` if no trial had a GPU."""
        return "GPU" if self.gpu_seconds.value else "CPU"

    @property
    def device_seconds(self) -> Total:
        """The time on `device`."""
        return self.gpu_seconds if self.gpu_seconds.value else self.cpu_seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        device = {"device": self.device, "device_seconds": asdict(self.device_seconds)}
        return asdict(self) | device

    def sentences(self) -> list[str]:
        """Return what was used and saved, a sentence each; none if no time was counted."""
        if not self.epochs or not self.seconds:
            return []
        found = [self._used()]
        if self.saved_epochs:
            found.append(self._saved())
        return found

    def _used(self) -> str:
        searched = self.epochs - self.extra_epochs
        sentence = f"used: {counted(searched, self.report_word)}"
        sentence += f" in {format_duration(self.seconds)}"
        if self.extra:
            epochs = counted(self.extra_epochs, self.report_word)
            sentence += f", and {epochs} of {counted(self.extra, 'trial')} beside the search"
        if self.device_seconds.known:
            hours = format_device_hours(self.device_seconds.value, self.device)
            sentence += f"{', in all' if self.extra else ','} {hours}{self.device_seconds.note}"
        if self.planned is None:
            return f"{sentence}; {counted(self.trials, 'trial')}"
        plan, count = self.planned, ""
        if plan["trials"] != self.trials - self.extra:
            planned, started = plan["trials"], self.trials - self.extra
            count = f" for {counted(planned, 'trial')}; {started:,} started"
        sentence += f"; planned: about {counted(plan['expected_epochs'], self.report_word)}"
        if plan["seconds"] is not None:
            hours = format_device_hours(plan["device_seconds"], plan["device"])
            sentence += f" in {format_duration(plan['seconds'])}, {hours}"
            planned_pace = plan["seconds"] / plan["expected_epochs"]
            if searched and (slower := self.seconds / searched / planned_pace) >= _MUCH_SLOWER:
                count += (
                    f"; {slower:.1f} times as long for each {self.report_word}: the plan counts "
                    "neither the start of Ray nor other work on the machine"
                )
        return sentence + count

    def _saved(self) -> str:
        one = self.stopped == 1
        who = f"{self.stopped:,} {'trial that was' if one else 'trials that were'} stopped"
        sentence = f"saved: {counted(self.saved_epochs, self.report_word)} of {who}"
        if self.spared_seeds:
            further = counted(self.spared_seeds, f"further {self.seed_word}")
            sentence += f", and of {further} that never started"
        if not self.saved_seconds.known:
            return sentence
        sentence += f", about {format_duration(self.saved_seconds.value)} of training"
        if self.saved_device_seconds.known:
            sentence += f", {format_device_hours(self.saved_device_seconds.value, self.device)}"
        return f"{sentence}, at {'its' if one else 'their'} own speed{self.saved_seconds.note}"


def usage(view: SweepView) -> Usage:
    """Return what a sweep has taken so far."""
    budget, records = view.spec.budget.reports, view.records
    spared = spared_seeds(view)
    started = [one for one in records if one.attempts or one.epoch]
    trained = {one.number: _trained(one, records) for one in started}
    furthest = _finished_epochs(records)
    saved = {
        one.number: max(0, budget - max(one.epoch, furthest.get(one.number, 0)))
        + budget * spared.get(one.number, 0)
        for one in started
        if one.role != "finish"
        and (is_stopped_early(one) or (one.reason or "").startswith(BY_PATIENCE))
    }
    stopped = [one for one in started if saved.get(one.number)]

    def rate(of: Callable[[TrialSummary], float | None]) -> Callable[[TrialSummary], float | None]:
        """Return what the reports that a trial did not make would have taken."""

        def speed(one: TrialSummary) -> float | None:
            taken, epochs = of(one), trained[one.number]
            return None if taken is None or not epochs else taken / epochs

        # The start of a trial's process is much of a short trial: none was slower than whole ones.
        ended = [one for one in started if one.role == "search" and one.state == "complete"]
        whole = [each for one in ended if (each := speed(one))]
        slowest = max(whole, default=math.inf)

        def found(one: TrialSummary) -> float | None:
            own = speed(one)
            return None if own is None else min(own, slowest) * saved[one.number]

        return found

    gpu = _total(started, lambda one: one.gpu_seconds)
    on_device = rate(lambda one: one.gpu_seconds if gpu.value else one.cpu_seconds)
    extra = [one for one in started if one.role in ORIGIN_COLUMNS]
    return Usage(
        report_word=view.spec.budget.report_word,
        trials=len(started),
        epochs=sum(trained.values()),
        seconds=view.ledger.seconds,
        trial_seconds=_total(started, lambda one: one.seconds),
        cpu_seconds=_total(started, lambda one: one.cpu_seconds),
        gpu_seconds=gpu,
        stopped=len(stopped),
        spared_seeds=sum(spared.values()),
        seed_word=view.spec.repeats.word,
        saved_epochs=sum(saved.values()),
        saved_seconds=_total(stopped, rate(lambda one: one.seconds)),
        saved_device_seconds=_total(stopped, on_device),
        planned=view.ledger.plan,
        extra=len(extra),
        extra_epochs=sum(trained[one.number] for one in extra),
    )


def spared_seeds(view: SweepView) -> dict[int, int]:
    """Return how many further seeds never start, by the stopped trial that spares them."""
    seeds = view.spec.repeats.seeds
    spared = {}
    for mine in configurations(view.records).values():
        stopped = [one.number for one in mine if is_stopped_early(one)]
        if stopped and len(mine) < seeds:
            spared[stopped[0]] = seeds - len(mine)
    return spared


def usage_at_end(view: SweepView) -> Usage | None:
    """Return what a sweep has taken; None if it has not ended."""
    return usage(view) if view.state in ("finished", "failed") else None


def _total(trials: Sequence[TrialSummary], value: Callable[[TrialSummary], float | None]) -> Total:
    known = [found for one in trials if (found := value(one)) is not None]
    return Total(round(sum(known), 3), len(known), len(trials))


def _trained(trial: TrialSummary, records: Sequence[TrialSummary]) -> int:
    """Return the reports of a trial; one that finishes another one began with that one's."""
    if trial.finishes is None:
        return trial.epoch
    return max(0, trial.epoch - records[trial.finishes].epoch)


def _finished_epochs(records: Sequence[TrialSummary]) -> dict[int, int]:
    """Return how far the trials came that were trained on by others, by number."""
    return {one.finishes: one.epoch for one in records if one.finishes is not None}


KINDS = ("checkpoints", "logs", "ledger", "outbox", "report", "other")
"""What takes space in a sweep's directory."""
_NUM_THREADS = 16
_OF_A_TRIAL = {"checkpoints": "checkpoints", "inherited": "checkpoints", "figures": "report"}


class DirectoryUsage(NamedTuple):
    """The space that a directory takes."""

    sizes: dict[str, int]
    """Bytes by kind."""
    links: list[Path]
    """Its symbolic links, which are not followed."""

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.sizes.values())


def directory_usage(directory: Path) -> DirectoryUsage:
    """Measure a sweep's directory; a file with several hard links counts once."""
    sizes, links = dict.fromkeys(KINDS, 0), []
    seen: set[tuple[int, int]] = set()
    for entry in _entries(directory):
        if entry.is_symlink():
            links.append(Path(entry.path))
            continue
        # A running sweep may remove it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            found = entry.stat(follow_symlinks=False)
            if found.st_nlink > 1:
                if (found.st_dev, found.st_ino) in seen:
                    continue
                seen.add((found.st_dev, found.st_ino))
            sizes[_kind(Path(entry.path).relative_to(directory).parts)] += found.st_size
    return DirectoryUsage(sizes, links)


def tree_size(path: Path) -> int:
    """Return the bytes of a file, or of all files below a directory; 0 without one."""
    if path.is_dir() and not path.is_symlink():
        return directory_usage(path).total
    return path.lstat().st_size if os.path.lexists(path) else 0


def sweep_usage(paths: SweepPaths, *, with_objects: bool = True) -> dict[str, Any]:
    """Return the object that `sweep list NAME --sizes --json` prints: a sweep's bytes by kind."""
    if not paths.exists():
        raise UnknownSweep(paths.name, paths.root)
    address, num_bytes = None, 0
    if with_objects:
        spec = read_spec(paths.spec).spec
        address = objects_prefix(paths, spec)
        num_bytes = sum(sweep_objects(paths, spec).values())
    sizes = directory_usage(paths.directory).sizes
    sizes["checkpoints"] += num_bytes
    return {
        "name": paths.name,
        **sizes,
        "total": sum(sizes.values()),
        "object_store": address,
    }


def total_usage(root: Path, warn: Callable[[str], None]) -> dict[str, Any]:
    """Return the object that `sweep list --sizes --json` prints: all sweeps, the largest first."""

    def measure(paths: SweepPaths) -> dict[str, Any]:
        try:
            return sweep_usage(paths)
        except ValueError as error:  # the spec or the object store
            warn(str(error))
            return sweep_usage(paths, with_objects=False)

    with ThreadPoolExecutor(_NUM_THREADS) as pool:  # object stores answer slowly
        sweeps = sorted(pool.map(measure, list_sweeps(root)), key=lambda one: -one["total"])
    more = root_usage(root)
    total = sum(one["total"] for one in sweeps) + sum(more.values())
    return {"sweeps": sweeps, **more, "total": total}


def root_usage(root: Path) -> dict[str, int]:
    """Return the bytes below a root of its tracking store, and of interrupted removals."""
    places = root.glob("mlflow.db*"), [artifact_root(root)]
    tracking = sum(tree_size(path) for group in places for path in group)
    return {"tracking": tracking, "removed": tree_size(root / REMOVED)}


def objects_prefix(paths: SweepPaths, spec: SweepSpec) -> str | None:
    """Return the prefix of all objects of a sweep, `s3://...`; None without an object store."""
    prefix = spec.storage.checkpoints
    return None if prefix is None else f"{prefix}/{paths.name}"


def sweep_objects(paths: SweepPaths, spec: SweepSpec) -> dict[str, int]:
    """Return the sizes of a sweep's objects by key; empty without an object store."""
    prefix = objects_prefix(paths, spec)
    if prefix is None:
        return {}
    check_store(paths.directory, prefix)
    from trainable.store.objects import object_sizes

    return object_sizes(prefix)


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield everything below a directory that is no directory."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path))
            else:
                yield entry


def _kind(parts: tuple[str, ...]) -> str:
    first = parts[0]
    if first == "trials" and len(parts) > 2:
        return _OF_A_TRIAL.get(parts[2], "logs")
    if first.startswith("ledger.db"):  # also SQLite's journal
        return "ledger"
    return {"outbox": "outbox", "report.html": "report"}.get(first, "other")
