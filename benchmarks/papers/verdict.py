"""Judge each of the paper's statements of order by the measured figures: it holds, it does not, or it is not shown.

The interval of the difference decides, never the difference alone: with few questions, one of two equal methods is
ahead by chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ragkv.benchmarks.papers.definition import Cell, Order
from ragkv.benchmarks.papers.figure import Difference, Scores, difference_of

__all__ = ["Verdict", "Word", "decide", "judge", "tally"]

Word = Literal["holds", "does not hold", "not shown", "not measured"]

_ROUNDING = 9  # decimals of points; means of the same scores in another order differ by less


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A judged order. `held` is None if it is not shown, or if a cell was not measured and `difference` is None too."""

    order: Order
    held: bool | None
    difference: Difference | None

    @property
    def word(self) -> Word:
        if self.difference is None:
            return "not measured"
        return "not shown" if self.held is None else "holds" if self.held else "does not hold"


def judge(order: Order, scores: Mapping[Cell, Scores], seed: int) -> Verdict:
    """Compare the two cells of `order`. `scores` has the cells that were measured."""
    left, right = scores.get(order.left), scores.get(order.right)
    difference = None if left is None or right is None else difference_of(left, right, seed)
    return decide(order, difference)


def decide(order: Order, difference: Difference | None) -> Verdict:
    """Judge `order` by the interval of `difference`.

    ">" and ">=" hold if the whole interval lies above 0, and do not hold if it lies below 0. "~" holds if the whole
    interval lies within the allowed points, and does not hold if it lies beyond them. Anything else is not shown. "~"
    within 0 points is a claim about every question: it holds if no question is scored differently, and one that is
    refutes it.
    """
    if difference is None:
        return Verdict(order=order, held=None, difference=None)
    if order.relation == "~" and not order.within and difference.paired:
        return Verdict(order=order, held=difference.identical, difference=difference)
    low, high = (round(100 * bound, _ROUNDING) for bound in difference.ci95)
    if order.relation == "~":
        holds, fails = -order.within <= low and high <= order.within, low > order.within or high < -order.within
    else:
        holds, fails = low > 0, high < 0
    return Verdict(order=order, held=True if holds else False if fails else None, difference=difference)


def tally(verdicts: Iterable[Verdict]) -> str:
    """A sentence that says how many statements hold; "" if there are none."""
    words = Counter(verdict.word for verdict in verdicts)
    if not words:
        return ""
    found = [f"{words['holds']} of {words.total()} statements of order hold here"]
    if fail := words["does not hold"]:
        found.append(f"{fail} {'does' if fail == 1 else 'do'} not hold")
    if unshown := words["not shown"]:
        found.append(f"{unshown} {'is' if unshown == 1 else 'are'} not shown (the interval leaves it open)")
    if absent := words["not measured"]:
        found.append(f"{absent} {'was' if absent == 1 else 'were'} not measured")
    return ", ".join(found) + "."
