"""Whether a measured table has the paper's order, statement by statement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ragkv.evaluation.table.definition import Cell, Order, holds
from ragkv.evaluation.table.figure import Difference, Scores, difference_of

__all__ = ["Verdict", "judge", "tally"]

_ROUNDING = 9  # decimals; means of the same scores in another order differ by less


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An order with what was measured. `held` None: one of the two was not measured. `tied`: ">", but they are equal.

    `certain`: the interval of the difference leaves out 0, so that other questions would hardly turn it round.
    """

    order: Order
    held: bool | None
    difference: Difference | None

    @property
    def tied(self) -> bool:
        return self.held is False and self.order.relation == ">" and not round(self._apart, _ROUNDING)

    @property
    def word(self) -> Literal["holds", "does not hold", "tied", "not measured"]:
        if self.held is None:
            return "not measured"
        return "holds" if self.held else "tied" if self.tied else "does not hold"

    @property
    def certain(self) -> bool:
        return self.difference is not None and self.difference.certain

    @property
    def _apart(self) -> float:
        return 0.0 if self.difference is None else self.difference.value


def judge(order: Order, scores: Mapping[Cell, Scores], seed: int) -> Verdict:
    """Compare the two cells of `order`; `scores` has those that were measured."""
    left, right = scores.get(order.left), scores.get(order.right)
    difference = None if left is None or right is None else difference_of(left, right, seed)
    if difference is None:
        return Verdict(order=order, held=None, difference=None)
    held = holds(order.relation, round(100 * difference.value, _ROUNDING), order.within)
    return Verdict(order=order, held=held, difference=difference)


def tally(verdicts: Iterable[Verdict]) -> str:
    """How many statements hold, in a sentence; "" without any."""
    words = Counter(verdict.word for verdict in verdicts)
    measured = words.total() - words["not measured"]
    if not words:
        return ""
    others = ", ".join(f"{words[word]} {word}" for word in ("tied", "does not hold", "not measured") if words[word])
    return f"{words['holds']} of {measured} statements of order hold here" + (f" ({others})." if others else ".")
