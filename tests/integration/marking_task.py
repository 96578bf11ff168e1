"""A task that changes all that a task can change for its process, and fails where it finds that.

`test_fresh_processes.py` copies it beside its spec, so that workers import it as a user's module.
"""

from __future__ import annotations

import colorsys
import functools
import os
import signal
import threading
import time
import warnings
from pathlib import Path

import torch
from torch import nn

from trainable import Data, Task

STARTS: list[int] = []


@functools.lru_cache
def first(_: str) -> int:
    """Remember what was asked first."""
    return len(STARTS)


def changed() -> dict[str, object]:
    """Return what a task has changed."""
    return {
        "global": list(STARTS),
        "class": list(Marking.started),
        "cache": first.cache_info().currsize,
        "function": colorsys.rgb_to_hsv(0, 0, 0) != (0, 0, 0),
        "environment": "MARKED" in os.environ,
        "dtype": torch.get_default_dtype() != torch.float32,
        "hooks": len(nn.modules.module._global_forward_hooks),
        "directory": not Path("marking_task.py").exists(),
        "signal": signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL,
        "umask": _umask() == 0o007,
        "warnings": ("ignore", None, Marking, None, 0) in warnings.filters,
        "threads": any(one.name == "marking" for one in threading.enumerate()),
    }


def _umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before


class Marking(Task):
    """Eight samples; marks its process when its model is built."""

    started: list[int] = []  # noqa: RUF012 the mistake that is tested

    def build_model(self) -> nn.Module:
        assert not any(changed().values()), f"another task has run here: {changed()}"
        STARTS.append(os.getpid())
        type(self).started.append(os.getpid())
        first("loss")
        colorsys.rgb_to_hsv = lambda *_: (1, 1, 1)
        os.environ["MARKED"] = "1"
        torch.set_default_dtype(torch.float64)
        nn.modules.module.register_module_forward_hook(lambda *_: None)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        os.umask(0o007)
        warnings.simplefilter("ignore", Marking)  # type: ignore[arg-type]
        threading.Thread(target=time.sleep, args=(600,), name="marking", daemon=True).start()
        directory = Path(f"gone-{os.getpid()}").absolute()
        directory.mkdir()
        os.chdir(directory)
        directory.rmdir()
        assert all(changed().values()), changed()
        return nn.Linear(2, 2, dtype=torch.float32)

    def build_data(self) -> Data:
        data = torch.ones(8, 2), torch.zeros(8, dtype=torch.long)
        return Data(train=data, val=data)
