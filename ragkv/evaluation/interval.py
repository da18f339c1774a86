"""How far a figure may be off: 95 % intervals over questions, honest when few were asked or all went alike.

The unit is the question, not the token: tokens of one answer go right or wrong together. To the questions that were
asked one that goes entirely right and one that goes entirely wrong are added, as Bonett and Price (2012) do for paired
proportions; so no interval is without width, and three questions without a fault still leave much open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Interval", "difference_interval", "mean_interval", "share_interval"]

Interval = tuple[float, float]

_NORMAL = 1.959964  # 97.5 % of the normal distribution lie below


def share_interval(parts: Sequence[float], sizes: Sequence[float] | None = None) -> Interval:
    """Of sum(parts) / sum(sizes) in [0, 1], a part and its size per question; without `sizes` each is 1.

    Of n questions without a fault the lower end is 1 - 2.96 / (n + 2): 0.41 of three, 0.95 of sixty.
    """
    sizes = [1.0] * len(parts) if sizes is None else sizes
    mean = sum(sizes) / len(sizes)
    value, error = _ratio([*parts, mean, 0.0], [*sizes, mean, mean])
    return max(0.0, value - error), min(1.0, value + error)


def difference_interval(differences: Sequence[float]) -> Interval:
    """Of the mean of differences in [-1, 1], one per question that both were asked."""
    low, high = share_interval([(difference + 1) / 2 for difference in differences])
    return 2 * low - 1, 2 * high - 1


def mean_interval(sums: Sequence[float], sizes: Sequence[float]) -> Interval:
    """Of sum(sums) / sum(sizes), which has no upper bound: one question more is like the worst that was asked."""
    worst = max(range(len(sums)), key=lambda at: sums[at] / sizes[at])
    value, error = _ratio([*sums, sums[worst]], [*sizes, sizes[worst]])
    return max(0.0, value - error), value + error


def _ratio(parts: Sequence[float], sizes: Sequence[float]) -> tuple[float, float]:
    """The ratio of the sums, and 1.96 standard errors of it between questions (Taylor linearisation)."""
    n, total = len(parts), math.fsum(sizes)
    value = math.fsum(parts) / total
    squares = math.fsum((part - value * size) ** 2 for part, size in zip(parts, sizes, strict=True))
    return value, _NORMAL * math.sqrt(squares * n / (n - 1)) / total
