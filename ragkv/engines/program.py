"""What an engine may ask the runtime for: an engine is a program that never calls the model.

A program is a generator. It yields one of the asks below and is sent its answer: logits for a `Read`, a token for a
`Choose`. It can be driven by hand, with made-up logits and no model (docs/engines.md).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ragkv.attention.kv import Segment
from ragkv.attention.row import Row

__all__ = ["Ask", "Choose", "Greedy", "Leave", "Program", "Read", "Row", "Segment", "Shared", "Until", "answer_from"]


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Append `ids[i]` to `rows[i]`; sent: fp32 logits of each row's last token, `(rows, vocab)`, or, of a `Stack` that
    is read alone, of the tokens that it wants, `(wanted, vocab)`.

    The logits are the program's own, to be worked on in place.
    """

    rows: Sequence[Row]
    ids: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, eq=False)
class Choose:
    """Choose the answer's next token from `scores` `(vocab,)` as the request's settings say; sent: its id.

    The token is shown to whoever asked, and the program is closed after the last one. With experts, `winners`
    `(vocab,)` says which of them proposes each token, the lower number first among equals; `owners` are the indices
    of their chunks in `Request.chunks`. `at`: where the token will stand, if that is not the end of the rows read.
    """

    scores: Tensor
    winners: Tensor | None = None
    owners: tuple[int, ...] = ()
    at: int | None = None

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
class Until:
    """Go on when `ready()`, which another program's doing makes true; sent: None. It may be sent sooner."""

    ready: Callable[[], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Prefill `parts` one after another as one causal sequence, once for all programs that ask for the same.

    `before` stands first, at position 0: KV that is there already, such as the stored prefix. Sent: the segments of
    all parts, `before` included, each where the sequence has it.
    """

    parts: Sequence[Sequence[int]]
    before: tuple[Segment, ...] = field(default=())

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """One for each part; equal to another's where the sequences, and their cuts, are the same up to its end."""
        keys, digest = [], hashlib.blake2b(repr([id(segment.kv) for segment in self.before]).encode())
        for ids in self.parts:
            digest.update(array("q", (len(ids), *ids)).tobytes())
            keys.append(digest.digest())
        return tuple(keys)

    @property
    def sizes(self) -> dict[Hashable, int]:
        """Tokens of each part by its key: what an engine that asks for it names in `Demand.shared`."""
        return {key: len(ids) for key, ids in zip(self.keys, self.parts, strict=True) if ids}


Ask: TypeAlias = Read | Choose | Greedy | Leave | Shared | Until
Program: TypeAlias = Generator[Ask, Any, None]


def answer_from(row: Row, ids: Sequence[int]) -> Program:
    """An answer from one row: it reads the question `ids`, then its own tokens."""
    while True:
        [scores] = yield Read((row,), (ids,))
        ids = ((yield Choose(scores)),)
