"""8x1, 4x2 and 2x4 (batch x accumulation) share losses and norms, and those of the golden file."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from tests.golden.accumulation import BATCH, EPOCHS, FILE, SAMPLES, SPLITS, curves

# float64: rounding alone, seen: 9e-16 over 16 steps of AdamW. float32 has a unit roundoff of 6e-8
# and was seen to differ by 2.4e-7; ten times that leaves room for other processors.
TOLERANCE = {"float64": 1e-12, "float32": 2.5e-6}


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_deterministic_debug_mode("default")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def golden() -> dict[str, list[float]]:
    """The curves that were kept."""
    content: dict[str, list[float]] = json.loads(FILE.read_text())
    return content


@pytest.mark.seeds("S4")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", TOLERANCE)
def test_curves_are_those_of_the_golden_file(
    golden: dict[str, list[float]], kind: str, split: str
) -> None:
    found = curves(kind, split)
    for key in ("loss", "grad_norm"):
        assert len(found[key]) == EPOCHS * -(-SAMPLES // BATCH)
        assert found[key] == pytest.approx(golden[key], rel=0, abs=TOLERANCE[kind]), key


def test_one_micro_batch_of_float32_is_not_float64() -> None:
    """The tolerance of float32 is not so wide that it hides in which precision a run computed."""
    single, double = curves("float32", "8x1"), curves("float64", "8x1")
    worst = max(abs(a - b) for a, b in zip(single["loss"], double["loss"], strict=True))
    assert 1e-9 < worst < TOLERANCE["float32"]
