"""Models with tensors of unusual types, layouts and changing sizes train and resume.

Observers of quantization resize their buffers. Whoever calls `numpy()` on a tensor forbids its
owner to resize it from then on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    DeQuantStub,
    QuantStub,
    fuse_modules_qat,
    get_default_qat_qconfig,
    prepare_qat,
)

from tests.unit.trainable.conftest import Waves
from trainable.check.compare_states import state_differences
from trainable.check.findings import CheckRequest
from trainable.check.inspect_task import inspect_task
from trainable.config import TrialConfig
from trainable.loop import Trainer
from trainable.task import Data, Task
from trainable.user_code.fingerprint import tensor_digest
from trainable.watch.diagnostics import MEASURED

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.ao.quantization:DeprecationWarning",
    "ignore:.*reduce_range:UserWarning",
    "ignore:.*quantized tensor creation functions:UserWarning",
    "ignore:Lazy modules are a new feature:UserWarning",
    "ignore:Validating sparse tensor invariants:UserWarning",
    "ignore:TypedStorage is deprecated:UserWarning",
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu, self.head = nn.ReLU(), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(self.quant(x))))
        return self.dequant(self.head(x.flatten(1)))  # type: ignore[no-any-return]


class Quantized(Task):
    """Quantization-aware training, as the tutorial of torch prepares it."""

    def __init__(self, backend: str = "x86", fuses: bool = False) -> None:
        self.backend, self.fuses = backend, fuses

    def build_model(self) -> nn.Module:
        net = Net().train()
        if self.fuses:
            fuse_modules_qat(net, [["conv", "norm", "relu"]], inplace=True)
        net.qconfig = get_default_qat_qconfig(self.backend)  # type: ignore[assignment]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared: nn.Module = prepare_qat(net)
        return prepared

    def build_data(self) -> Data:
        def split(size: int, seed: int) -> tuple[Tensor, Tensor]:
            x = torch.randn(size, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
            return x, (x.sum((1, 2, 3)) > 0).long()

        return Data(train=split(48, 0), val=split(16, 1))


class Lazy(Waves):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))


class Observed(nn.Linear):
    """Its buffer gets its size in the first pass, in place."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("mean", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.mean.numel():
            self.mean.resize_(x.shape[1]).zero_()
        self.mean.lerp_(x.mean(0), 0.1)
        return super().forward(x - self.mean)


class Observing(Waves):
    def build_model(self) -> nn.Module:
        return Observed()


class Buffered(Waves):
    def build_model(self) -> nn.Module:
        model = nn.Linear(4, 2)
        wave = torch.complex(torch.ones(3), torch.arange(3.0))
        for name, value in {
            "sparse": torch.eye(3).to_sparse(),
            "brain": torch.ones(3, dtype=torch.bfloat16),
            "small": torch.ones(3).to(torch.float8_e4m3fn),
            "unsigned": torch.ones(3).to(torch.uint16),
            "conjugate": wave.conj(),
            "negative": wave.conj().imag,
            "scalar": torch.tensor(3),
            "expanded": torch.zeros(1).expand(3),
            "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        }.items():
            model.register_buffer(name, value)
        model.register_buffer("shared", model.scalar)
        model.weight.share_memory_()
        return model


TASKS: dict[str, tuple[type[Task], dict[str, Any]]] = {
    "quantized for each tensor": (Quantized, {"backend": "qnnpack"}),
    "quantized for each channel": (Quantized, {"backend": "x86"}),
    "quantized with fused layers": (Quantized, {"backend": "x86", "fuses": True}),
    "lazy": (Lazy, {}),
    "a buffer that gets its size in the first pass": (Observing, {}),
    "buffers of other types and layouts": (Buffered, {}),
}


@pytest.mark.parametrize("name", TASKS)
def test_model_trains_and_resumes_to_the_same_bits(
    tmp_path: Path,
    opened: Callable[..., Trainer],
    configure: Callable[..., TrialConfig],
    name: str,
) -> None:
    kind, arguments = TASKS[name]
    config = configure(every="2 steps")
    whole = opened(config, tmp_path / "whole", kind(**arguments))
    *_, last = whole.events()
    assert last.finished

    steps = iter(range(1, 100))
    cut = opened(config, tmp_path / "cut", kind(**arguments), should_stop=lambda: next(steps) == 5)
    list(cut.events())
    cut.close()
    resumed = opened(config, tmp_path / "cut", kind(**arguments))
    assert resumed.resumed_at == 5
    list(resumed.events())
    states = [
        # without the list of what has changed since the task was built: a resumed run builds
        # buffers of other sizes
        {key: value for key, value in one.state.state_dict().items() if key != "objects"}
        for one in (whole, resumed)
    ]
    assert whole.position == resumed.position > 5
    assert list(state_differences(*states, ignored=MEASURED)) == []


@pytest.mark.parametrize("name", TASKS)
def test_model_passes_the_check_of_a_sweep(
    configure: Callable[..., TrialConfig], name: str
) -> None:
    kind, arguments = TASKS[name]
    config = configure()
    task = {"name": f"{__name__}:{kind.__name__}", **arguments}
    config = TrialConfig.model_validate({**config.model_dump(), "task": task})
    found = inspect_task(CheckRequest(config=config))
    assert found.checked == []
    assert found.num_parameters == sum(
        p.numel() for p in _after_a_pass(kind(**arguments)).parameters()
    )
    assert found.step_seconds is not None


def _after_a_pass(task: Task) -> nn.Module:
    model = task.build_model()
    model(task.build_data().train[0][:4])  # type: ignore[index]
    return model


class Resized(nn.Module):
    """Buffers of each type; each pass gives them other memory, in place."""

    kinds = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64, torch.bfloat16)

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.passes = nn.Linear(4, 2), 0
        for number, kind in enumerate((*self.kinds, torch.complex64)):
            self.register_buffer(f"of{number}", torch.zeros(1 + number % 2, dtype=kind))
        self.register_buffer("scalar", torch.tensor(1))
        self.register_buffer("shared", self.of0)

    def forward(self, x: Tensor) -> Tensor:
        for buffer in self.buffers():
            before = buffer.detach().clone()
            buffer.resize_(buffer.numel() + 7).resize_(before.shape).copy_(before)
        return self.linear(x)  # type: ignore[no-any-return]


class Resizing(Task):
    """A hook resizes tensors that the task holds, samples included."""

    def build_model(self) -> nn.Module:
        self.seen = torch.zeros(2, dtype=torch.int64)
        return Resized()

    def build_data(self) -> Data:
        self.samples = torch.arange(96.0).view(24, 4).sin(), torch.arange(24) % 2
        return Data(train=self.samples, val=self.samples)

    def on_step_end(self, step: int) -> None:
        for tensor in (self.seen, *self.samples):
            before = tensor.clone()
            tensor.resize_(tensor.numel() + step).resize_(before.shape).copy_(before)


def _tensors(trainer: Trainer, task: Resizing) -> Iterator[Tensor]:
    yield from (*trainer.model.parameters(), *trainer.model.buffers())
    yield from (task.seen, *task.samples)


def test_nothing_forbids_a_task_to_resize_its_tensors(
    tmp_path: Path, opened: Callable[..., Trainer], configure: Callable[..., TrialConfig]
) -> None:
    """Opening, training, saving, resuming, and the digest of the data."""
    for last in (1, 2):
        task = Resizing()
        trainer = opened(configure(every="1 steps"), tmp_path, task, until=last)
        assert len(list(trainer.events())) == 1
        assert task.fingerprint(task.build_data()) is not None
        assert all(one.untyped_storage().resizable() for one in _tensors(trainer, task))
        trainer.close()


def test_digest_reads_views_and_leaves_the_memory_as_it_is() -> None:
    wave = torch.complex(torch.arange(6.0), torch.ones(6))
    strided = torch.arange(12).view(3, 4).T
    for tensor in (wave.conj(), wave.conj().imag, strided, torch.tensor(1), torch.empty(0)):
        assert tensor_digest(tensor) == tensor_digest(tensor.resolve_conj().contiguous())
        assert tensor.untyped_storage().resizable()
    assert tensor_digest(wave) != tensor_digest(wave.conj())
    assert tensor_digest(strided) != tensor_digest(strided + (strided == 7))
    large = torch.zeros(3 << 20)  # more than one piece
    assert tensor_digest(large) != tensor_digest(torch.cat([large[:-1], torch.ones(1)]))
