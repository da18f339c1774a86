"""What an engine may ask the runtime for: an engine is a program that never calls the model.

A program is a generator. It yields one of the asks below and is sent its answer: logits for a `Read`, a token for a
`Choose`. It can be driven by hand, with made-up logits and no model (docs/engines.md).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ragkv.attention.kv import Segment
from ragkv.attention.row import Row

__all__ = ["Ask", "Choose", "Greedy", "Leave", "Program", "Read", "Row", "Segment", "Shared", "answer_from"]


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Append `ids[i]` to `rows[i]`; sent: fp32 logits of each row's last token, `(rows, vocab)`.

    The logits are the program's own, to be worked on in place.
    """

    rows: Sequence[Row]
    ids: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, eq=False)
class Choose:
    """Choose the answer's next token from `scores` `(vocab,)` as the request's settings say; sent: its id.

    The token is shown to whoever asked, and the program is closed after the last one. With experts, `winners`
    `(vocab,)` says which of them proposes each token, the lower number first among equals; `owners` are the indices
    of their chunks in `Request.chunks`.
    """

    scores: Tensor
    winners: Tensor | None = None
    owners: tuple[int, ...] = ()

    def best(self) -> Tensor:
        """The greedy choice, 0-dim, on the device: the lowest id among equals, after the lowest winner (PCED Eq. 3)."""
        if self.winners is None:
            return self.scores.argmax()
        tied = self.scores == self.scores.max()
        return torch.where(tied, self.winners, len(self.owners)).argmin()


@dataclass(frozen=True, slots=True, eq=False)
class Greedy:
    """Choose the best token of each row of `logits` `(rows, vocab)`, for the program itself; sent: `list[int]`."""

    logits: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Leave:
    """These rows read no more: their own KV is freed now, not at the program's end; sent: None."""

    rows: Sequence[Row]


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Prefill `parts` one after another as one causal sequence, once for all programs that ask for the same.

    `before` stands first, at position 0: KV that is there already, such as the stored prefix. Sent: the segments of
    all parts, `before` included, each where the sequence has it.
    """

    parts: Sequence[Sequence[int]]
    before: tuple[Segment, ...] = field(default=())


Ask: TypeAlias = Read | Choose | Greedy | Leave | Shared
Program: TypeAlias = Generator[Ask, Any, None]


def answer_from(row: Row, ids: Sequence[int]) -> Program:
    """An answer from one row: it reads the question `ids`, then its own tokens."""
    while True:
        [scores] = yield Read((row,), (ids,))
        ids = ((yield Choose(scores)),)
