"""Decides which requests are admitted, and which of their tokens the next step takes. It does not need torch.

Own KV is reserved at admission, so a running request is never preempted. Requests are admitted first come, first
served, but one that reads chunks which are in use may overtake others, a bounded number of times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from ragkv.errors import UsageError

PATIENCE = 16
"""How often the longest-waiting request may be overtaken."""
LOOK_AHEAD = 64
"""How many waiting requests are searched for one that shares chunks."""
STALL_SECONDS = 0.1
"""The time that prefill may add to a step that also decodes, unless decoding alone takes longer."""
LEAST_PREFILL = 32
"""Tokens that a step prefills beside decoding sequences at least, however slow the machine."""


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """A request's needs for the scheduler: upper bounds of what it uses, and the chunks that it reads.

    `shared`: tokens of the KV that it and other requests prefill once, by key; it reads those as well.
    """

    sequences: int
    tokens: int
    reads: frozenset[Hashable] = frozenset()
    shared: Mapping[Hashable, int] = field(default_factory=dict)
    passed: int = field(default=0, init=False)


class Pace:
    """How many tokens a step may prefill while other sequences decode, from the duration of recent steps.

    A prefill beside decoding at most doubles the time between two tokens, or adds `STALL_SECONDS` to it.
    """

    def __init__(self) -> None:
        self.tokens = 2 * LEAST_PREFILL
        self._decoding = 0.0
        """Seconds of the last step that only decoded."""

    def took(self, seconds: float, taken: Sequence[Sequence[int]]) -> None:
        """Record that a step took `seconds`, with these tokens of each sequence of each request (`Scheduler.share`)."""
        takes = [take for each in taken for take in each if take]
        prefilled = sum(take for take in takes if take > 1)
        if not prefilled:
            self._decoding = seconds
        elif prefilled < sum(takes):
            added, allowed = max(seconds - self._decoding, 1e-6), max(self._decoding, STALL_SECONDS)
            if prefilled >= self.tokens or added > allowed:  # a fast step of fewer tokens proves nothing about more
                wanted = int(prefilled * allowed / added)
                self.tokens = max(min(wanted, 2 * self.tokens), self.tokens // 2, LEAST_PREFILL)


class Scheduler:
    """Admits requests and divides each step's tokens among them.

    A step takes at most `batch_tokens` tokens, unless there are more sequences with one token each. At a time,
    `max_sequences` sequences and `own_tokens` tokens of own KV run; a request that needs more runs alone, or, with
    `strict`, is refused.
    """

    def __init__(self, *, batch_tokens: int, max_sequences: int, own_tokens: int, strict: bool = False) -> None:
        self.batch_tokens = batch_tokens
        self.max_sequences = max_sequences
        self.own_tokens = own_tokens
        self._strict = strict
        self._waiting: list[Ticket] = []
        self._running: set[Ticket] = set()
        self._in_use: Counter[Hashable] = Counter()

    @property
    def waiting(self) -> int:
        """The number of requests that are not admitted yet."""
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether running and waiting requests leave room for a sequence with one token of own KV."""
        together = (*self._running, *self._waiting)
        sequences, tokens = sum(each.sequences for each in together), sum(each.tokens for each in together)
        return sequences < self.max_sequences and tokens < self.own_tokens

    def submit(self, ticket: Ticket) -> None:
        """Queue a request; UsageError, which says what it needs, if it can never run."""
        name, most = ("--max-sequences", self.max_sequences)
        if self.batch_tokens <= most:  # every sequence has a token in every step
            name, most = ("--batch-tokens", self.batch_tokens)
        if self._strict and ticket.sequences > most:
            raise UsageError(
                f"The question needs {ticket.sequences} sequences at a time, but {name} is {most}; raise it to "
                f"{ticket.sequences}, or lower --top-k."
            )
        self._waiting.append(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Remove a request that is answered, failed or cancelled, whether it was admitted or not."""
        if ticket in self._running:
            self._running.remove(ticket)
            self._in_use.subtract(ticket.reads)
            self._in_use += Counter()  # drops chunks that no request reads
        elif ticket in self._waiting:
            self._waiting.remove(ticket)

    def runs(self, ticket: Ticket) -> bool:
        """Whether it was admitted and has not left."""
        return ticket in self._running

    def admit(self, *, over: bool = False) -> list[Ticket]:
        """The requests that may run from now on, in the order of admission.

        `over`: the first may be admitted whatever it needs, because no running request can continue.
        """
        admitted: list[Ticket] = []
        while self._waiting:
            ticket = self._waiting[0] if over else self._next()
            if not (over or self._fits(ticket)):
                ticket = self._waiting[0]  # the one that shares chunks does not fit: try the first in line
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
            admitted.append(ticket)
        return admitted

    def share(self, wanted: Sequence[Sequence[int]], prefill: int | None = None) -> list[list[int]]:
        """How many tokens of each sequence the next step takes, from the number that each sequence of each request
        wants.

        Every sequence that wants one token gets it. The others share the rest of `batch_tokens` in order; one that is
        too long is cut and continues in the next step. Beside single tokens they get at most `prefill` tokens: half of
        them in order and the rest shortest first, so that a short question does not wait for a long one.
        """
        taken = [[1 if want == 1 else 0 for want in wants] for wants in wanted]
        singles = sum(map(sum, taken))
        left = max(self.batch_tokens - singles, 1)
        longer = [(i, number) for i, wants in enumerate(wanted) for number, want in enumerate(wants) if want > 1]
        parts = [(left, longer)]
        if singles and prefill is not None and prefill < left:
            shortest = sorted(longer, key=lambda at: sum(wanted[at[0]]))
            parts = [(prefill - prefill // 2, longer), (prefill // 2, shortest)]
        for left, order in parts:
            for i, number in order:
                take = min(wanted[i][number] - taken[i][number], left)
                taken[i][number] += take
                left -= take
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
        sequences = sum(each.sequences for each in together)
        tokens = sum(each.tokens for each in together) + sum(shared.values())
        return sequences <= self.max_sequences and tokens <= self.own_tokens
