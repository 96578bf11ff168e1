"""What the best of some number of independent trials is expected to be.

What must not live here: which trials, and whether less is better: here less is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple


class BestOf(NamedTuple):
    """The best of `num_trials` trials drawn like those of a sample."""

    num_trials: int
    expected: float
    low: float | None
    """The band's lower end; None: the sample has no limit there."""
    high: float


class Doubling(NamedTuple):
    """What twice as many trials are expected to gain."""

    gain: float
    """By how much the expected best falls, in the unit of the losses."""
    share: float
    """The gain as a part of what the sample gained: from its median to its best."""
    low: float
    high: float
    """The interval of the share, 5 % to 95 %."""


def expected_best(ascending: Sequence[float], num_trials: int) -> float:
    """Return the mean of the best of `num_trials`, over all choices of that many of a sample.

    This estimate is unbiased. Dodge et al., "Show your work: improved reporting of experimental
    results" (EMNLP 2019) introduced the curve; Tang et al., "Showing your work doesn't always
    work" (ACL 2020) showed that its estimate with replacement is biased, and gave this one.

    Args:
        ascending: The sample's losses, ascending.
        num_trials: At most as many as the sample has.
    """
    weights = _weights(len(ascending), num_trials)
    return sum(weight * loss for weight, loss in zip(weights, ascending, strict=True))


def tuning_curve(losses: Sequence[float], level: float = 0.95) -> list[BestOf]:
    """Return the expected best against the number of trials, with a band that holds everywhere.

    The band is that of Lourie, He and Cho, "Show your work with confidence: confidence bands for
    tuning curves" (NAACL 2024): a band around the distribution of one trial's loss, by the
    inequality of Dvoretzky, Kiefer and Wolfowitz with Massart's constant ("The tight constant in
    the Dvoretzky-Kiefer-Wolfowitz inequality", Annals of Probability 18, 1990), is carried over to
    the median of the best of k. With the given probability it holds the true curve of medians at
    all k at once, whatever the distribution.

    Args:
        losses: Those of trials that were drawn independently.
        level: The probability that the band holds the true curve.
    """
    ascending = sorted(losses)
    count = len(ascending)
    slack = math.sqrt(math.log(2 / (1 - level)) / (2 * count))
    found = []
    for num in _powers(count):
        median = 1 - 0.5 ** (1 / num)
        low = median - slack
        found.append(
            BestOf(
                num,
                expected_best(ascending, num),
                None if low <= 0 else _quantile(ascending, low),
                _quantile(ascending, min(1.0, median + slack)),
            )
        )
    return found


def doubling(losses: Sequence[float]) -> Doubling:
    """Estimate what twice as many trials would gain, as a fall of the expected best.

    Near the best value, the losses of random search are distributed like a power of the distance
    to the optimum (Lourie et al. 2024 use this distribution, too). The expected best of k then
    falls like a power of k, and the gains of successive doublings form a geometric series. Two
    earlier doublings, from an eighth of the trials to a quarter and on to a half, give its ratio,
    and so the gain of the doubling from all trials. The interval is that of the jackknife
    (Tukey, "Bias and confidence in not quite large samples", Annals of Mathematical Statistics 29,
    1958) for the logarithm of the share.

    Args:
        losses: At least 16, those of trials that were drawn independently; not all are equal.
    """
    ascending = sorted(losses)
    count = len(ascending)
    eighth = max(1, round(count / 8))
    steps = [eighth, 2 * eighth, 4 * eighth]
    doublings = math.log2(count / (2 * eighth))  # from the second gain to the one asked for
    gain = _next_gain([expected_best(ascending, num) for num in steps], doublings)
    whole = _median(ascending) - ascending[0]
    if gain <= 0 or whole <= 0:
        return Doubling(0.0, 0.0, 0.0, 0.0)
    without = [_without_each(ascending, num) for num in steps]
    logs = []
    for index in range(count):
        left = _next_gain([one[index] for one in without], doublings)
        best = ascending[1] if index == 0 else ascending[0]
        middle = _median_without(ascending, index)
        if left > 0 and middle > best:
            logs.append(math.log(left / (middle - best)))
    share = gain / whole
    if len(logs) < 2:
        return Doubling(gain, share, 0.0, share)
    mean = math.fsum(logs) / len(logs)
    square = (count - 1) / len(logs) * math.fsum((one - mean) ** 2 for one in logs)
    factor = math.exp(min(700.0, NormalDist().inv_cdf(0.95) * math.sqrt(square)))
    return Doubling(gain, share, share / factor, share * factor)


def _next_gain(expected: Sequence[float], doublings: float) -> float:
    """Return the gain of a later doubling, by the expected best of k, 2 k and 4 k trials."""
    first, second = expected[0] - expected[1], expected[1] - expected[2]
    ratio = min(1.0, second / first) if first > 0 else 0.0
    return max(0.0, second * math.pow(ratio, doublings))


def _weights(count: int, num_trials: int) -> list[float]:
    """Return the chance of each of `count`, ascending, to be the best of `num_trials` of them."""
    found, weight = [], num_trials / count
    for left in range(count - 1, -1, -1):
        found.append(weight)
        weight = max(0.0, weight * (left - num_trials + 1) / left) if left else 0.0
    return found


def _without_each(ascending: Sequence[float], num_trials: int) -> list[float]:
    """Return the expected best of `num_trials` of the sample without each of its losses."""
    weights = _weights(len(ascending) - 1, num_trials)
    before = [0.0]
    for weight, loss in zip(weights, ascending[:-1], strict=True):
        before.append(before[-1] + weight * loss)
    after = [0.0]
    for weight, loss in zip(reversed(weights), reversed(ascending[1:]), strict=True):
        after.append(after[-1] + weight * loss)
    after.reverse()
    return [before[index] + after[index] for index in range(len(ascending))]


def _median(ascending: Sequence[float]) -> float:
    half, odd = divmod(len(ascending), 2)
    return ascending[half] if odd else (ascending[half - 1] + ascending[half]) / 2


def _median_without(ascending: Sequence[float], index: int) -> float:
    """Return the median without one of the losses."""
    half, odd = divmod(len(ascending) - 1, 2)
    upper = ascending[half + (half >= index)]
    if odd:
        return upper
    return (ascending[half - 1 + (half - 1 >= index)] + upper) / 2


def _powers(count: int) -> list[int]:
    found = [2**power for power in range(count.bit_length()) if 2**power <= count]
    return found if found[-1] == count else [*found, count]


def _quantile(ascending: Sequence[float], share: float) -> float:
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]
