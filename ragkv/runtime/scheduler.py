"""Who runs next: which requests are let in, and which of their tokens the next step takes. No torch in here.

Own KV is reserved when a request is let in, so nothing that runs is ever put out again. Requests come in as they
were asked, but one that reads chunks which are in use may go first, a bounded number of times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from ragkv.errors import UsageError

__all__ = ["Scheduler", "Ticket"]

PATIENCE = 16
"""How often others may go before the request that has waited longest."""
LOOK_AHEAD = 64
"""How many of those that wait are looked at for one that shares chunks."""


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """One request as the scheduler sees it: what it needs at most, and the chunks that it reads.

    `shared`: tokens of what it and others prefill once, by key; it reads those as well.
    """

    rows: int
    tokens: int
    reads: frozenset[Hashable] = frozenset()
    shared: Mapping[Hashable, int] = field(default_factory=dict)
    passed: int = field(default=0, init=False)


class Scheduler:
    """Lets requests in and shares out each step's tokens.

    `batch_tokens` is how many tokens a step takes at most, unless more rows than that have one token each.
    `max_rows` rows and `own_tokens` tokens of own KV run at a time; a request that needs more runs alone, or, with
    `strict`, is refused.
    """

    def __init__(self, *, batch_tokens: int, max_rows: int, own_tokens: int, strict: bool = False) -> None:
        self.batch_tokens = batch_tokens
        self.max_rows = max_rows
        self.own_tokens = own_tokens
        self._strict = strict
        self._waiting: list[Ticket] = []
        self._running: set[Ticket] = set()
        self._in_use: Counter[Hashable] = Counter()

    @property
    def waiting(self) -> int:
        """How many requests are not in yet."""
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether those that run and wait leave a row and a token of own KV to others."""
        together = (*self._running, *self._waiting)
        rows, tokens = sum(each.rows for each in together), sum(each.tokens for each in together)
        return rows < self.max_rows and tokens < self.own_tokens

    def submit(self, ticket: Ticket) -> None:
        """Let it wait for its turn; UsageError, with what it needs, when it can never have one."""
        name, most = ("--max-rows", self.max_rows)
        if self.batch_tokens <= most:  # every row has a token in every step
            name, most = ("--batch-tokens", self.batch_tokens)
        if self._strict and ticket.rows > most:
            raise UsageError(
                f"The question needs {ticket.rows} rows at a time, but {name} is {most}; raise it to {ticket.rows}, or "
                "lower --top-k."
            )
        self._waiting.append(ticket)

    def leave(self, ticket: Ticket) -> None:
        """It is answered, failed or cancelled, in or not."""
        if ticket in self._running:
            self._running.remove(ticket)
            self._in_use.subtract(ticket.reads)
            self._in_use += Counter()  # drops what nobody reads any more
        elif ticket in self._waiting:
            self._waiting.remove(ticket)

    def runs(self, ticket: Ticket) -> bool:
        """Whether it was let in, and has not left."""
        return ticket in self._running

    def emptied(self) -> Scheduler:
        """A new one with the same limits."""
        return Scheduler(
            batch_tokens=self.batch_tokens, max_rows=self.max_rows, own_tokens=self.own_tokens, strict=self._strict
        )

    def admit(self, *, over: bool = False) -> list[Ticket]:
        """Those that may run from now on, in the order in which they were let in.

        `over`: the first may come in whatever it needs, because all that runs is at a standstill.
        """
        found: list[Ticket] = []
        while self._waiting:
            ticket = self._waiting[0] if over else self._next()
            if not (over or self._fits(ticket)):
                ticket = self._waiting[0]  # it waits no longer for one that shares chunks, but needs more
                if not self._fits(ticket):
                    break
            over = False
            for other in self._waiting:
                if other is ticket:
                    break
                other.passed += 1
            self._waiting.remove(ticket)
            self._running.add(ticket)
            self._in_use.update(ticket.reads)
            found.append(ticket)
        return found

    def share(self, wanted: Sequence[Sequence[int]]) -> list[list[int]]:
        """How many tokens of each row the next step takes, from how many each row of each request wants.

        Rows that want one token all get it. The others follow in order within what is left of `batch_tokens`; one that
        is too long is cut, and goes on in the next step.
        """
        taken = [[1 if want == 1 else 0 for want in wants] for wants in wanted]
        left = max(self.batch_tokens - sum(map(sum, taken)), 1)
        for wants, takes in zip(wanted, taken, strict=True):
            for row, want in enumerate(wants):
                if want > 1 and left:
                    takes[row] = min(want, left)
                    left -= takes[row]
        return taken

    def _next(self) -> Ticket:
        first = self._waiting[0]
        if first.passed >= PATIENCE or not self._in_use:
            return first
        return max(self._waiting[:LOOK_AHEAD], key=lambda ticket: sum(key in self._in_use for key in ticket.reads))

    def _fits(self, ticket: Ticket) -> bool:
        if not self._running:
            return True
        together = (ticket, *self._running)
        shared: dict[Hashable, int] = {}
        for each in together:
            shared.update(each.shared)
        rows = sum(each.rows for each in together)
        tokens = sum(each.tokens for each in together) + sum(shared.values())
        return rows <= self.max_rows and tokens <= self.own_tokens
