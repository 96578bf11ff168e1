"""Optimizers of torch by name, of the user's own classes, and several for one model."""

from __future__ import annotations

import inspect
import re
from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.optimizers import ScheduleFree, TwoOptimizers
from trainable.check.findings import CheckRequest
from trainable.check.inspect_task import inspect_task
from trainable.config import (
    OPTIMIZER_DEFAULTS,
    SCHEDULES,
    OptimizerConfig,
    ScheduleConfig,
    TaskConfig,
    TrainConfig,
)
from trainable.errors import ConfigError, TaskError, TrainingError
from trainable.export import export_weights
from trainable.optim import build_optimizer, evaluated_weights, normalize_groups
from trainable.task import decay_groups

_OF_TORCH = ("adadelta", "adagrad", "adamax", "asgd", "muon", "nadam", "radam", "rmsprop", "rprop")
_NEED_CLOSURES_OR_SPARSE_GRADIENTS = {"lbfgs", "sparseadam"}


class Signs(torch.optim.Optimizer):
    """Steps by the signs of a moving average."""

    def __init__(self, params, lr=1e-3, beta=0.9, weight_decay=0.0, span=(0.0, 1.0), flip=False):
        options = {"lr": lr, "beta": beta, "weight_decay": weight_decay}
        super().__init__(params, {**options, "span": span, "flip": flip})

    @torch.no_grad()
    def step(self, closure=None):
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p, group):
        moment = self.state[p].setdefault("moment", torch.zeros_like(p))
        moment.lerp_(p.grad, 1 - group["beta"])
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(moment.sign(), alpha=-group["lr"])


class Counting(Signs):
    """Counts its steps in an option of the group, as Prodigy and schedule-free optimizers do."""

    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, lr, beta)
        self.defaults["count"] = 0
        for group in self.param_groups:
            group["count"] = 0

    def update(self, p, group):
        group["count"] += 1
        p.add_(p.grad, alpha=-group["lr"] / group["count"])


class Attributing(Signs):
    """Its count is in an attribute, which a run saves beside the state dict."""

    count = 0

    def update(self, p, group):
        self.count += 1
        p.add_(p.grad, alpha=-group["lr"] / self.count)


class Forgetting(Signs):
    """Its state dict lacks what it keeps for each parameter."""

    def state_dict(self):
        return {**super().state_dict(), "state": {}}


class Unloadable(Signs):
    def load_state_dict(self, state_dict):
        raise KeyError(len(state_dict))


class Closing(Signs):
    def step(self, closure):
        raise NotImplementedError


class Asserting(Signs):
    def step(self, closure=None):
        assert closure is not None, "Sharpness Aware Minimization requires closure"


def _own(kind, **options):
    return {"name": f"{kind.__module__}:{kind.__name__}", "lr": 0.01, **options}


def _spiral(config):
    return config.model_copy(update={"task": TaskConfig(name="spiral")})


def _build(options, model=None):
    groups = normalize_groups(decay_groups(model or nn.Linear(3, 2)))
    return build_optimizer(OptimizerConfig(**options), groups)


def test_every_optimizer_of_torch_has_a_name():
    theirs = {
        name.lower()
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and kind is not torch.optim.Optimizer
    }
    assert theirs - _NEED_CLOSURES_OR_SPARSE_GRADIENTS <= OPTIMIZER_DEFAULTS.keys()
    assert {*OPTIMIZER_DEFAULTS} - {"lamb", "lion"} <= theirs


@pytest.mark.parametrize("name", _OF_TORCH)
def test_defaults_are_those_of_torch(name):
    by_name = {key.lower(): kind for key, kind in vars(torch.optim).items()}
    model = nn.Linear(3, 2, bias=False)
    (group,) = _build({"name": name}, model).param_groups
    (theirs,) = by_name[name](model.parameters()).param_groups
    ours = {key: group[key] for key in theirs}
    assert ours == theirs


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "adafactor"])
def test_an_argument_reaches_its_class(name):
    argument = {"sgd": {"dampening": 0.1}, "adafactor": {"d": 1.5}}.get(name, {"amsgrad": True})
    built = _build({"name": name, "arguments": argument})
    assert argument.items() <= built.param_groups[0].items()


def test_list_of_the_file_is_a_tuple_for_the_class():
    built = _build({"name": "rprop", "arguments": {"step_sizes": [1e-5, 10.0]}})
    assert built.param_groups[0]["step_sizes"] == (1e-5, 10.0)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"name": "adam", "arguments": {"amsgrd": True}}, "train.optimizer.arguments.amsgrd"),
        ({"name": "adam", "arguments": {"amsgrad": "yes"}}, "train.optimizer.arguments.amsgrad"),
        ({"name": "nadam", "arguments": {"momentum_decay": True}}, ".arguments.momentum_decay"),
        ({"name": "rprop", "arguments": {"etas": [0.5]}}, "train.optimizer.arguments.etas"),
        ({"name": "rmsprop", "arguments": {"alpha": -1.0}}, "train.optimizer.name"),
        ({"name": "adafactor", "arguments": {"d": 0.5}}, "train.optimizer.name"),
        ({"name": "muon"}, "train.optimizer.name"),
        (_own(Signs, momentum=0.9), "train.optimizer.momentum"),
        (_own(Signs, arguments={"flip": 1}), "train.optimizer.arguments.flip"),
        (_own(Closing), "train.optimizer.name"),
        ({"name": f"{__name__}:Signs"}, "train.optimizer"),
        ({"name": f"{__name__}:Missing", "lr": 1.0}, "train.optimizer.name"),
        ({"name": f"{__name__}:TwoOptimizers", "lr": 1.0}, "train.optimizer.name"),
        ({"name": "no_such_module:Signs", "lr": 1.0}, "train.optimizer.name"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_wrong_options_are_refused_by_their_key(options, key):
    with pytest.raises(ConfigError) as refused:
        _build(options)
    assert refused.value.key.endswith(key)


def test_options_of_a_class_that_are_not_given_are_its_own():
    config = OptimizerConfig(**_own(Signs, arguments={"beta": 0.5}))
    again = OptimizerConfig.model_validate_json(config.model_dump_json())
    for one in (config, again):
        assert one.model_dump() == {
            "name": f"{__name__}:Signs",
            "lr": 0.01,
            "arguments": {"beta": 0.5},
        }
    (group, _) = _build(again.model_dump()).param_groups
    assert (group["beta"], group["weight_decay"], group["span"]) == (0.5, 0.0, (0.0, 1.0))
    (decaying, bias) = _build(_own(Signs, weight_decay=0.1)).param_groups
    assert (decaying["weight_decay"], bias["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize(
    "options",
    [
        _own(Signs),
        _own(Counting),
        _own(Attributing),
        _own(ScheduleFree),
        {"name": "adam", "arguments": {"amsgrad": True}},
        {"name": "rmsprop"},
    ],
    ids=lambda options: options["name"].rpartition(":")[2],
)
def test_optimizer_that_can_be_restored_passes_the_check(configure, options):
    found = inspect_task(CheckRequest(config=_spiral(configure(optimizer=options))))
    assert found.optimizer_bytes >= found.weight_bytes or options["name"].endswith("ting")
    files = {name.rpartition("/")[2] for name in found.code}
    assert ("test_own_optimizers.py" in files) == (":" in options["name"])


@pytest.mark.parametrize("kind", [Forgetting, Unloadable, Asserting])
def test_optimizer_that_cannot_be_restored_is_refused(configure, kind):
    sound = _spiral(configure())
    broken = _spiral(configure(optimizer=_own(kind)))
    with pytest.raises(ConfigError) as refused:
        inspect_task(CheckRequest(config=sound, variants=(sound, broken)))
    assert refused.value.key == "train.optimizer.name"
    assert ("Your own loop" in str(refused.value)) == (kind is Asserting)


def test_one_schedule_scales_every_optimizer_from_its_own_rate(tmp_path, opened, configure, toy):
    task = type("TwoToy", (TwoOptimizers, toy), {})()
    trainer = opened(configure(schedule={"name": "linear"}), tmp_path, task)
    rates = []
    trainer._step.optimizer.register_step_post_hook(
        lambda *_: rates.append([group["lr"] for group in trainer.groups])
    )
    list(trainer.events())
    assert len(rates) == trainer.state.progress.step
    assert all(fast > faster for (fast, _), (faster, _) in pairwise(rates))
    for fast, slow in rates:
        assert fast == pytest.approx(20 * slow)


@pytest.mark.parametrize("overflow", ["0.weight", "0.bias"])
def test_overflow_stops_every_optimizer(tmp_path, opened, configure, toy, overflow):
    task = type("TwoToy", (TwoOptimizers, toy), {})()
    trainer = opened(configure(precision="fp16"), tmp_path, task)
    step = trainer._step
    before = [p.detach().clone() for p in step.parameters]
    window = next(iter(trainer._train.windows(0, 0)))
    dict(step.model.named_parameters())[overflow].register_hook(lambda g: g * torch.inf)
    assert not step(window, 1).taken
    assert all(map(torch.equal, before, step.parameters))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda m, _: torch.optim.SGD([m[0].weight], lr=1.0), "0.bias, 3.weight, 3.bias"),
        (
            lambda m, _: [
                torch.optim.SGD(m.parameters(), lr=1.0),
                torch.optim.SGD(m[3].parameters(), lr=1.0),
            ],
            "3.weight, 3.bias",
        ),
        (lambda *_: [], "list"),
        (lambda *_: ["sgd"], "str"),
        (lambda m, _: torch.optim.LBFGS(m.parameters()), "Your own loop"),
    ],
)
def test_wrong_build_optimizer_is_refused(tmp_path, opened, configure, toy, build, words):
    kind = type("WrongToy", (toy,), {"build_optimizer": lambda _, *given: build(*given)})
    with pytest.raises(TaskError, match="build_optimizer") as refused:
        opened(configure(), tmp_path, kind())
    assert words in str(refused.value)


def test_evaluation_and_saves_have_the_averaged_weights(tmp_path, opened, configure, toy):
    """A schedule-free optimizer trains `y`, and evaluates and exports `x`."""
    evaluated = {}

    class Looking(toy):
        def evaluate(self, model, batches):
            evaluated.update({k: v.clone() for k, v in model.state_dict().items()})
            return super().evaluate(model, batches)

    trainer = opened(configure(optimizer=_own(ScheduleFree, lr=0.3)), tmp_path, Looking())
    list(trainer.events())
    trained = trainer.model.state_dict()
    assert not any(torch.equal(trained[key], evaluated[key]) for key in trained)
    with evaluated_weights(trainer._step.optimizer):
        for key, value in trainer.model.state_dict().items():
            assert torch.equal(value, evaluated[key])
    assert trainer.store.pointer is not None
    target = tmp_path / "model.safetensors"
    export_weights(trainer.store.generations()[-1].path, target)
    from safetensors.torch import load_file

    exported = load_file(target)
    assert all(torch.equal(exported[key], evaluated[key]) for key in exported)


def test_looking_at_the_averaged_weights_changes_no_bit(tmp_path, opened, configure, toy):
    trainer = opened(configure(optimizer=_own(ScheduleFree, lr=0.3)), tmp_path, toy())
    list(trainer.events())
    before = [p.detach().clone() for p in trainer._step.parameters]
    with evaluated_weights(trainer._step.optimizer):
        assert not any(map(torch.equal, before, trainer._step.parameters))
    assert all(map(torch.equal, before, trainer._step.parameters))
    assert all(group["train_mode"] for group in trainer.groups)


def test_state_of_other_optimizers_is_refused(tmp_path, opened, configure, toy):
    two = type("TwoToy", (TwoOptimizers, toy), {})
    list(opened(configure(), tmp_path, two(), until=1).events())
    with pytest.raises(TrainingError, match="several optimizers"):
        opened(configure(), tmp_path, toy())


def test_hyperparameters_are_those_of_the_resumed_run(tmp_path, opened, configure, toy):
    first = configure(optimizer=_own(Counting, arguments={"beta": 0.9}))
    list(opened(first, tmp_path, toy(), until=1).events())
    other = configure(optimizer=_own(Counting, arguments={"beta": 0.5}))
    trainer = opened(other, tmp_path, toy())
    assert [group["beta"] for group in trainer.groups] == [0.5, 0.5]
    assert all(group["count"] > 0 for group in trainer.groups)
    assert TrainConfig().optimizer.arguments == {}


@pytest.mark.parametrize(
    ("section", "names"), [(OptimizerConfig, OPTIMIZER_DEFAULTS), (ScheduleConfig, SCHEDULES)]
)
def test_reference_lists_every_name(section, names):
    described = section.model_fields["name"].description
    assert [name for name in names if name not in re.findall(r"\w+", described)] == []
