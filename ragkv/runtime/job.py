"""One request in the runtime: its program, what the program waits for, and the tokens that nobody has taken yet."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ragkv.attention.row import Row
from ragkv.attention.stack import Stack
from ragkv.engines.program import Ask, Choose, Greedy, Program, Read, Until
from ragkv.runtime.decoder import Decoder, Token
from ragkv.runtime.scheduler import Ticket

if TYPE_CHECKING:
    from ragkv.engines import Engine, Request
    from ragkv.runtime.pool import Lease

__all__ = ["AHEAD", "Job"]

logger = logging.getLogger(__name__)

AHEAD = 64
"""Tokens that may wait for whoever asked; then the request's rows pause, unless others wait for their room."""


class Job:
    """A request that runs. Only the thread that drives the runtime touches `program` and `ask`.

    `decoder` None: whoever asked chooses the tokens, and the job pauses at each `Choose`. One that is to begin together
    with others has an `origin`, and no program yet; it never pauses, for it would keep them waiting.
    """

    def __init__(
        self,
        program: Program | None,
        ticket: Ticket,
        decoder: Decoder | None,
        *,
        model: object = None,
        owner: object = None,
        lease: Lease | None = None,
        origin: tuple[Engine, Request] | None = None,
    ) -> None:
        self.program = program
        self.origin = origin
        self.ticket = ticket
        self.decoder = decoder
        self.owner = owner
        self.lease = lease
        self.ahead: float = AHEAD if origin is None else math.inf
        self.torn = False
        """Whether it could not go on if the step that runs were broken off."""
        self._model = model  # held while it runs: a runtime holds none
        self.ask: Ask | None = None
        self.tokens: deque[Token] = deque()
        self.error: BaseException | None = None
        self.cancelled = False
        self.ended = False
        self.position = 0
        """Where the next token will stand, in the row that is furthest."""
        self._left: list[Sequence[int]] = []
        self._logits: list[list[Tensor]] = []

    @property
    def ready(self) -> bool:
        """Whether whoever asked need not wait: there is a token, a choice to make, or an end."""
        return bool(self.tokens) or self.ended or (self.decoder is None and isinstance(self.ask, Choose))

    @property
    def paused(self) -> bool:
        """Whether nothing may run for it now."""
        return len(self.tokens) >= self.ahead or (self.decoder is None and isinstance(self.ask, Choose))

    def begin(self, ask: Ask) -> None:
        """What the program asks for next."""
        if isinstance(ask, Read):
            self._left = list(ask.ids)
            self._logits = [[] for _ in ask.ids]
        elif not isinstance(ask, Choose | Greedy | Until):
            raise TypeError(f"an engine's program yields asks (ragkv.engines), not {type(ask).__name__}")
        elif isinstance(ask, Choose) and ask.at is not None:
            self.position = ask.at
        self.ask = ask

    def wants(self) -> list[int]:
        """How many tokens each row of its read still has to read."""
        return [len(ids) for ids in self._left]

    def pieces(self, takes: Sequence[int]) -> list[tuple[int, Row, Sequence[int]]]:
        """The next `takes[i]` tokens of row i, those that are not 0: (i, row, ids)."""
        assert isinstance(self.ask, Read)
        rows = self.ask.rows
        return [(i, rows[i], self._left[i][:take]) for i, take in enumerate(takes) if take]

    def read(self, pieces: Sequence[tuple[int, Row, Sequence[int]]], kept: Sequence[int], logits: Tensor) -> None:
        """These pieces were read; `logits` `(sum(kept), vocab)` has so many of each piece's tokens."""
        for (i, row, ids), scores in zip(pieces, torch.split(logits, list(kept)), strict=True):
            self._left[i] = self._left[i][len(ids) :]
            if len(scores) and (isinstance(row, Stack) or not self._left[i]):
                self._logits[i].append(scores)
        if len(pieces) == len(self._left) == sum(map(len, self._logits)) and not any(self._left):
            self._logits = [[logits]]  # all of it in this step: no copy
        self.position = max(self.position, *(row.position for _, row, _ in pieces))

    def read_whole(self) -> Tensor | None:
        """The logits `(rows, vocab)` of its read, once every row is through."""
        if any(self._left):
            return None
        found, self._logits = [scores for each in self._logits for scores in each], []
        if not found:  # its rows are silent
            return torch.empty((0, 0))
        return found[0] if len(found) == 1 else torch.cat(found)

    def choice(self) -> tuple[Tensor, Tensor | None]:
        """What it chooses, one number or one for each row, on the device; and whether it could be drawn."""
        if isinstance(self.ask, Greedy):
            return self.ask.logits.argmax(-1), None
        assert isinstance(self.ask, Choose)
        assert self.decoder is not None
        return self.decoder.choose(self.ask)

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more comes; `error` is raised for whoever asked."""
        if self.ended:
            return
        self.ended, self.error = True, error
        self.ask = self.origin = self._model = None
        self._left, self._logits = [], []
        try:
            if self.program is not None:
                self.program.close()
        except Exception as failure:  # whoever ends it must not fail for what an engine does last
            logger.warning("an engine's program failed while it was closed: %s", failure)

    def send(self, answer: Any) -> Ask:
        """Run the program up to what it asks next; StopIteration when it has no more to ask."""
        assert self.program is not None
        return self.program.send(answer)
