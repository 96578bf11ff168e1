"""Process-wide state that a task changes is restored: the next trial computes the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trainable.global_state import GlobalTorchState

BACKENDS = torch.backends


def _computed():
    torch.manual_seed(0)
    queries = torch.randn(2, 4, 64, 32)
    images, kernels = torch.randn(4, 8, 16, 16), torch.randn(16, 8, 3, 3)
    attended = F.scaled_dot_product_attention(queries, queries, queries, is_causal=True)
    return attended, F.conv2d(images, kernels)


def _equal(first, second):
    return all(map(torch.equal, first, second))


def test_kernels_are_chosen_as_before():
    before, switches = _computed(), GlobalTorchState()
    BACKENDS.cuda.enable_flash_sdp(False)
    BACKENDS.mkldnn.enabled = False
    changed = _computed()
    switches.restore()
    assert not _equal(before, changed), "otherwise equality would say nothing"
    assert _equal(before, _computed())


def _precisions():
    owners = (BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.mkldnn.matmul)
    return (
        torch.get_float32_matmul_precision(),
        BACKENDS.cudnn.allow_tf32,
        BACKENDS.fp32_precision,
        *(owner.fp32_precision for owner in owners),
    )


def test_sums_of_half_precision_are_made_as_before():
    matmul = BACKENDS.cuda.matmul
    before, switches = matmul.allow_fp16_accumulation, GlobalTorchState()
    matmul.allow_fp16_accumulation = not before
    switches.restore()
    assert matmul.allow_fp16_accumulation is before


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (BACKENDS, "fp32_precision", "tf32"),
        (BACKENDS.cuda.matmul, "fp32_precision", "tf32"),
        (BACKENDS.cudnn.conv, "fp32_precision", "ieee"),
        (BACKENDS.mkldnn.matmul, "fp32_precision", "bf16"),
        (BACKENDS.cuda.matmul, "allow_tf32", True),
        (BACKENDS.cudnn, "allow_tf32", False),
    ],
)
def test_precision_is_restored_however_it_was_set(owner, name, value):
    before, switches = _precisions(), GlobalTorchState()
    setattr(owner, name, value)
    switches.restore()
    assert _precisions() == before
