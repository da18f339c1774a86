"""Means and 95 % intervals over questions.

The intervals of verdicts stay honest when few questions were asked or all had the same result. The unit is the
question, not the token, because the tokens of one answer are right or wrong together. One entirely right and one
entirely wrong question are added to those that were asked, as Bonett and Price (2012) do for paired proportions. So
every interval has a width, and the interval of three right answers is still wide.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Interval = tuple[float, float]

_NORMAL = 1.959964  # the 97.5 % quantile of the normal distribution


def share_interval(parts: Sequence[float], sizes: Sequence[float] | None = None) -> Interval:
    """The interval of sum(parts) / sum(sizes) in [0, 1], with a part and its size per question (default size: 1).

    If all n questions are right, the lower end is 1 - 2.96 / (n + 2): 0.41 for three, 0.95 for sixty.
    """
    sizes = [1.0] * len(parts) if sizes is None else sizes
    mean = sum(sizes) / len(sizes)
    value, error = _ratio([*parts, mean, 0.0], [*sizes, mean, mean])
    return max(0.0, value - error), min(1.0, value + error)


def difference_interval(differences: Sequence[float]) -> Interval:
    """The interval of the mean of differences in [-1, 1], one per question that both were asked."""
    low, high = share_interval([(difference + 1) / 2 for difference in differences])
    return 2 * low - 1, 2 * high - 1


def mean_interval(sums: Sequence[float], sizes: Sequence[float]) -> Interval:
    """The interval of sum(sums) / sum(sizes), which is unbounded: the added question equals the worst one asked."""
    worst = max(range(len(sums)), key=lambda at: sums[at] / sizes[at])
    value, error = _ratio([*sums, sums[worst]], [*sizes, sizes[worst]])
    return max(0.0, value - error), value + error


def _ratio(parts: Sequence[float], sizes: Sequence[float]) -> tuple[float, float]:
    """The ratio of the sums, and 1.96 times its standard error over questions (Taylor linearisation)."""
    n, total = len(parts), math.fsum(sizes)
    value = math.fsum(parts) / total
    squares = math.fsum((part - value * size) ** 2 for part, size in zip(parts, sizes, strict=True))
    return value, _NORMAL * math.sqrt(squares * n / (n - 1)) / total


_RESAMPLES = 2000
_BLOCK = 1 << 20  # indices drawn at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean over `n` questions; `ci95` is (low, high)."""

    value: float
    n: int
    ci95: Interval


def bootstrap_mean(strata: Sequence[Sequence[float]], seed: int) -> Mean:
    """The mean of the strata's means, with a percentile bootstrap interval over each stratum's questions.

    It is reproducible by `seed`. If all questions of each stratum have the same value, the interval has no width,
    however many there are.
    """
    if not strata or not all(strata):
        raise ValueError("a mean needs at least one value")
    rng = np.random.default_rng(seed)
    value = math.fsum(math.fsum(stratum) / len(stratum) for stratum in strata) / len(strata)
    n = sum(map(len, strata))
    if all(min(stratum) == max(stratum) for stratum in strata):
        return Mean(value=value, n=n, ci95=(value, value))
    drawn = np.zeros(_RESAMPLES)
    for stratum in strata:
        sample = np.asarray(stratum, dtype=np.float64)
        rows = max(1, _BLOCK // len(sample))
        for start in range(0, _RESAMPLES, rows):
            size = min(rows, _RESAMPLES - start), len(sample)
            drawn[start : start + rows] += sample[rng.integers(len(sample), size=size)].mean(axis=1)
    low, high = np.quantile(drawn / len(strata), (0.025, 0.975))
    return Mean(value=value, n=n, ci95=(float(low), float(high)))


T = TypeVar("T")


def draw_sample(items: Sequence[T], limit: int | None, seed: int) -> list[T]:
    """At most `limit` of `items` (None: all), drawn by `seed`, in their order."""
    if limit is None or len(items) <= limit:
        return list(items)
    return [items[at] for at in sorted(random.Random(seed).sample(range(len(items)), limit))]
