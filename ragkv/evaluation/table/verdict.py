"""Whether a measured table has the paper's order, statement by statement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ragkv.evaluation.table.definition import Cell, Order, holds
from ragkv.evaluation.table.figure import Difference, Scores, difference_of

__all__ = ["Verdict", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An order with what was measured. `held` None: one of the two was not measured.

    `certain`: the interval of the difference leaves out 0, so that other questions would hardly turn it round.
    """

    order: Order
    held: bool | None
    difference: Difference | None

    @property
    def word(self) -> Literal["as in the paper", "not as in the paper", "not measured"]:
        if self.held is None:
            return "not measured"
        return "as in the paper" if self.held else "not as in the paper"

    @property
    def certain(self) -> bool:
        return self.difference is not None and self.difference.certain


_ROUNDING = 9  # decimals; means of the same scores in another order differ by less


def judge(order: Order, scores: Mapping[Cell, Scores], seed: int) -> Verdict:
    """Compare the two cells of `order`; `scores` has those that were measured."""
    left, right = scores.get(order.left), scores.get(order.right)
    difference = None if left is None or right is None else difference_of(left, right, seed)
    if difference is None:
        return Verdict(order=order, held=None, difference=None)
    held = holds(order.relation, round(100 * difference.value, _ROUNDING), order.within)
    return Verdict(order=order, held=held, difference=difference)
