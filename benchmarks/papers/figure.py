"""The figure in a cell (a mean with its interval), and the difference of two cells over the same questions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Difference", "Figure", "Scores", "difference_of", "figure_of", "with_width"]

Scores = Mapping[str, Sequence[tuple[str, float]]]
"""For each column, pairs of question id and score in [0, 1]. A mean over columns has several, any other cell one."""

_RESAMPLES = 2000
_DECIMALS = 9  # means of the same scores in another order differ by less


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A mean in [0, 1] over `n` questions with its 95 % bootstrap interval; None if no prompt fitted the model."""

    value: float | None
    ci95: tuple[float, float] | None
    n: int
    too_long: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """left - right with its 95 % interval over `n` questions. `paired`: both were asked the same questions.

    `identical`: both were asked the same questions and have the same score on each of them.
    """

    value: float
    ci95: tuple[float, float]
    n: int
    paired: bool
    identical: bool = False


def figure_of(scores: Scores, seed: int, *, too_long: int = 0) -> Figure:
    """The mean of the columns' means. The bootstrap resamples the questions within each column."""
    strata = [[score for _, score in column] for column in scores.values()]
    n = sum(map(len, strata))
    if not all(strata) or not strata:
        return Figure(value=None, ci95=None, n=n, too_long=too_long)
    value, ci95 = _mean(strata, seed)
    return Figure(value=value, ci95=ci95, n=n, too_long=too_long)


def difference_of(left: Scores, right: Scores, seed: int) -> Difference | None:
    """left - right, paired by question if both were asked the same ones; None if one of them has no score.

    Columns are matched by position, so that two cells of one line can be compared too, and questions by id.
    """
    pairs = list(zip(left.values(), right.values(), strict=True)) if len(left) == len(right) else []
    strata = []
    for ours, theirs in pairs:
        known = dict(theirs)
        strata.append([score - known[name] for name, score in ours if name in known])
    if pairs and all(strata) and all(2 * len(s) > max(len(a), len(b)) for s, (a, b) in zip(strata, pairs, strict=True)):
        value, ci95 = _mean(strata, seed)
        n = sum(map(len, strata))
        identical = not any(map(any, strata))
        return Difference(value=value, ci95=with_width(value, ci95, n), n=n, paired=True, identical=identical)
    first, second = figure_of(left, seed), figure_of(right, seed + 1)
    if first.value is None or second.value is None or first.ci95 is None or second.ci95 is None:
        return None
    value = first.value - second.value
    low = math.hypot(first.value - first.ci95[0], second.ci95[1] - second.value)
    high = math.hypot(first.ci95[1] - first.value, second.value - second.ci95[0])
    n = min(first.n, second.n)
    return Difference(value=value, ci95=with_width(value, (value - low, value + high), n), n=n, paired=False)


def with_width(value: float, ci95: tuple[float, float], n: int) -> tuple[float, float]:
    """The interval of a difference in [-1, 1]; if it has no width, the interval that `n` questions support.

    If all questions differ by the same amount, a bootstrap has nothing to resample. When none of `n` questions departs
    from `value`, up to 1 - 0.025^(1/n) of all questions may (Clopper and Pearson), each by the largest possible amount:
    14 points for 24 questions, 6 points for 60.
    """
    low, high = ci95
    if round(high - low, _DECIMALS) > 0:
        return ci95
    depart: float = 1 - 0.025 ** (1 / n)
    return value - depart * (1 + value), value + depart * (1 - value)


def _mean(strata: Sequence[Sequence[float]], seed: int) -> tuple[float, tuple[float, float]]:
    """The mean of the strata's means and its percentile bootstrap interval, reproducible by `seed`."""
    import numpy as np

    rng = np.random.default_rng(seed)
    arrays = [np.asarray(stratum, dtype=np.float64) for stratum in strata]
    value = math.fsum(math.fsum(stratum) / len(stratum) for stratum in strata) / len(strata)
    drawn = np.zeros(_RESAMPLES)
    for array in arrays:
        drawn += array[rng.integers(len(array), size=(_RESAMPLES, len(array)))].mean(axis=1)
    low, high = np.quantile(drawn / len(arrays), (0.025, 0.975))
    return value, (float(low), float(high))
