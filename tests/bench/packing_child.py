"""One packed trial: `python -m tests.bench.packing_child SHARE DEVICE`.

Trains an epoch, says `ready`, and then for each line of its input trains some more and prints the
seconds that took. Ends with its input.
"""

from __future__ import annotations

import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from trainable.build import open_trainer
from trainable.config import TrialConfig

_EPOCHS = 20


def main(share: float, device: str) -> None:
    """Train whenever it is asked for."""
    config = TrialConfig.model_validate(
        {
            "task": {"name": "digits"},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": 1_000_000},
            "train": {"schedule": {"name": "constant"}},
            "checkpoint": {"every": "1000000 epochs"},
        }
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        open_trainer(
            config, Path(directory), device=device, threads=1, memory_share=share
        ) as trainer,
    ):
        reports = trainer.events()
        next(reports)
        print("ready", flush=True)
        for _ in sys.stdin:
            started = time.perf_counter()
            list(islice(reports, _EPOCHS))
            print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
