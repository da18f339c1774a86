"""A request that has read its question, led token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from ragkv.model.language_model import LanguageModel
from single.attention import Group, Rows

__all__ = ["CausalStream", "Stream"]


class Stream(ABC):
    """`scores` `(vocab,)` in fp32 are those of the next token, which will stand at `position` in the furthest row.

    With experts, `winners` `(vocab,)` tells which of them proposes each token; `order` are their chunks.
    """

    scores: Tensor
    position: int
    winners: Tensor | None = None
    order: tuple[int, ...] = ()

    @abstractmethod
    def advance(self, token_id: int) -> None:
        """Append a token and compute the next scores."""

    def best(self) -> int:
        """The greedy choice: the highest score, then the lowest winner, then the lowest id."""
        if self.winners is None:
            return int(self.scores.argmax())
        tied = (self.scores == self.scores.max()).nonzero()[:, 0]
        return int(tied[self.winners[tied].argmin()])

    def winner(self, token_id: int) -> int | None:
        """Index into `Request.chunks` of the expert that proposes the token."""
        return None if self.winners is None else self.order[int(self.winners[token_id])]


class CausalStream(Stream):
    """One row over a fixed context."""

    def __init__(self, model: LanguageModel, ids: Sequence[int], *, start: int, groups: Sequence[Group] = ()) -> None:
        self._rows = Rows(model, groups, [start])
        self._read(ids)

    def advance(self, token_id: int) -> None:
        self._read([token_id])

    def _read(self, ids: Sequence[int]) -> None:
        self.scores = self._rows.read([ids])[0]
        [self.position] = self._rows.positions
