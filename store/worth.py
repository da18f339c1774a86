"""What chunk KV is worth keeping: the prefill time that it saves per byte, times how often and how lately it was used.

Every use counts one, and counts half as much after `HALF_LIFE` rooms of KV have been read since (forward decay:
Cormode et al., 2009). The clock counts these half-lives, so that a weight need never be brought up to date: the
logarithm of all uses, each at its own time, keeps its place among the others for ever.

Uses of KV that has left, or was never let in, are remembered. So what is asked for again and again gets in, and what is
asked for once pushes nothing out that is worth more: over Zipf draws this comes within five points of the best fixed
set that hindsight can choose, if that also has to be made at its first use (tests/store/test_worth.py).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["HALF_LIFE", "NEVER", "Simulation", "elapsed", "simulate", "used", "worth"]

K = TypeVar("K", bound=Hashable)

HALF_LIFE = 4.0
"""After so many rooms of KV were read, a use counts half. By simulation (Zipf 0.8 to 1.2, 5,000 chunks, room for 1,000,
10,000 questions): twice as much gains 0.2 points where interest stays, and loses 2.3 after it has changed altogether;
half as much loses and gains as much."""

NEVER = -math.inf
"""The weight of what no question has used."""


def elapsed(nbytes: float, room: float) -> float:
    """By how much reading `nbytes` moves the clock, where there is room for `room` bytes."""
    return nbytes / (HALF_LIFE * max(room, nbytes, 1.0))


def used(weight: float, clock: float, times: float = 1.0) -> float:
    """The weight after so many more uses now: log2 of the sum of 2^clock over all uses."""
    more = clock + math.log2(times)
    high, low = max(weight, more), min(weight, more)
    return high if low == NEVER else high + math.log2(1.0 + 2.0 ** (low - high))


def worth(weight: float, tokens: int, nbytes: int) -> float:
    """The order in which KV leaves, least first. Prefill time goes by tokens: all that is compared is of one model."""
    return weight + math.log2(max(tokens, 1) / max(nbytes, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What came of a sequence of questions: chunks found and made, and those that left."""

    hits: int
    misses: int
    evictions: int

    @property
    def rate(self) -> float:
        """The share of chunks whose KV was there."""
        return self.hits / max(self.hits + self.misses, 1)


def simulate(asked: Iterable[K], room: float, sizes: Mapping[K, tuple[int, int]]) -> Simulation:
    """Keep KV by worth within `room` bytes, from empty; `sizes` are (tokens, bytes) of every chunk.

    It does what `ragkv.store.upkeep.eviction` does to a store, without one.
    """
    weights: dict[K, float] = {}
    held: dict[K, float] = {}
    order: list[tuple[float, int, K]] = []  # of what is held, least first; entries may be out of date
    clock = total = 0.0
    hits = misses = evictions = 0
    for turn, name in enumerate(asked):
        tokens, nbytes = sizes[name]
        clock += elapsed(nbytes, room)
        weights[name] = used(weights.get(name, NEVER), clock)
        own = worth(weights[name], tokens, nbytes)
        if name in held:
            hits += 1
        else:
            misses += 1
            victims: list[tuple[float, int, K]] = []
            free = room - total
            while free < nbytes and order and order[0][0] < own:
                least = heapq.heappop(order)
                if held.get(least[2]) == least[0]:
                    victims.append(least)
                    free += sizes[least[2]][1]
            if free < nbytes:  # all that would have to leave is worth more, or it is larger than the room
                for victim in victims:
                    heapq.heappush(order, victim)
                continue
            for _, _, victim_name in victims:
                del held[victim_name]
                evictions += 1
            total = room - free + nbytes
        held[name] = own
        heapq.heappush(order, (own, turn, name))
    return Simulation(hits=hits, misses=misses, evictions=evictions)
