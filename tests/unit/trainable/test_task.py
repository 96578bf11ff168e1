"""Losses, parameter groups, default evaluation, and tasks by name."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from sweeps.spec.spec import parse_spec
from tests.unit.trainable.conftest import Waves
from trainable.build import open_trainer
from trainable.errors import ConfigError, TaskError
from trainable.find_task import load_task
from trainable.forms import output_problem
from trainable.losses import binary_cross_entropy, cross_entropy
from trainable.task import Data, Task, check_data, decay_groups


@pytest.mark.seeds("S13")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(9,), (9, 4)])
def test_weighted_cross_entropy_equals_torchs_mean(smoothing, weighted, shape):
    torch.manual_seed(0)
    logits = torch.randn(shape[0], 5, *shape[1:], dtype=torch.float64)
    targets = torch.randint(5, shape)
    targets[::3] = -100
    weight = torch.rand(5, dtype=torch.float64) if weighted else None
    total, share = cross_entropy(logits, targets, weight=weight, label_smoothing=smoothing)
    expected = F.cross_entropy(logits, targets, weight=weight, label_smoothing=smoothing)
    torch.testing.assert_close(total / share, expected)


@pytest.mark.seeds("S13")
def test_cross_entropy_with_probabilities_and_ignored_class():
    torch.manual_seed(0)
    logits = torch.randn(6, 3)
    chances = torch.rand(6, 3).softmax(dim=1)
    total, share = cross_entropy(logits, chances)
    torch.testing.assert_close(total / share, F.cross_entropy(logits, chances))
    targets = torch.tensor([0, 1, 2, 0, 1, 2])
    total, share = cross_entropy(logits, targets, ignore_index=2)
    assert share == 4
    torch.testing.assert_close(total / share, F.cross_entropy(logits, targets, ignore_index=2))


@pytest.mark.parametrize("weight", [None, torch.arange(1.0, 257.0)])
def test_cross_entropy_accepts_byte_classes(weight):
    torch.manual_seed(0)
    logits = torch.randn(4, 256)
    targets = torch.tensor([1, 2, 1, 156])  # as a mask all classes; the last is -100 as a byte
    total, share = cross_entropy(logits, targets.to(torch.uint8), weight=weight)
    torch.testing.assert_close(total / share, F.cross_entropy(logits, targets, weight=weight))


_INTEGERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


@pytest.mark.parametrize("kind", _INTEGERS, ids=str)
@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 3.0])], ids=["plain", "weighted"])
def test_classes_of_each_integer_type_train_and_are_counted(
    tmp_path, opened, configure, kind, weight
):
    class Typed(Waves):
        class_weights = weight

        def build_data(self):
            x, y = super().build_data().train
            return Data(train=(x, y.to(kind)), val=(x, y.to(kind)))

    x, y = Typed().build_data().train
    total, share = cross_entropy(nn.Linear(4, 2)(x), y, weight=weight)
    assert total.requires_grad
    assert share == (24 if weight is None else weight[y.long()].sum())
    assert output_problem(torch.zeros(24, 2), y) is None
    (*_, last) = opened(configure(), tmp_path, Typed()).events()
    assert 0 < last.metrics["val/loss"] < 2
    assert 0 < last.metrics["val/accuracy"] <= 1


@pytest.mark.parametrize("kind", [torch.int8, torch.int16, torch.int32], ids=str)
def test_ignored_classes_of_each_signed_type_are_not_counted(kind):
    logits, targets = torch.randn(4, 3), torch.tensor([0, -100, 2, -100])
    total, share = cross_entropy(logits, targets.to(kind))
    assert share == 2
    torch.testing.assert_close(total / share, F.cross_entropy(logits, targets))


@pytest.mark.seeds("S13")
def test_binary_cross_entropy():
    logits = torch.tensor([0.5, -1.0, 2.0, 0.1])
    targets = torch.tensor([1, 0, 1, -100])
    total, share = binary_cross_entropy(logits, targets)
    expected = F.binary_cross_entropy_with_logits(logits[:3], targets[:3].float())
    torch.testing.assert_close(total / share, expected)
    positive = torch.tensor(3.0)
    total, share = binary_cross_entropy(logits, targets, weight=positive, label_smoothing=0.2)
    goal = targets[:3].float() * 0.8 + 0.1
    expected = F.binary_cross_entropy_with_logits(logits[:3], goal, pos_weight=positive)
    torch.testing.assert_close(total / share, expected)


WEIGHTS = [1, 2, 0.5, 1, 1, 3, 1, 0.1, 1, 1]


@pytest.mark.seeds("S13")
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_smoothing_is_searchable_and_class_weights_fixed(tmp_path, precision, tolerance):
    spec = parse_spec(
        "name: smooth\nmetric: val/loss\nmode: min\ntrials: 1\nbudget: {epochs: 1}\n"
        f"task: {{name: digits, model: mlp, width: 8, class_weights: {WEIGHTS}}}\n"
        "space: {task.label_smoothing: {uniform: [0.0, 0.2]}}\n"
        f"train: {{batch_size: 2000, precision: {precision}}}\n",
        "smooth.yaml",
    )
    config = spec.trial_config(0, {"task.label_smoothing": 0.15})
    with open_trainer(config, tmp_path, device="cpu") as trainer:
        untrained = copy.deepcopy(trainer.model)
        (report,) = trainer.events()
    data = load_task("digits", {}).build_data()
    weight = torch.tensor(WEIGHTS)

    inputs, targets = data.train
    smooth = F.cross_entropy(untrained(inputs), targets, weight=weight, label_smoothing=0.15)
    assert report.rows[0].metrics["train/loss"] == pytest.approx(smooth.item(), rel=tolerance)
    inputs, targets = data.val
    plain = F.cross_entropy(trainer.model.eval()(inputs), targets, weight=weight)
    assert report.metrics["val/loss"] == pytest.approx(plain.item(), rel=tolerance)


@pytest.mark.seeds("S13")
@pytest.mark.parametrize("name", ["digits", "fashion_mnist"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label_smoothing": 1.0}, r"label_smoothing is 1.0; it must lie in \[0, 1\)"),
        ({"class_weights": [1.0, 2.0]}, r"class_weights is \[1.0, 2.0\]; it must be 10 numb"),
        ({"class_weights": [0, 0, 0]}, "class_weights"),
        ({"class_weights": [1, -1, 1]}, "class_weights"),
    ],
)
def test_inconsistent_loss_options_are_refused(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_task(name, arguments)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.group = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)


@pytest.mark.seeds("S9")
def test_biases_and_norms_do_not_decay():
    model = Tied()
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, undecayed = decay_groups(model)
    assert {names[id(p)] for p in decayed["params"]} == {
        "embedding.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "frozen.weight",
    }
    assert {names[id(p)] for p in undecayed["params"]} == {
        "norm.weight",
        "norm.bias",
        "attention.in_proj_bias",
        "attention.out_proj.bias",
        "group.weight",
        "group.bias",
        "head.bias",
        "frozen.bias",
    }
    assert "weight_decay" not in decayed
    assert undecayed["weight_decay"] == 0.0


@pytest.mark.seeds("S9")
@pytest.mark.parametrize(
    ("module", "decayed"),
    [
        (nn.LSTM(4, 5, proj_size=2, bidirectional=True), "weight_"),
        (nn.GRU(4, 5, num_layers=2), "weight_"),
        (nn.RNNCell(4, 5), "weight_"),
        (nn.MultiheadAttention(4, 2, add_bias_kv=True), ("in_proj_weight", "out_proj.weight")),
    ],
    ids=["LSTM", "GRU", "RNNCell", "attention"],
)
def test_biases_with_a_name_behind_them_do_not_decay(module, decayed):
    names = {id(p): name for name, p in module.named_parameters()}
    groups = decay_groups(module)
    found = [[names[id(p)] for p in group["params"]] for group in groups]
    assert all(name.startswith(decayed) for name in found[0])
    assert all("bias" in name for name in found[1])
    assert [group.get("weight_decay") for group in groups] == [None, 0.0]


def test_evaluation_without_classes_omits_accuracy():
    class Regression(Task):
        def loss(self, model, batch):
            inputs, targets = batch
            return (model(inputs) - targets).square().sum(), len(inputs)

    batches = [(torch.randn(4, 3), torch.randn(4, 1)), (torch.randn(2, 3), torch.randn(2, 1))]
    metrics = Regression().evaluate(nn.Linear(3, 1), batches)
    assert set(metrics) == {"loss"}


def test_accuracy_leaves_ignored_targets_out():
    model = nn.Identity()
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    targets = torch.tensor([0, 1, -100, 1])
    assert Task().evaluate(model, [(logits, targets)])["accuracy"] == pytest.approx(2 / 3)
    assert not model._forward_hooks


def test_built_in_tasks_load_with_arguments():
    task = load_task("digits", {"model": "mlp", "width": 8})
    assert task.build_model()[1].out_features == 8
    data = task.build_data()
    assert len(data.train[0]) + len(data.val[0]) == 1797
    assert load_task("spiral", {"samples": 20}).build_data().train[0].shape == (60, 2)


def test_split_is_decided_by_its_own_seed():
    torch.manual_seed(1)
    one = load_task("digits", {}).build_data().val[1]
    torch.manual_seed(2)
    assert torch.equal(one, load_task("digits", {}).build_data().val[1])
    assert not torch.equal(one, load_task("digits", {"split_seed": 1}).build_data().val[1])


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "minetask.py").write_text(
        "from trainable.task import Task\n"
        "import math\n"
        "class Mine(Task):\n"
        "    def __init__(self, size, *, depth=2):\n"
        "        if depth < 0: raise ValueError('depth is below 0')\n"
        "class Other:\n"
        "    pass\n"
        "number = 3\n"
    )
    (tmp_path / "brokentask.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "digit",
            {},
            r"not a built-in task \(did you mean 'digits'\?\).*fashion_mnist, spiral.*:ClassName",
        ),
        ("minetask", {}, "not a built-in task"),
        ("minetask:", {}, "not a built-in task"),
        (":Mine", {}, "not a built-in task"),
        (
            "nowhere.mod:Mine",
            {},
            r"the module 'nowhere.mod' could not be imported.*before the colon",
        ),
        ("brokentask:Mine", {}, "could not be imported.*a_module_that_is_missing"),
        ("minetask:Mime", {}, r"has no 'Mime' \(did you mean 'Mine'\?\)"),
        ("minetask:Other", {}, "the class Other, which does not derive from Task"),
        ("minetask:number", {}, "an object of type int.*must be a class"),
        (
            "minetask:Mine",
            {"size": 1, "dept": 2},
            r"'dept' \(did you mean 'depth'\?\).*size, depth",
        ),
        ("minetask:Mine", {}, "needs the argument 'size'"),
        ("minetask:Mine", {"size": 1, "depth": -1}, "refused its arguments.*depth is below 0"),
        ("digits", {"model": "rnn"}, "must be 'cnn' or 'mlp'"),
        ("digits", {"width": 6}, "positive multiple of 4"),
        ("digits", {"val_fraction": 1.5}, "between 0 and 1"),
        ("spiral", {"samples": 1}, "at least 4"),
        ("spiral", {"width": 0}, "at least 1"),
    ],
)
@pytest.mark.usefixtures("module")
def test_task_that_cannot_be_loaded_says_why(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_task(name, arguments)


@pytest.mark.usefixtures("module")
def test_own_task_loads():
    assert type(load_task("minetask:Mine", {"size": 1, "depth": 3})).__name__ == "Mine"


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1, 2], "object of type list; it must return trainable.Data"),
        (
            Data(train=(torch.ones(3), torch.ones(2)), val=(torch.ones(1),)),
            r"train .*lengths \[2, 3\]",
        ),
        (Data(train=(torch.ones(0),), val=(torch.ones(1),)), "train has no samples"),
        (Data(train=(torch.ones(1), 3), val=(torch.ones(1),)), "does not hold tensors only"),
        (
            Data(train=(torch.ones(1),), val=iter(Stream())),
            "or a stream: an IterableDataset, or an iterable with",
        ),
        (Data(train=(torch.ones(1),), val=[]), "val has no samples"),
        (Data(train=7, val=[1]), "object of type int; give a Dataset"),
        (Data(train=[1], val=TensorDataset), r"val is the class TensorDataset; .*TensorDataset\("),
    ],
)
def test_data_of_the_wrong_type_names_what_to_return(data, message):
    with pytest.raises(TaskError, match=message):
        check_data(data, Task())
