"""Memory: a trial's process against a script written by hand, and the driver of a sweep."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil

from sweeps.engine.process_cleanup import find_orphans
from sweeps.sweep_lock import read_holder
from tests.bench.table import Goal, Result, alone, paired

_SWEEP = Path(sys.executable).with_name("sweep")
_EXAMPLE = Path(__file__).parents[2] / "sweeps" / "examples" / "digits.yaml"
_MIB = 2**20
_STATE = 96  # MiB of parameters and moments in the large state


def trial_process(repeats: int) -> list[Result]:
    """A process that trains the digits CNN with our trainer, and a script that does it bare; then
    both with a state of 100 MB that is saved after each epoch.
    """
    sides: dict[str, list[dict[str, float]]] = {
        side: [] for side in ("ours", "bare", "bare, with Ray", "ours, large", "bare, large")
    }
    for _ in range(repeats):
        for side, taken in sides.items():
            command = [sys.executable, "-m", "tests.bench.memory_child", side]
            taken.append(json.loads(subprocess.check_output(command)))
    results = []
    for kind in ("peak RSS", "USS"):
        ours = [taken[kind] for taken in sides["ours"]]
        for peer in ("bare", "bare, with Ray"):
            theirs = [taken[kind] for taken in sides[peer]]
            goal = Goal("ratio", 1.05) if peer == "bare" else None
            row = f"memory, a trial's {kind} / {peer} script"
            results.append(paired(row, ours, theirs, "MiB", goal))
    # One copy of the state stays in the host's memory from a save to the next: a copy into memory
    # that is touched for the first time costs eight times as much. The bare script's optimizer
    # takes memory too, for what fused kernels do without.
    peaks = [[one["peak RSS"] for one in sides[side]] for side in ("ours, large", "bare, large")]
    more = [ours - bare for ours, bare in zip(*peaks, strict=True)]
    row = "memory, a trial's peak RSS beyond a bare script's, 100 MB of state saved each epoch"
    return [*results, alone(row, more, "MiB", Goal("ours", _STATE))]


def sweep_processes(repeats: int) -> list[Result]:
    """The processes of a real small sweep: its driver, its trials, and all others.

    Sampled four times a second while it runs; one run, since what varies is the machine's.
    """
    del repeats
    with tempfile.TemporaryDirectory() as root:
        settings = ["-s", "trials=6", "-s", "budget.epochs=5", "-s", "search.startup_trials=3"]
        command = [str(_SWEEP), "run", str(_EXAMPLE), "--root", root, *settings]
        driver = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        peaks: dict[str, float] = {}
        together: dict[str, float] = defaultdict(float)
        while driver.poll() is None:
            now: dict[str, float] = defaultdict(float)
            for name, process in _processes(driver, Path(root) / "digits" / "lock"):
                try:
                    uss = process.memory_full_info().uss
                    peak = _peak_rss(process.pid)
                except (psutil.Error, OSError):
                    continue  # gone meanwhile
                now[name] += uss
                for kind, value in (("RSS", float(peak)), ("USS", uss)):
                    key = f"{name} {kind}"
                    peaks[key] = max(peaks.get(key, 0), value)
            for name, value in now.items():
                together[name] = max(together[name], value)
            time.sleep(0.25)
        assert driver.returncode == 0, f"the sweep ended with {driver.returncode}"
    goals = {"driver RSS": Goal("ours", 700)}
    wanted = ("driver RSS", "driver USS", "trial RSS", "trial USS")
    lines = [
        alone(f"memory, sweep: peak {key}", [peaks[key] / _MIB], "MiB", goals.get(key))
        for key in wanted
        if key in peaks
    ]
    return lines + [
        alone(f"memory, sweep: all {name} processes together, USS", [value / _MIB], "MiB")
        for name, value in together.items()
        if name != "driver"
    ]


def _processes(driver: psutil.Popen, lock: Path) -> list[tuple[str, psutil.Process]]:
    found: list[tuple[str, psutil.Process]] = [("driver", driver)]
    holder = read_holder(lock) if lock.exists() else None
    if holder is None:
        return found
    for process in find_orphans(holder.token):
        if process.pid == driver.pid:
            continue
        try:
            title = " ".join(process.cmdline()[:2])
        except psutil.Error:
            continue  # gone meanwhile
        trial = "ray::" in title and "IDLE" not in title
        found.append(("trial" if trial else "other", process))
    return found


def _peak_rss(pid: int) -> int:
    """Highest resident size in bytes so far, as the kernel counted it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
