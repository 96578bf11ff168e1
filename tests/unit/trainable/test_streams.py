"""Streams and samplers: what is trained, resumed and refused."""

from __future__ import annotations

import itertools
import multiprocessing

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.chaos.sampled_data import sampled
from tests.unit.trainable.conftest import Toy
from tests.unit.trainable.test_resume import Crash, _crash_at, _curve, _equal, _run

pytestmark = pytest.mark.filterwarnings("ignore:a resumed run reads the stream train again")


class Sampled(Toy):
    """The toy task with augmentation, whose data come in one of several ways."""

    def __init__(self, kind, **options):
        super().__init__(augmented=True, **options)
        self.kind = kind

    def build_data(self):
        plain = super().build_data()
        return sampled(self.kind, plain.train, TensorDataset(*plain.val))


KINDS = [
    *itertools.product(["weighted", "ragged", "stream", "skipped"], [0]),
    ("weighted", 2),
    ("ragged", 2),
    ("stream", 3),
    ("skipped", 2),
]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize(("kind", "workers"), KINDS)
def test_crashed_run_resumes_exactly(tmp_path, opened, configure, kind, workers):
    """At each of several places; samplers also as without loader processes."""
    config = configure(every="1 step", loader={"num_workers": workers})
    alone = configure(every="1 step") if kind in ("weighted", "ragged") else config
    whole = opened(alone, tmp_path / "whole", Sampled(kind))
    _run(whole)
    whole.close()
    for crash_at in (3, 5) if workers else (1, 4, 5, 7):
        directory = tmp_path / f"cut-{crash_at}"
        crashed = opened(config, directory, Sampled(kind), should_stop=_crash_at(crash_at))
        with pytest.raises(Crash):
            _run(crashed)
        crashed.close()
        torch.manual_seed(99)
        resumed = opened(config, directory, Sampled(kind))
        assert resumed.resumed_at > 0 or crash_at == 1
        _run(resumed)
        resumed.close()
        assert _equal(whole.state.state_dict(), resumed.state.state_dict()), crash_at
        assert _curve(tmp_path / "whole") == _curve(directory), crash_at
    assert not multiprocessing.active_children()


def _untold(stream):
    raise TypeError(f"{stream} has no length")


class Endless(Sampled):
    """Its training stream does not tell its length."""

    def build_data(self):
        data = super().build_data()
        kind = type("Untold", (type(data.train),), {"__len__": _untold})
        data.train.__class__ = kind
        return data


@pytest.mark.parametrize(("kind", "workers"), [("stream", 0), ("skipped", 2)])
def test_stream_of_unknown_length_resumes_exactly(tmp_path, opened, configure, kind, workers):
    """Reports fall within passes over the stream, and passes end between reports."""
    budget = {"budget": {"steps": 11, "report_every": 3}}
    config = configure(every="1 step", loader={"num_workers": workers})
    config = type(config).model_validate({**config.model_dump(), **budget})
    whole = opened(config, tmp_path / "whole", Endless(kind))
    assert [report.step for report in _run(whole)] == [3, 6, 9, 11]
    whole.close()
    for crash_at in (4, 6):
        directory = tmp_path / f"cut-{crash_at}"
        crashed = opened(config, directory, Endless(kind), should_stop=_crash_at(crash_at))
        with pytest.raises(Crash):
            _run(crashed)
        crashed.close()
        resumed = opened(config, directory, Endless(kind))
        _run(resumed)
        resumed.close()
        assert _equal(whole.state.state_dict(), resumed.state.state_dict()), crash_at
        assert _curve(tmp_path / "whole") == _curve(directory), crash_at
