"""Write a spec and a task module, which run unedited.

What must not live here: anything that a running sweep needs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from sweeps.errors import SweepExists, UserError
from sweeps.formatting import listed
from sweeps.path_checks import make_private, write_file
from sweeps.paths import SweepPaths, command_line
from sweeps.spec.revisions import describe_changes, read_spec
from sweeps.spec.spec import parse_with_positions
from sweeps.stores import check_stores
from sweeps.view.sweep_view import UnknownSweep
from trainable.store.regular_files import create_regular

_SPEC = """\
# Run it from this directory:   sweep run sweep.yaml
# Check it without running:     sweep check sweep.yaml

name: my_sweep
task:
  name: my_task:MyTask             # my_task.py beside this file, class MyTask
  hidden: 64                       # passed to MyTask(hidden=...)
metric: val/loss                   # decides which trial is best
mode: min                          # min: lower is better; max: higher is better
trials: 8
seed: 0
budget: {epochs: 5}

space:                             # dotted path into this file: distribution
  train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}
  train.schedule.warmup: {uniform: [0.0, 0.3]}
  train.clip.max_norm: {loguniform: [0.1, 10]}
  task.hidden: {choice: [32, 64, 128]}

search: {sampler: tpe, startup_trials: 4}
early_stopping: {scheduler: asha, grace_epochs: 1, reduction: 3}
resources: {cpu: 1, gpu: auto}     # auto: as many trials share a GPU as fit, measured with two
                                   # steps of the largest trial; 0: train on the CPU

train:                             # fixed values; the space overrides some of them
  batch_size: 64
  optimizer: {name: adamw, lr: 1.0e-3, weight_decay: 0.01}
  schedule: {name: cosine}
checkpoint: {every: 1 epoch, keep: 2}
"""

_TASK = '''\
"""A task: a model and its data. Gradsweep provides the loop, checkpoints and metrics."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from trainable import Data, Task


class MyTask(Task):
    """Handwritten digits, 8x8 pixels, ten classes.

    Args:
        hidden: Width of the hidden layer.
    """

    def __init__(self, *, hidden: int = 64) -> None:
        self.hidden = hidden

    def build_model(self) -> nn.Module:
        """Return any torch model; the loop seeds it and moves it to the device."""
        return nn.Sequential(
            nn.Linear(64, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, 10),
        )

    def build_data(self) -> Data:
        """Return tensors or map-style datasets; keep the split the same in every trial."""
        digits = load_digits()
        x = torch.tensor(digits.data, dtype=torch.float32) / 16
        y = torch.tensor(digits.target, dtype=torch.long)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        val, train = order[:360], order[360:]
        return Data(train=(x[train], y[train]), val=(x[val], y[val]))

    # The loss is cross entropy unless you define
    #     def loss(self, model, batch): return loss_sum, weight
    # and the metrics are val/loss and val/accuracy unless you define
    #     def evaluate(self, model, batches): return {"loss": ..., "f1": ...}
'''

_FILES = {"sweep.yaml": _SPEC, "my_task.py": _TASK}


def write_starter(directory: Path) -> list[Path]:
    """Write `sweep.yaml` and `my_task.py` into a directory, which is created if missing."""
    files = {directory / name: text.encode() for name, text in _FILES.items()}
    existing = [path for path in files if os.path.lexists(path)]
    if len(existing) == len(files) or any(not _is_same(path, files[path]) for path in existing):
        raise UserError(
            f"{listed(list(map(str, existing)))} exist{'s' * (len(existing) == 1)} already; "
            "nothing is overwritten; choose another directory: sweep init DIR"
        )
    written: list[Path] = []
    with make_private(directory, "sweep init") as place:
        try:
            # the second one alone, if an earlier call was killed between the two
            for path in files.keys() - existing:
                create_regular(place / path.name, files[path])
                written.append(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                for path in written:
                    path.unlink()
            raise UserError(
                f"{error.filename or directory} cannot be written ({error.strerror}); a starter "
                "is two files in a directory; choose another directory: sweep init DIR"
            ) from None
    return list(files)


def _is_same(path: Path, content: bytes) -> bool:
    """Whether a file is a starter's own, which no one has edited."""
    return path.is_file() and not path.is_symlink() and path.read_bytes() == content


def write_clone(
    paths: SweepPaths, new: str, settings: Sequence[str]
) -> tuple[Path, str, str | None]:
    """Write the spec of a new sweep into the working directory."""
    target = SweepPaths(paths.root, new)  # checks the name
    if not paths.exists():
        raise UnknownSweep(paths.name, paths.root)
    if target.exists():
        raise SweepExists(target, "choose another name")
    before = read_spec(paths.spec)
    spec, document = parse_with_positions(before.text, str(paths.spec), settings, name=new)
    check_stores(paths, spec, document)
    changed = describe_changes(before.spec, spec)
    file = Path(f"{new}.yaml")
    text = f"# A clone of sweep '{paths.name}'; changed: {changed}\n{spec.to_yaml()}"
    try:
        write_file(file, text.encode(), "NEW", overwrite=False)
    except FileExistsError:
        raise UserError(
            f"{file} exists already; nothing is overwritten; remove it, or choose another name: "
            f"{command_line(paths.root, 'init', 'NEW', '--from', paths.name)}"
        ) from None
    return file, changed, before.damage
