"""hidden_group: torch has no group where the ranks of a trial do not run the same code."""

from __future__ import annotations

import torch.distributed as dist

from trainable.group_joining import hidden_group


def test_group_that_a_task_makes_itself_stays():
    """A model of one process may need a group of one, as layers that are cut by tensors do."""
    with hidden_group():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        made = dist.group.WORLD
        assert made is not None
        with hidden_group():
            assert dist.group.WORLD is made
    finally:
        dist.destroy_process_group()
