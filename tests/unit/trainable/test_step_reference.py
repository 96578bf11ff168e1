"""The whole step against a naive reference in NumPy, written from the formulas alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trainable.data import WindowPlan

EPOCHS, SAMPLES, BATCH = 13, 43, 12  # four windows an epoch, the last of 7 samples; 52 steps
LR, DECAY, BETA1, BETA2, EPS, WARMUP = 0.02, 0.1, 0.9, 0.999, 1e-8, 5


class IgnoringTask:
    """Mixed into the toy task: a third of the targets is ignored."""

    def build_data(self):
        data = super().build_data()
        inputs, targets = data.train
        return type(data)(
            train=(inputs, targets.where(torch.arange(len(targets)) % 3 > 0, -100)), val=data.val
        )


def _gradient(weights, inputs, targets):
    """Mean cross entropy over counted targets of a tanh network, and its gradient by hand."""
    w1, b1, w2, b2 = weights
    hidden = np.tanh(inputs @ w1.T + b1)
    logits = hidden @ w2.T + b2
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances = shifted / shifted.sum(axis=1, keepdims=True)
    counted = targets != -100
    loss, back = 0.0, np.zeros_like(logits)
    for row in np.flatnonzero(counted):
        loss -= math.log(chances[row, targets[row]])
        back[row] = chances[row]
        back[row, targets[row]] -= 1
    count = counted.sum()
    back /= count
    inner = (back @ w2) * (1 - hidden**2)
    return loss / count, [inner.T @ inputs, inner.sum(0), back.T @ hidden, back.sum(0)]


def _reference(weights, inputs, targets, seed, max_norm, value):
    """Losses, norms, whether norm and value bit, and final weights of all steps."""
    weights = [w.copy() for w in weights]
    first = [np.zeros_like(w) for w in weights]
    second = [np.zeros_like(w) for w in weights]
    total = EPOCHS * math.ceil(SAMPLES / BATCH)
    losses, norms, bit, step = [], [], [], 0
    for epoch in range(EPOCHS):
        order = WindowPlan(SAMPLES, BATCH, BATCH, seed=seed).order(epoch).numpy()
        for start in range(0, SAMPLES, BATCH):
            index = order[start : start + BATCH]
            loss, gradient = _gradient(weights, inputs[index], targets[index])
            norm = math.sqrt(sum(float((g**2).sum()) for g in gradient))
            if max_norm is not None:
                gradient = [g * min(1.0, max_norm / (norm + 1e-6)) for g in gradient]
            bit.append(
                (
                    max_norm is not None and norm > max_norm,
                    value is not None and max(abs(g).max() for g in gradient) > value,
                )
            )
            if value is not None:
                gradient = [g.clip(-value, value) for g in gradient]
            if step < WARMUP:
                lr = LR * (step + 1) / (WARMUP + 1)
            else:
                lr = LR * (1 + math.cos(math.pi * (step - WARMUP) / (total - WARMUP))) / 2
            step += 1
            for i, g in enumerate(gradient):
                if weights[i].ndim == 2:  # biases do not decay
                    weights[i] *= 1 - lr * DECAY
                first[i] = BETA1 * first[i] + (1 - BETA1) * g
                second[i] = BETA2 * second[i] + (1 - BETA2) * g**2
                unbiased = first[i] / (1 - BETA1**step)
                spread = np.sqrt(second[i] / (1 - BETA2**step))
                weights[i] -= lr * unbiased / (spread + EPS)
            losses.append(loss)
            norms.append(norm)
    return losses, norms, bit, weights


@pytest.mark.seeds("S4", "S6", "S9")
@pytest.mark.parametrize("accumulation", [1, 3, 4])
@pytest.mark.parametrize(
    ("max_norm", "value"), [(0.4, None), (None, 0.2), (None, None), (0.4, 0.15)]
)
def test_steps_equal_the_reference(
    tmp_path, opened, configure, toy, accumulation, max_norm, value
):
    task = type("Ignoring", (IgnoringTask, toy), {})(double=True, samples=SAMPLES)
    config = configure(
        epochs=EPOCHS,
        seed=5,
        accumulation=accumulation,
        optimizer={"name": "adamw", "lr": LR, "weight_decay": DECAY},
        schedule={"name": "cosine", "warmup": WARMUP},
        clip={"max_norm": max_norm, "value": value},
    )
    trainer = opened(config, tmp_path, task)
    start = [p.detach().numpy().copy() for p in trainer.model.parameters()]
    inputs, targets = task.build_data().train
    losses, norms, bit, weights = _reference(
        start, inputs.numpy(), targets.numpy(), 5, max_norm, value
    )
    for limit, bites in zip((max_norm, value), zip(*bit, strict=True), strict=True):
        assert limit is None or 0 < sum(bites) < len(bites)  # both branches

    reports = list(trainer.events())
    rows = [row for report in reports for row in report.rows]

    assert len(rows) == 52
    np.testing.assert_allclose([r.metrics["train/loss"] for r in rows], losses, atol=1e-9, rtol=0)
    np.testing.assert_allclose(
        [r.metrics["train/grad_norm"] for r in rows], norms, atol=1e-9, rtol=0
    )
    clipped = [any(both) for both in bit]
    assert [report.metrics["train/clip_fraction"] for report in reports] == [
        sum(clipped[start : start + 4]) / 4 for start in range(0, 52, 4)
    ]
    for parameter, expected in zip(trainer.model.parameters(), weights, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), expected, atol=1e-9, rtol=0)


@pytest.mark.seeds("S4")
def test_accumulation_equals_the_large_batch(tmp_path, opened, configure, toy):
    curves = []
    for accumulation in (1, 2, 4):
        config = configure(batch_size=8, accumulation=accumulation, epochs=4)
        trainer = opened(config, tmp_path / str(accumulation), toy(double=True))
        rows = [row for report in trainer.events() for row in report.rows]
        curves.append([row.metrics["train/loss"] for row in rows])
    np.testing.assert_allclose(curves[1], curves[0], atol=1e-12, rtol=0)
    np.testing.assert_allclose(curves[2], curves[0], atol=1e-12, rtol=0)
