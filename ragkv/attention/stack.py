"""Several answers in one row: tokens that are told where they stand and which of the row's tokens they see (IPPD §4.1).

This is the papers' stacked prompt as it is written, with the masks. A row of its own for each answer is the same
computation without the masked scores (`ragkv.attention.step`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ragkv.attention.row import Row

__all__ = ["Mark", "Stack"]


class Mark(NamedTuple):
    """What a token of a stacked prompt is marked with: IPPD's posvirt(i), context(i) and question(i).

    Context and question are 0 for what all of them see. `wanted`: the logits after this token are asked for.
    """

    position: int
    context: int = 0
    question: int = 0
    wanted: bool = False


@dataclass(slots=True, eq=False)
class Stack(Row):
    """A row whose tokens have positions and visibility of their own: `marks`, of all tokens, read or yet to be read."""

    marks: list[Mark] = field(default_factory=list)

    def places(self, n: int) -> list[int]:
        return [mark.position for mark in self._next(n)]

    def kept(self, n: int) -> list[int]:
        return [index for index, mark in enumerate(self._next(n)) if mark.wanted]

    def visible(self, n: int, window: int | None, device: torch.device) -> Tensor:
        """Which tokens the next `n` see, `(n, m)`, True where seen: those held and the new ones (Eqs. 6-9).

        A sliding window counts virtual positions, not places in the row.
        """
        held = self.own.length
        position, context, question, _ = torch.tensor(self.marks[: held + n]).to(device, non_blocking=True).T
        asking = slice(held, held + n)
        behind = position[asking, None] - position
        seen: Tensor = behind >= 0
        seen &= (context[asking, None] == context) | (context == 0)
        seen &= (question[asking, None] == question) | (question == 0)
        return seen if window is None else seen & (behind < window)

    def compact(self, dead: Callable[[Mark], bool]) -> None:
        """Give up the tokens that nobody will see again, once they are the greater part of what is held."""
        held = self.own.length
        kept = [index for index, mark in enumerate(self.marks[:held]) if not dead(mark)]
        if 2 * len(kept) < held:
            self.own.select(kept)
            self.marks = [self.marks[index] for index in kept] + self.marks[held:]

    def _next(self, n: int) -> list[Mark]:
        return self.marks[self.own.length : self.own.length + n]
