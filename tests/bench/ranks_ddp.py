"""P13: the peer, as a tutorial of DistributedDataParallel writes it. Each rank trains an epoch per
line of rank 0's standard input, and rank 0 prints its seconds:

    torchrun --standalone --nproc-per-node 2 -m tests.bench.ranks_ddp PROBLEM loader

With `indexed` instead of `loader` the samples are indexed in memory, which no tutorial does.
What must not live here: anything of ours but the model and its data.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.bench.ranks_problems import EPOCHS, LR, MAX_NORM, PROBLEMS

Tensors = tuple[Tensor, Tensor]


def main(name: str, batches: str) -> None:
    """Train epochs until rank 0's standard input ends."""
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    rank, size = dist.get_rank(), dist.get_world_size()
    problem = PROBLEMS[name]
    task = problem.task()
    torch.manual_seed(0)
    model = DistributedDataParallel(task.build_model())
    dataset, share = TensorDataset(*task.tensors()), problem.batch_size // size
    sampler: DistributedSampler[int] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=share, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=LR, total_steps=EPOCHS * problem.steps
    )
    for epoch in range(EPOCHS):
        if not _may_train(rank):
            break
        started, total = time.perf_counter(), 0.0
        model.train()
        sampler.set_epoch(epoch)
        given: Iterable[Tensors] = (
            loader if batches == "loader" else _indexed(dataset.tensors, iter(sampler), share)
        )
        for inputs, targets in given:
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            total += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            schedule.step()
        if rank == 0:
            print(time.perf_counter() - started, flush=True)
    dist.barrier()  # else a rank may leave while the other one still answers
    dist.destroy_process_group()


def _may_train(rank: int) -> bool:
    """Return whether rank 0 read a line; the others wait for its answer without computing."""
    answer = torch.tensor([int(bool(sys.stdin.readline())) if rank == 0 else 0])
    dist.broadcast(answer, src=0)
    return bool(answer.item())


def _indexed(
    tensors: tuple[Tensor, ...], order: Iterator[int], size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for index in torch.tensor(list(order)).split(size):
        yield tensors[0][index], tensors[1][index]


if __name__ == "__main__":
    main(*sys.argv[1:])
