"""Custom loops on several ranks, one after the other in the same processes.

What must not live here: what the tests expect of them (`tests/unit/trainable/test_loop_ranks.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainable.config import TrialConfig
from trainable.group_joining import GroupPlace, listen
from trainable.parallel.rank_group import RankGroup
from trainable.processes.local_ranks import LocalRanks
from trainable.processes.rank_run import follow


def plain(config, context):
    """A script for torchrun: it makes its group, and draws other dropout masks on each rank."""
    dist.init_process_group()
    own = torch.Generator().manual_seed(context.seed + context.rank)
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.train.optimizer.lr)
    if context.restored:
        model.module.load_state_dict(context.restored["model"])
        optimizer.load_state_dict(context.restored["optimizer"])
        if kept := context.restored.get("per_rank"):  # a rank that is new has none
            own.set_state(kept["own"])
    arguments = config.task.arguments
    for epoch in context.remaining_epochs():
        order = torch.randperm(12)[context.rank :: context.world_size]
        inputs = order[:, None] + torch.rand(len(order), 3, generator=own)
        if epoch == 2 and context.rank == 1:
            _misbehave(arguments.get("in_epoch_2", ""))
        loss = (model(inputs) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if context.rank == arguments.get("skips", -1) and epoch == 3:
            continue
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "per_rank": {"own": own.get_state()},
        }
        yield {"val/loss": total.item(), "rank": float(context.rank)}, state


def apart(config, context):
    """A script that knows nothing of other processes."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.train.optimizer.lr)
    for _ in context.remaining_epochs():
        loss = (model(torch.ones(1, 3)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield {"val/loss": loss.item()}, {"model": model.state_dict()}


def _misbehave(how: str) -> None:
    if how == "raise":
        raise ValueError("bad sample 17")
    if how == "die":
        os._exit(1)


def config_of(
    loop: str, *, epochs: int = 4, workers: int = 2, batch_size: int = 16, **arguments: Any
) -> TrialConfig:
    return TrialConfig.model_validate(
        {
            "task": {"name": loop, **arguments},
            "metric": "val/loss",
            "mode": "min",
            "seed": 3,
            "workers": workers,
            "budget": {"epochs": epochs},
            "train": {"batch_size": batch_size, "optimizer": {"lr": 0.05}},
        }
    )


KEY = "of both"
"""With which the ranks of a case sign, whose places are not sent."""


class Case:
    """A run of a loop: its configuration, its directory, and the socket at which ranks meet."""

    def __init__(self, config: TrialConfig, directory: Path) -> None:
        self.config, self.directory = config, directory
        self.listening = listen()

    @property
    def place(self) -> GroupPlace:
        port = self.listening.getsockname()[1]
        return GroupPlace("127.0.0.1", port, self.config.workers, key=KEY)

    def described(self) -> dict[str, Any]:
        return {
            "config": self.config.model_dump_json(),
            "directory": str(self.directory),
            "port": self.place.port,
        }

    def join(self) -> RankGroup:
        """Join as the first rank."""
        return RankGroup.join(self.place, 0, listening=self.listening)


@contextlib.contextmanager
def other_ranks(cases: list[Case]) -> Iterator[LocalRanks]:
    """Start the further ranks of some cases, as many as the largest of them has."""
    with contextlib.ExitStack() as stack:
        for case in cases:
            stack.callback(case.listening.close)  # without effect once it is detached
        ranks = stack.enter_context(LocalRanks(max(c.config.workers for c in cases)))
        ranks.begin(f"{__name__}:follow_all", {}, cases=[case.described() for case in cases])
        yield ranks


def follow_all(rank: int, place: dict[str, Any], cases: list[dict[str, Any]]) -> list[str]:
    """Follow the first rank in each case that has this rank; return how each ended."""
    del place
    ends, kept = [], []
    for case in cases:
        config = TrialConfig.model_validate_json(case["config"])
        if rank >= config.workers:
            ends.append("")
            continue
        met = GroupPlace("127.0.0.1", case["port"], config.workers, key=KEY)
        try:
            follow(config, Path(case["directory"]), met, rank, device="cpu", accept_workers=True)
        except Exception as problem:
            kept.append(problem)  # as a log or a debugger may
            ends.append(f"{type(problem).__name__}: {problem}")
        else:
            ends.append("" if not dist.is_initialized() else "its group is still there")
    return ends
