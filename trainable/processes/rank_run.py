"""What a further rank of a trial does: it trains in lock-step with the first rank.

In a sweep it does so in a fresh fork for each run. What must not live here: Ray (`ray_ranks.py`),
and how ranks exchange (`rank_group.py`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import traceback
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainable import rank_waits
from trainable.config import TrialConfig
from trainable.errors import RankLost
from trainable.failures import failure_of
from trainable.processes import attempt_process
from trainable.processes.trial_log import DescriptorOutput, TrialLog, rank_log

if TYPE_CHECKING:
    from trainable.group_joining import GroupPlace

IMPORTED = "imported"
"""What the process sends when it has imported the task. It receives where the ranks meet, and
sends at last how its run failed: as `failure_of` describes it, or None."""


@dataclass(frozen=True)
class RankOrder:
    """What a rank trains: a dumped `TrialConfig`, and what it may take of the machine."""

    config: dict[str, Any]
    directory: Path
    searched: Collection[str]
    threads: int
    memory_share: float
    timeout: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RankOrder:
        """Return what the ranks of a trial train; `config` is that of a `TuneTrial`."""
        return cls(
            config=config["config"],
            directory=Path(config["directory"]),
            searched=tuple(config.get("params", ())),
            threads=config["threads"],
            memory_share=gpu_share(config),
            timeout=config.get("rank_timeout", rank_waits.STEP),
        )


def gpu_share(config: Mapping[str, Any]) -> float:
    """Return a rank's share of its GPU; 1 where it has a whole GPU, or none."""
    share = config.get("bundles", ({},))[0].get("GPU", 0.0)
    return share if 0 < share < 1 else 1.0


def train(connection: Connection, order: RankOrder, rank: int) -> None:
    """Train one rank of a run to the end of the run."""
    log = order.directory / rank_log(rank)
    name = str(order.config["task"]["name"])

    def load() -> bool:
        with logged(open_log(log)):
            return import_task(name) is None

    attempt_process.import_task(connection, name, load)
    connection.send(IMPORTED)
    place, address = connection.recv()
    failure = None
    with logged(open_log(log)):
        try:
            set_interop_threads(order.threads)
            follow(
                TrialConfig.model_validate(order.config),
                order.directory,
                place,
                rank,
                searched=order.searched,
                threads=order.threads,
                memory_share=order.memory_share,
                own_address=address,
                accept_workers=True,  # the driver has checked that it may
            )
        except RankLost as error:
            print(error)  # the first rank finds out which one was lost
        except BaseException as error:  # of the user's code, sys.exit() too: reported
            traceback.print_exc()
            failure = failure_of(error)
    connection.send(failure)


def import_task(name: str) -> BaseException | None:
    """Import the module of a task; return why it cannot be."""
    from trainable.find_task import import_named

    try:
        import_named(name)
    # Whatever the user's module raises, sys.exit() too, ends this trial alone.
    except BaseException as error:
        return error
    return None


def set_interop_threads(threads: int) -> None:
    """Set torch's number of threads beside those of an operation, which it allows once."""
    import torch

    if torch.get_num_interop_threads() != threads:
        torch.set_num_interop_threads(threads)


@contextlib.contextmanager
def logged(log: TrialLog) -> Iterator[None]:
    """Write what the process prints into a log, also below Python, and close the log."""
    faulthandler.enable(log.fileno())
    output = DescriptorOutput()
    try:
        with log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            try:
                yield
            finally:
                output.copy_to(log)
    finally:
        faulthandler.disable()


def open_log(path: Path) -> TrialLog:
    """Open a trial's log; what is printed is lost where it cannot be opened."""
    try:
        return TrialLog(path)
    except OSError:  # opening the run fails, too, and reports the reason
        return TrialLog(os.devnull)


def follow(
    config: TrialConfig,
    directory: Path,
    place: GroupPlace,
    rank: int,
    *,
    own_address: str | None = None,
    **options: Any,
) -> None:
    """Train as one of the further ranks of a trial, until the first rank ends the run.

    The options are those of `open_trainer`.
    Import the task before: the time-out of joining does not cover it.
    """
    from trainable.build import open_trainer
    from trainable.logged import closed_on_error, run_log
    from trainable.parallel.rank_group import RankGroup
    from trainable.precision import find_device

    target = find_device(options.get("device"))
    run_log(directory, writes=False)  # the task may log in its constructor
    with (
        closed_on_error(directory),
        RankGroup.join(place, rank, device=target, own_address=own_address) as ranks,
        open_trainer(config, directory, ranks=ranks, **options) as run,
    ):
        for _ in run.events():
            pass
