"""A custom loop runs like a task: reports, rows, checkpoints, resumption, and its errors."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math

import numpy
import pytest
import torch
from torch import nn

from tests.message_parts import assert_parts
from tests.resumption import Crash, crash_at, curve, equal, to_end
from trainable.build import check_loop, open_trainer
from trainable.check.findings import CheckRequest
from trainable.check.inspect_task import inspect_task
from trainable.checkpoint import CheckpointStore
from trainable.config import TaskConfig, TrialConfig
from trainable.custom_loop import CustomLoop
from trainable.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteMetric,
    TaskError,
    WithoutEffect,
)
from trainable.export import export_weights
from trainable.loop_context import Opening
from trainable.store.metrics_file import read_rows
from trainable.train_state import check_state
from trainable.watch.diagnostics import MEASURED

LOOPS = """
import os, random
import numpy, torch
from torch import nn

def plain(config, context):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.train.optimizer.lr)
    if context.restored:
        model.load_state_dict(context.restored["model"])
        optimizer.load_state_dict(context.restored["optimizer"])
    for epoch in context.remaining_epochs():
        if epoch == config.task.arguments.get("die_in", -1) and not context.restored:
            os._exit(1)
        inputs = torch.randn(8, 3) + random.random() + numpy.random.rand()
        loss = (model(inputs) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield {"val/loss": loss.item()}, {
            "model": model.state_dict(), "optimizer": optimizer.state_dict()
        }

def stateless(config, context):
    for epoch in context.remaining_epochs():
        yield {"val/loss": 1.0 / (epoch + 1)}

class NotATask:
    pass
"""


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "ownloops.py").write_text(LOOPS)
    monkeypatch.syspath_prepend(tmp_path)


def _config(name="ownloops:plain", *, epochs=6, every="1 epoch", mode="min", **arguments):
    return TrialConfig.model_validate(
        {
            "task": {"name": name, **arguments},
            "metric": "val/loss",
            "mode": mode,
            "seed": 3,
            "budget": {"epochs": epochs},
            "checkpoint": {"every": every},
            "train": {"optimizer": {"lr": 0.05}},
        }
    )


@pytest.fixture
def stale_writer():
    """Runs that crash are closed when the test ends, long after the resumed ones."""
    with contextlib.ExitStack() as stack:
        yield stack.enter_context


def _open(function, directory, config=None, **options):
    config = config or _config()
    stop = options.pop("should_stop", lambda: False)
    opening = Opening(directory, torch.device("cpu"), **options)
    return CustomLoop(function, config, opening, stop)


def _values(*values, state=None):
    """A loop that yields these values of the metric, one after the other."""

    def loop(config, context):  # noqa: ARG001  a loop's signature
        for value in values[context.epoch :]:
            yield ({"val/loss": value}, state) if state is not None else {"val/loss": value}

    return loop


def _reproducible(metrics):
    return {name: value for name, value in metrics.items() if name not in MEASURED}


def test_each_yield_is_a_report_a_row_and_a_generation(tmp_path):
    with open_trainer(_config(epochs=3), tmp_path / "run", device="cpu") as loop:
        reports = list(loop.events())
    assert [(r.step, r.epoch, r.finished) for r in reports] == [
        (1, 1, False),
        (2, 2, False),
        (3, 3, True),
    ]
    assert [[row.step for row in r.rows] for r in reports] == [[1], [2], [3]]
    assert [row for r in reports for row in r.rows] == read_rows(tmp_path / "run")
    losses = [r.metrics["val/loss"] for r in reports]
    assert [r.metrics["best/val/loss"] for r in reports] == list(itertools.accumulate(losses, min))
    assert [r.metrics["epoch"] for r in reports] == [1.0, 2.0, 3.0]
    saved = CheckpointStore(tmp_path / "run").generations()
    assert reports[-1].checkpoint == saved[-1].pointer  # earlier ones may name the one before
    assert saved[-1].step == 3


@pytest.mark.parametrize("every", ["1 epoch", "2 epochs"])
def test_crash_and_resume_equals_an_uninterrupted_run(tmp_path, stale_writer, every):
    config = _config(every=every)
    with open_trainer(config, tmp_path / "whole", device="cpu") as whole:
        last = list(whole.events())[-1]
    store = CheckpointStore(tmp_path / "whole")
    expected = store.load(store.newest())["loop"]["model"]
    for crash in (1, 2, 3, 5, 6):
        directory = tmp_path / f"cut-{crash}"
        crashed = stale_writer(
            open_trainer(config, directory, device="cpu", should_stop=crash_at(crash))
        )
        with pytest.raises(Crash):
            to_end(crashed)
        torch.manual_seed(99)
        with open_trainer(config, directory, device="cpu") as resumed:
            assert resumed.resumed_at < crash
            resumed_last = list(resumed.events())[-1]
        assert _reproducible(resumed_last.metrics) == _reproducible(last.metrics)
        assert curve(directory) == curve(tmp_path / "whole")
        store = CheckpointStore(directory)
        assert equal(store.load(store.newest())["loop"]["model"], expected)


def test_loop_without_state_starts_again(tmp_path, stale_writer):
    config = _config("ownloops:stateless", epochs=4)
    crashed = stale_writer(open_trainer(config, tmp_path, device="cpu", should_stop=crash_at(3)))
    with pytest.raises(Crash):
        list(crashed.events())
    assert len(curve(tmp_path)) == 3
    (tmp_path / "metrics.jsonl").write_bytes(bytes(64) + b"\n")  # power was lost meanwhile
    with open_trainer(config, tmp_path, device="cpu") as again:
        assert curve(tmp_path) == []
        assert again.resumed_at == 0
        reports = list(again.events())
    assert [r.checkpoint for r in reports] == [None] * 4
    assert [step for step, _ in curve(tmp_path)] == [1, 2, 3, 4]


def test_interrupted_loop_saves_its_last_epoch(tmp_path):
    asked = itertools.count(1)
    config = _config(every="100 epochs", mode="max")
    loop = _values(3.0, 2.0, 1.0, 0.5, 0.4, 0.3, state={"x": 1})
    with _open(loop, tmp_path, config, should_stop=lambda: next(asked) >= 3) as trainer:
        reports = list(trainer.events())
    assert [r.epoch for r in reports] == [1, 2, 3]
    assert reports[-1].checkpoint.step == 3
    assert not reports[-1].finished
    with _open(loop, tmp_path, config) as resumed:
        assert [r.epoch for r in resumed.events()] == [4, 5, 6]


def _pairs(*pairs):
    def loop(config, context):  # noqa: ARG001  a loop's signature
        for loss, speed in pairs[context.epoch :]:
            yield {"val/loss": loss, "val/speed": speed}, {"x": 1}

    return loop


def test_secondary_metrics_are_those_of_the_best_report(
    tmp_path,
):
    several = {"metric": ("val/loss", "val/speed"), "mode": ("min", "max")}
    config = _config(epochs=3).model_copy(update=several)
    with _open(_pairs((3.0, 10.0), (1.0, 20.0), (2.0, 90.0)), tmp_path / "a", config) as run:
        *_, last = run.events()
    assert (last.metrics["best/val/loss"], last.metrics["best/val/speed"]) == (1.0, 20.0)
    broken = _open(_pairs((3.0, 10.0), (1.0, math.nan)), tmp_path / "b", config)
    with broken, pytest.raises(NonFiniteMetric, match="val/speed is nan in report 2"):
        list(broken.events())
    assert read_rows(tmp_path / "b")[-1].metrics["best/val/loss"] == 3.0
    missing = _open(_values(1.0), tmp_path / "c", config)
    with missing, pytest.raises(ConfigError, match="metric: 'val/speed'"):
        list(missing.events())


def test_finished_run_repeats_its_last_report(tmp_path):
    with open_trainer(_config(), tmp_path, device="cpu") as loop:
        last = list(loop.events())[-1]
    with open_trainer(_config(), tmp_path, device="cpu") as loop:
        (again,) = loop.events()
    assert again.finished
    assert (again.step, again.metrics, again.checkpoint) == (6, last.metrics, last.checkpoint)
    assert again.rows == []


def test_loop_that_ends_early_finishes_the_run(tmp_path):
    with _open(_values(3.0, 2.0, state={"x": 1}), tmp_path) as trainer:
        reports = list(trainer.events())
    assert [(r.epoch, r.finished, len(r.rows)) for r in reports] == [
        (1, False, 1),
        (2, False, 1),
        (2, True, 0),
    ]
    with _open(_values(3.0, 2.0, state={"x": 1}), tmp_path) as trainer:
        (again,) = trainer.events()
    assert again.finished
    assert again.metrics == reports[-1].metrics


@pytest.mark.parametrize("until", [None, 2, 3])
def test_patience_ends_a_loop(tmp_path, until):
    values = _values(5.0, 3.0, 4.0, 3.5, 1.0, 1.0, state={"x": 1})
    data = _config().model_dump()
    config = TrialConfig.model_validate(data | {"patience": 2})
    reports = []
    if until is not None:  # paused there, and resumed
        with _open(values, tmp_path, config, until=until) as trainer:
            reports += trainer.events()
    with _open(values, tmp_path, config) as trainer:
        reports += trainer.events()
    assert [report.epoch for report in reports] == [1, 2, 3, 4]
    assert reports[-1].finished
    assert reports[-1].out_of_patience
    assert reports[-1].metrics["best/val/loss"] == 3.0


def test_loop_counts_reports_of_a_budget_in_steps(tmp_path):
    data = _config().model_dump() | {"budget": {"steps": 100, "report_every": 40}}
    config = TrialConfig.model_validate(data)
    with _open(_values(3.0, 2.0, 1.0, 0.5, state={"x": 1}), tmp_path, config) as trainer:
        assert [report.epoch for report in trainer.events()] == [1, 2, 3]
    assert [metrics["report"] for _, metrics in curve(tmp_path)] == [1, 2, 3]


def test_endless_loop_is_closed_at_the_budget(tmp_path):
    closed = []

    def endless(config, context):  # noqa: ARG001
        try:
            for count in itertools.count(1):
                yield {"val/loss": 1.0 / count}
        finally:
            closed.append(True)

    with _open(endless, tmp_path, _config(epochs=3)) as trainer:
        assert [r.epoch for r in trainer.events()] == [1, 2, 3]
        assert not closed
    assert closed


def test_run_starts_from_another_runs_generation(tmp_path):
    config = _config(epochs=2)
    with open_trainer(config, tmp_path / "donor", device="cpu") as donor:
        next(donor.events())
    path = donor.store.newest().path
    with open_trainer(config, tmp_path / "heir", device="cpu", restore=path) as heir:
        assert [r.epoch for r in heir.events()] == [2]


def test_context_has_what_a_loop_needs(tmp_path):
    seen = []

    def loop(config, context):
        seen.append((config, context))
        yield {
            "val/loss": torch.tensor(0.5),
            "count": numpy.int64(3),
            "met": torch.tensor(True),
        }

    config = _config(epochs=1, width=8)
    with _open(loop, tmp_path, config) as trainer:
        (report,) = trainer.events()
    ((given, context),) = seen
    assert given.task.width == 8
    assert given.train.optimizer.lr == 0.05
    assert (context.directory, context.seed, context.epochs) == (tmp_path, 3, 1)
    assert context.restored is None
    expected = {"val/loss": 0.5, "count": 3.0, "met": 1.0, "best/val/loss": 0.5, "epoch": 1.0}
    assert _reproducible(report.metrics) == expected
    assert {type(value) for value in report.metrics.values()} == {float}
    assert report.metrics["memory/process_mb"] > 50
    json.dumps(report.metrics)


def _yields(value):
    def loop(config, context):  # noqa: ARG001
        yield value

    return loop


@pytest.mark.parametrize(
    ("loop", "error", "message"),
    [
        (lambda *given: len(given), TaskError, "must be a generator function"),
        (_values(), TaskError, "ended without a report"),
        (_yields({}), TaskError, "yielded no metrics; it must yield a dict of metrics"),
        (_yields(None), TaskError, "yielded None; it must yield"),
        (_yields(({}, {})), TaskError, "ownloops:plain yielded"),
        (_yields(({"val/loss": 1.0}, {}, {})), TaskError, "ownloops:plain yielded"),
        (_yields({1: 2.0}), TaskError, "ownloops:plain yielded"),
        (_values("high"), TaskError, "'val/loss' as 'high'; a metric is one number"),
        (_values(torch.ones(2)), TaskError, "a metric is one number"),
        (_values(numpy.complex64(1 + 1j)), TaskError, "a metric is one number"),
        (_values(10**400), TaskError, "a metric is one number"),
        (_values(float("nan")), NonFiniteMetric, "val/loss is nan in report 1"),
        (_values(1.0, state=[1]), TaskError, "a state of type list"),
        (
            _values(1.0, state={"model": nn.Linear(1, 1)}),
            CheckpointError,
            r"state\['model'\] is an object .*Linear.*save its state_dict\(\)",
        ),
        (
            _values(1.0, state={"a": [{"b": numpy.ones(2)}]}),
            CheckpointError,
            r"state\['a'\]\[0\]\['b'\] is .*ndarray.*torch.as_tensor\(\)",
        ),
    ],
)
def test_contract_violations_are_named(tmp_path, loop, error, message):
    with (
        pytest.raises(error, match=message),
        _open(loop, tmp_path) as trainer,
    ):
        list(trainer.events())


def _takes_values(lr, warmup):  # noqa: ARG001
    yield {"val/loss": 1.0}


def _takes_three(lr, width, epochs):  # noqa: ARG001
    yield {"val/loss": 1.0}


def _takes_one(config):  # noqa: ARG001
    yield {"val/loss": 1.0}


def _returns(config, context):
    for _ in context.remaining_epochs():
        loss = config.train.optimizer.lr
    return {"val/loss": loss}


def _returns_number(config, context):  # noqa: ARG001
    return torch.tensor(config.train.optimizer.lr).item()


async def _waits(config, context):  # noqa: ARG001
    return {"val/loss": 1.0}


async def _waits_and_yields(config, context):  # noqa: ARG001
    yield {"val/loss": 1.0}


_WRITES_LOOP = ("write `def _takes", "(config, context):`")
NO_LOOPS = {
    "its own values": (
        _takes_values,
        (
            *("takes lr, warmup;", *_WRITES_LOOP, "lr = config.train.optimizer.lr"),
            "warmup = config.train.schedule.warmup",
        ),
    ),
    "three values": (
        _takes_three,
        (
            *("missing a required argument: 'epochs'", *_WRITES_LOOP),
            *("width = config.task.width", "epochs = context.epochs"),
        ),
    ),
    "no context": (_takes_one, ("too many positional arguments", *_WRITES_LOOP)),
    "returns": (_returns, ("returns and never yields", 'yield {"val/loss": loss}')),
    "returns a number": (_returns_number, ("returns and never yields", "yield")),
    "a coroutine": (_waits, ("is asynchronous", "write `def _waits(config, context):`")),
    "an asynchronous generator": (_waits_and_yields, ("is asynchronous",)),
}


@pytest.mark.parametrize("name", NO_LOOPS)
def test_function_that_is_no_loop_is_refused_before_it_runs(name, tmp_path):
    function, words = NO_LOOPS[name]
    task = TaskConfig(name=f"{__name__}:{function.__name__}", width=8)
    config = _config().model_copy(update={"task": task})
    for start in (
        lambda: inspect_task(CheckRequest(config=config)),
        lambda: open_trainer(config, tmp_path / "run"),
    ):
        with pytest.raises(ConfigError) as refused:
            start()
        assert refused.value.key == "task.name"
        for part in (f"{task.name!r} is a function that", *words):
            assert part in refused.value.message
    assert not (tmp_path / "run").exists()


def _one_report(config, context, width=3):  # noqa: ARG001
    yield {"val/loss": 1.0}


def _hands_on(config, context, width=3):
    yields = _one_report
    return yields(config, context, width)


class _Callable:
    def __call__(self, config, context):
        return _one_report(config, context)


@pytest.mark.parametrize(
    "loop",
    [
        _hands_on,
        _one_report,
        lambda cfg, ctx: _one_report(cfg, ctx),
        lambda *given: _one_report(*given),
        functools.partial(_one_report, width=4),
        functools.wraps(_one_report)(lambda *given: _one_report(*given)),
        _Callable(),
    ],
    ids=["function", "generator", "lambda", "any arguments", "partial", "wrapped", "object"],
)
def test_function_that_returns_a_loop_is_a_loop(loop, tmp_path):
    config = _config(epochs=1)
    check_loop(config, loop)
    with _open(loop, tmp_path, config) as trainer:
        (report,) = trainer.events()
    assert report.metrics["val/loss"] == 1.0


def test_metric_that_is_not_yielded_is_named(tmp_path):
    def loop(config, context):  # noqa: ARG001
        yield {"val/los": 1.0, "train/loss": 2.0}

    expected = r"did you mean 'val/los'.*train/loss, val/los"
    with pytest.raises(ConfigError, match=expected), _open(loop, tmp_path) as trainer:
        list(trainer.events())


def test_56_pausing_loop_without_state_is_refused(tmp_path):
    config = _config("ownloops:stateless")
    opened = open_trainer(config, tmp_path / "paused", device="cpu", until=2)
    with pytest.raises(ConfigError) as refused, opened as trainer:
        list(trainer.events())
    parts = ("early_stopping.scheduler: ", "epoch 2", "ownloops:stateless", "asha, median or none")
    assert_parts(str(refused.value), *parts)
    with open_trainer(config, tmp_path / "to the end", device="cpu") as trainer:
        assert [report.epoch for report in trainer.events()][-1] == 6


def test_checkpoint_of_a_task_is_refused(tmp_path, opened, configure, toy):
    list(opened(configure(epochs=1), tmp_path, toy()).events())
    with pytest.raises(CheckpointError, match="is not one of a custom loop"):
        _open(_values(1.0), tmp_path)


def test_every_state_that_passes_the_check_comes_back(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "plain": [1, 2.5, "text", b"bytes", None, True, (1, 2), torch.float32, {3: 4}],
        "size": torch.ones(2, 3).shape,
        "parameter": nn.Parameter(torch.ones(1)),
        "device": torch.device("cpu"),
    }
    with _open(_values(1.0, 0.5, state=state), tmp_path, _config(epochs=1)) as trainer:
        list(trainer.events())
    store = CheckpointStore(tmp_path)
    back = store.load(store.newest())["loop"]
    assert back["plain"] == state["plain"]
    assert back["size"] == state["size"]
    assert torch.equal(back["model"]["1.running_mean"], model[1].running_mean)


@pytest.mark.parametrize("value", [{1, 2}, object(), lambda: 1, numpy.float64(1), range(3)])
def test_objects_that_would_need_code_are_refused(value):
    with pytest.raises(CheckpointError, match="so that it can be read back"):
        check_state({"x": value})


def test_weights_are_exported_from_the_key_model(tmp_path):
    from safetensors.torch import load_file

    with open_trainer(_config(epochs=1), tmp_path / "run", device="cpu") as loop:
        (report,) = loop.events()
    export_weights(CheckpointStore(tmp_path / "run").best().path, tmp_path / "w.safetensors")
    saved = CheckpointStore(tmp_path / "run").load(report.checkpoint)["loop"]["model"]
    assert torch.equal(load_file(tmp_path / "w.safetensors")["weight"], saved["weight"])
    (tmp_path / "other").touch()  # who may read it is the umask's to say, as for any file
    assert (tmp_path / "w.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_export_without_a_model_names_what_to_yield(tmp_path):
    with _open(_values(1.0, state={"w": torch.ones(1)}), tmp_path, _config(epochs=1)) as t:
        list(t.events())
    with pytest.raises(CheckpointError, match=r"has the keys \['w'\].*'model'"):
        export_weights(CheckpointStore(tmp_path).best().path, tmp_path / "w.safetensors")


def test_report_says_whether_the_best_state_lacks_a_model(tmp_path):
    def loop(_, context):
        for epoch in context.remaining_epochs():
            corrected = {"model": nn.Linear(3, 1).state_dict()} if epoch >= 4 else {"net": 1}
            yield {"val/loss": 1.0 if epoch < 5 else 0.5}, corrected

    said = []
    for stops in (iter([False, False, True]), itertools.repeat(False)):
        with contextlib.closing(
            _open(loop, tmp_path, should_stop=lambda stops=stops: next(stops))
        ) as run:
            said += [report.lacks_model for report in run.events()]
    # The fourth report is the first of the resumed run, whose best state is an earlier one.
    assert said == [True] * 3 + [None] * 2 + [False]


def _lazy(config, context):
    """Reads the rate alone, and `late` after its first report."""
    for epoch in context.remaining_epochs():
        if epoch:
            getattr(config.task, "late", None)
            getattr(config.task, "width", None)
        yield {"val/loss": config.train.optimizer.lr / (epoch + 1)}, {"epoch": epoch}


def _first(directory, *searched, **arguments):
    config = _config(epochs=3, **arguments)
    with _open(_lazy, directory, config, searched=searched) as loop:
        return next(loop.events())


def test_unread_searched_key_fails_the_first_report(tmp_path):
    with pytest.raises(WithoutEffect, match=r"train\.schedule\.warmup: was searched.*`when`"):
        _first(tmp_path / "a", "train.optimizer.lr", "train.schedule.warmup")
    assert read_rows(tmp_path / "a") == []
    with pytest.raises(ConfigError, match=r"read config\.task\.late before the first yield"):
        _first(tmp_path / "b", "task.late", late=3)


def test_read_or_applied_searched_keys_are_accepted(tmp_path):
    applied = ("train.deterministic", "resources.workers")
    first = _first(tmp_path / "run", "train.optimizer.lr", *applied)
    assert first.metrics["val/loss"] == 0.05
    assert first.signals == []


def test_unread_argument_is_a_signal(tmp_path):
    config = _config(epochs=4, late=3, widht=5)
    with _open(_lazy, tmp_path / "run", config) as loop:
        events = loop.events()
        first, second = next(events), next(events)
    assert any("task.late is given" in sentence for sentence in first.signals)
    assert not any("task.late" in sentence for sentence in second.signals)
    typo = next(sentence for sentence in second.signals if "task.widht is given" in sentence)
    assert "did you mean 'task.width'?" in typo
    with _open(_lazy, tmp_path / "run", config) as loop:
        third = next(loop.events())
    assert any("task.widht is given" in sentence for sentence in third.signals)


def test_resumed_run_need_not_read_keys_again(tmp_path):
    def loop(config, context):
        start = 0.0 if context.restored else config.task.start
        for epoch in context.remaining_epochs():
            yield {"val/loss": start + epoch}, {"epoch": epoch}

    config = _config(epochs=3, start=1.0)
    for _ in range(2):
        with _open(loop, tmp_path / "run", config, searched=("task.start",)) as run:
            assert next(run.events()).signals == []


def _sparse(config, context):  # noqa: ARG001  a loop's signature
    """Has the metric in each third report."""
    for epoch in context.remaining_epochs():
        found = {"train/loss": 1.0 / (epoch + 1)}
        if epoch % 3 == 2:
            found["val/loss"] = abs(5.0 - epoch)
        yield found, {"epoch": epoch}


def test_row_without_metric_comes_with_the_next_report(tmp_path):
    with _open(_sparse, tmp_path / "run", _config(epochs=8)) as loop:
        reports = list(loop.events())
    assert [(r.epoch, r.finished, r.metrics["val/loss"]) for r in reports] == [
        (3, False, 3.0),
        (6, False, 0.0),
        (8, True, 0.0),
    ]
    assert [[row.step for row in r.rows] for r in reports] == [[1, 2, 3], [4, 5, 6], [7, 8]]
    rows = read_rows(tmp_path / "run")
    assert [row.step for row in rows if "val/loss" in row.metrics] == [3, 6]
    assert rows[-1].metrics["best/val/loss"] == 0.0
    assert loop.store.best().epoch == 6


def test_resume_between_reports_equals_uninterrupted(tmp_path):
    asked = iter([False] * 4 + [True])
    with _open(
        _sparse, tmp_path / "run", _config(epochs=8), should_stop=lambda: next(asked)
    ) as loop:
        assert [r.epoch for r in loop.events()] == [3]
    with _open(_sparse, tmp_path / "run", _config(epochs=8)) as loop:
        reports = list(loop.events())
    assert [r.epoch for r in reports] == [6, 8]
    assert [[row.step for row in r.rows] for r in reports] == [[4, 5, 6], [7, 8]]


def test_pause_without_metric_repeats_its_last_value(tmp_path):
    with _open(_sparse, tmp_path / "run", _config(epochs=8), until=4) as loop:
        assert [(r.epoch, r.metrics["val/loss"]) for r in loop.events()] == [(3, 3.0), (4, 3.0)]


def test_metric_in_no_report_fails_at_the_end(tmp_path):
    with (
        _open(_sparse, tmp_path / "run", _config(epochs=2)) as loop,
        pytest.raises(ConfigError, match=r"'val/loss' is not reported.*train/loss"),
    ):
        list(loop.events())
