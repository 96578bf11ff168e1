"""Precision, optimizers, state, seeds and diagnostics, each alone."""

# ruff: noqa: ARG005  what stands in for something keeps its signature

from __future__ import annotations

import random
import subprocess
import sys

import numpy
import pytest
import torch
from torch import nn

import trainable
from tracking.limits import clean_key
from trainable.config import ClipConfig, OptimizerConfig, ScheduleConfig
from trainable.errors import CheckpointError, ConfigError, TaskError
from trainable.optim import Clipper, build_optimizer
from trainable.precision import Precision, resolve_precision
from trainable.schedule import Schedule
from trainable.seeding import derive_seed, preserved_host_rng, set_determinism, set_seed
from trainable.step import Step, StepParts
from trainable.task import Task, decay_groups
from trainable.train_state import TrainState
from trainable.watch.diagnostics import LayerNorms, Throughput

CPU = torch.device("cpu")


def _state(name="adamw", width=3):
    torch.manual_seed(0)
    model = nn.Linear(width, 2)
    optimizer = build_optimizer(OptimizerConfig(name=name), decay_groups(model))
    schedule = Schedule(ScheduleConfig(), peak=1e-3, total_steps=9, steps_per_epoch=3)
    parts = StepParts(Task(), model, optimizer, schedule, Precision("fp32", CPU))
    return TrainState(Step(parts, Clipper(ClipConfig())))


# Precision


@pytest.mark.seeds("S2")
@pytest.mark.parametrize(
    ("native", "name", "expected"),
    [
        (True, "auto", "bf16"),
        (False, "auto", "fp16"),
        (False, "fp32", "fp32"),
        (False, "fp16", "fp16"),
    ],
)
def test_auto_follows_the_gpu(monkeypatch, native, name, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert resolve_precision(name, torch.device("cuda")) == expected
    assert resolve_precision("auto", CPU) == "fp32"


@pytest.mark.seeds("S2")
def test_unsupported_precision_names_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old T4")
    with pytest.raises(ConfigError, match=r"bf16; cuda:0 \(Old T4\) does not compute in it"):
        resolve_precision("bf16", torch.device("cuda:0"))
    with pytest.raises(ConfigError, match="the device mps only fp32"):
        resolve_precision("fp16", torch.device("mps"))


@pytest.mark.seeds("S3")
def test_only_fp16_has_a_scaler():
    assert [Precision(n, CPU).scaler is None for n in ("fp32", "bf16", "fp16")] == [
        True,
        True,
        False,
    ]


# Optimizers


@pytest.mark.seeds("S8")
@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("sgd", {"nesterov": True}, torch.optim.SGD),
        ("adam", {"betas": (0.8, 0.9), "eps": 1e-7}, torch.optim.Adam),
        ("adamw", {}, torch.optim.AdamW),
        ("adafactor", {"eps": 1e-4}, torch.optim.Adafactor),
    ],
)
def test_optimizers_of_torch(name, options, kind):
    model = nn.Linear(3, 2)
    config = OptimizerConfig(name=name, lr=0.5, weight_decay=0.02, **options)
    optimizer = build_optimizer(config, decay_groups(model))
    assert type(optimizer) is kind
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.02, 0.0]
    model(torch.ones(1, 3)).sum().backward()
    before = model.weight.clone()
    optimizer.step()
    assert not torch.equal(before, model.weight)


@pytest.mark.seeds("S8")
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"name": "sgd"}, {"lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 0}),
        (
            {"name": "sgd", "nesterov": True},
            {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0},
        ),
        (
            {"name": "adam"},
            {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0},
        ),
        (
            {"name": "adamw"},
            {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
        ),
        ({"name": "adafactor"}, {"lr": 1e-3, "weight_decay": 0}),
        ({}, {"lr": 3e-4, "weight_decay": 0.01}),
    ],
    ids=str,
)
def test_defaults_are_the_documented_ones(config, expected):
    optimizer = build_optimizer(OptimizerConfig(**config), decay_groups(nn.Linear(3, 2)))
    group = optimizer.param_groups[0]
    assert {key: group[key] for key in expected} == expected


@pytest.mark.seeds("S8")
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize(("device", "fused"), [("cpu", True), ("meta", False)])
def test_kernels_are_fused_where_the_device_has_them(name, device, fused):
    model = nn.Linear(3, 2, device=device)
    optimizer = build_optimizer(OptimizerConfig(name=name), decay_groups(model))
    assert [bool(group["fused"]) for group in optimizer.param_groups] == [fused, fused]
    model(torch.ones(1, 3, device=device)).sum().backward()
    optimizer.step()
    assert {id(p) for p in optimizer.state} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_strided_parameter_learns_like_a_contiguous_one(name):
    """As the first channel of a convolution that was trained on coloured pictures."""
    view = nn.Parameter(torch.arange(12.0).reshape(4, 3)[:, :1])
    whole = nn.Parameter(view.detach().contiguous())
    for parameter in (view, whole):
        optimizer = build_optimizer(OptimizerConfig(name=name, lr=0.01), [{"params": [parameter]}])
        for _ in range(3):
            optimizer.zero_grad()
            (parameter * torch.arange(4.0)[:, None]).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(view, whole)


@pytest.mark.parametrize("stride", [(27, 1, 9, 3), (27, 9, 3, 1)])
def test_fused_kernels_for_every_dense_layout(stride):
    weight = nn.Parameter(torch.empty_strided((8, 3, 3, 3), stride).normal_())
    optimizer = build_optimizer(OptimizerConfig(), [{"params": [weight]}])
    assert optimizer.param_groups[0]["fused"]
    # Its gradient has another layout on its way; torch keeps it in that of its parameter.
    nn.functional.conv2d(torch.ones(2, 3, 5, 5), weight).square().sum().backward()
    assert weight.grad.stride() == stride


@pytest.mark.parametrize("name", ["lamb", "lion"])
def test_missing_optimizer_package_names_what_to_install(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ConfigError, match=r"pip install 'gradsweep\[optimizers\]'"):
        build_optimizer(OptimizerConfig(name=name), decay_groups(nn.Linear(1, 1)))


@pytest.mark.usefixtures("even_clock")
def test_group_learning_rate_keeps_the_logged_one(tmp_path, opened, configure, toy):
    class Backbone(toy):
        def param_groups(self, model):
            slow = {"params": model[0].parameters(), "lr": 1e-4}
            return [slow, {"params": model[3].parameters()}]

    config = configure(epochs=6, schedule={"name": "constant"}, optimizer={"lr": 0.01})
    trainer = opened(config, tmp_path, Backbone())
    report = list(trainer.events())[-1]
    assert [group["lr"] for group in trainer.groups] == [1e-4, 0.01]
    assert {row.metrics["train/lr"] for row in report.rows} == {0.01}
    assert report.signals == []


@pytest.mark.parametrize(
    "given",
    [
        lambda model: model.parameters(),
        lambda model: model.named_parameters(),
        lambda model: tuple(model.parameters()),
    ],
)
def test_groups_accept_every_form_that_torch_takes(tmp_path, opened, configure, toy, given):
    class Headed(toy):
        def param_groups(self, model):
            return {"params": given(model[0])}, {"params": model[3].weight, "lr_multiplier": 0.1}

    trainer = opened(configure(optimizer={"name": "sgd"}), tmp_path, Headed())
    first, head = (group["params"] for group in trainer.groups)
    assert [id(p) for p in first] == [id(p) for p in trainer.model[0].parameters()]
    assert [id(p) for p in head] == [id(trainer.model[3].weight)]
    before = trainer.model[3].weight.clone()
    list(trainer.events())
    assert not torch.equal(before, trainer.model[3].weight)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (lambda model: model.parameters(), "must return a list of dicts"),
        (lambda model: [{"params": [model]}], "lists an object of type Sequential"),
        (lambda model: [{"params": [(model[0].weight, model[0].bias)]}], "of type tuple among"),
        (lambda model: [{"params": set(model.parameters())}], "of type set; they must be a list"),
        (lambda model: [{"params": model[0]}], "of type Linear; they must be a list"),
    ],
)
def test_groups_of_another_form_are_refused(tmp_path, opened, configure, toy, groups, message):
    class Flat(toy):
        def param_groups(self, model):
            return groups(model)

    with pytest.raises(TaskError, match=message):
        opened(configure(), tmp_path, Flat())


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_continues_after_a_stopped_first_step(nesterov):
    ours, theirs = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    config = OptimizerConfig(name="sgd", lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0)
    optimizer = build_optimizer(config, [{"params": [ours]}])
    reference = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=nesterov)
    ours.grad = torch.full((4,), torch.inf)
    optimizer.found_inf = torch.ones(())  # how an overflow stops the fused kernel
    optimizer.step()
    assert optimizer.state[ours]["momentum_buffer"].tolist() == [0.0] * 4
    del optimizer.found_inf
    for number in (1.0, -2.0, 0.5):
        ours.grad, theirs.grad = torch.full((4,), number), torch.full((4,), number)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("momentum", "own"), [(0.9, {"dampening": 0.9}), (0.0, {"momentum": 0.5}), (0.5, {})]
)
def test_sgd_with_group_options_matches_torch_after_overflow(momentum, own):
    ours, theirs = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    config = OptimizerConfig(name="sgd", lr=0.1, momentum=momentum, weight_decay=0)
    optimizer = build_optimizer(config, [{"params": [ours], **own}])
    reference = torch.optim.SGD([{"params": [theirs], **own}], lr=0.1, momentum=momentum)
    precision = Precision("fp16", CPU, initial_scale=1.0)
    for number in (torch.inf, 1.0, -2.0, 0.5):
        theirs.grad = torch.full((4,), number)
        ours.grad = precision.scale(theirs.grad)
        precision.unscale(optimizer)
        precision.step(optimizer)
        if precision.update():
            reference.step()
    assert not torch.equal(theirs, torch.ones(4))
    torch.testing.assert_close(ours, theirs)


def test_empty_or_overlapping_groups_are_refused():
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(TaskError, match="hold no parameter"):
        build_optimizer(OptimizerConfig(), [{"params": []}])
    with pytest.raises(TaskError, match="at least one must have requires_grad"):
        build_optimizer(
            OptimizerConfig(), [{"params": [nn.Parameter(torch.ones(1), requires_grad=False)]}]
        )
    with pytest.raises(TaskError, match="lists a parameter twice"):
        build_optimizer(OptimizerConfig(), [{"params": [weight]}, {"params": [weight]}])


# State


@pytest.mark.seeds("S15")
def test_state_survives_torchs_safe_loading(tmp_path):
    state = _state()
    random.gauss(0, 1)  # Python draws these in pairs: the second one is part of the state
    torch.save(state.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    expected = torch.rand(3), numpy.random.rand(), random.gauss(0, 1)
    state.load_state_dict(loaded)
    found = torch.rand(3), numpy.random.rand(), random.gauss(0, 1)
    assert torch.equal(expected[0], found[0])
    assert expected[1:] == found[1:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("scaler"), r"lacks the keys \['scaler'\]"),
        (lambda s: s.update(extra=1), r"unknown keys \['extra'\]"),
        (lambda s: s["progress"].pop("best"), r"the progress lacks the keys \['best'\]"),
        (lambda s: s["random"].update(other=1), r"the random state .*unknown keys \['other'\]"),
        (lambda s: s.update(format=99), "has format 99"),
    ],
)
def test_state_with_missing_or_unknown_keys_is_refused(change, message):
    saved = _state().state_dict()
    change(saved)
    with pytest.raises(CheckpointError, match=message):
        _state().load_state_dict(saved)


def test_state_of_another_model_is_refused():
    with pytest.raises(CheckpointError, match="does not fit the model or the optimizer"):
        _state(width=4).load_state_dict(_state().state_dict())


# Seeds


def test_seeds_are_fixed_for_ever():
    assert derive_seed(0, "order", 3) == derive_seed(0, "order", 3) != derive_seed(0, "order", 4)
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert derive_seed("a") == 7299139317422481125


@pytest.mark.seeds("S20")
def test_set_seed_starts_every_generator():
    draws = []
    for _ in range(2):
        set_seed(2**62 + 7)
        draws.append((torch.rand(()).item(), numpy.random.rand(), random.random()))
    assert draws[0] == draws[1]


def test_isolated_randomness_is_restored_after_an_error():
    set_seed(1)
    expected = torch.rand(()).item(), numpy.random.rand(), random.random()
    set_seed(1)

    def fail():
        set_seed(2)
        raise KeyError

    with pytest.raises(KeyError), preserved_host_rng():
        fail()
    assert (torch.rand(()).item(), numpy.random.rand(), random.random()) == expected


@pytest.mark.seeds("S20")
@pytest.mark.parametrize("deterministic", [True, False])
def test_determinism_is_switched_both_ways(deterministic):
    set_determinism(not deterministic)
    set_determinism(deterministic)
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert torch.backends.cudnn.benchmark is not deterministic


# Diagnostics


@pytest.mark.seeds("S7")
def test_layer_norms_group_parameters_by_module():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.grad = torch.full((2, 2), 3.0)
    model[0].bias.grad = torch.full((2,), 4.0)
    layers = LayerNorms(model, list(model.parameters()))
    assert layers.present() == ["0 Linear", "0 Linear"]
    norms = [6.0, 4.0 * 2**0.5]
    assert LayerNorms.metrics(layers.present(), norms, 2.0) == {
        "grad_norm/0 Linear": pytest.approx((36 + 32) ** 0.5 / 2)
    }


def test_layer_names_sort_as_the_layers_do():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(11))
            self.head = nn.Sequential(nn.ReLU(), nn.LayerNorm(1))

    model, stray = Net(), nn.Parameter(torch.ones(1))
    parameters = [*model.parameters(), stray]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    names = list(dict.fromkeys(LayerNorms(model, parameters).present()))
    blocks = [f"blocks.{index:02d} Linear" for index in range(11)]
    assert names == ["Net", *blocks, "head.1 LayerNorm", "outside the model"]
    assert blocks == sorted(blocks)
    assert all(clean_key(f"grad_norm/{name}") == f"grad_norm/{name}" for name in names)


def test_throughput_leaves_pauses_out():
    now = [0.0]
    throughput = Throughput(lambda: now[0])
    throughput.start()
    throughput.count(30)
    now[0] = 3.0
    assert throughput.read() == 10.0
    now[0] = 100.0
    throughput.start()
    throughput.count(8)
    now[0] = 102.0
    assert throughput.read() == 4.0
    assert throughput.read() == 0.0


# Imports

HEAVY = "[m for m in ('torch', 'ray', 'numpy', 'sklearn', 'mlflow') if m in sys.modules]"


@pytest.mark.parametrize(
    "statement",
    [
        "import trainable",
        "import trainable.config, trainable.errors, trainable.seeding",
        "import trainable.store.metrics_file",
        "from trainable import TrialConfig, Row, read_rows",
    ],
)
def test_light_imports_load_nothing_heavy(statement):
    code = f"import sys\n{statement}\nprint({HEAVY})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_imported():
    for name in trainable.__all__:
        assert getattr(trainable, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = trainable.nothing
