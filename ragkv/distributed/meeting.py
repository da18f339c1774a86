"""How ranks find each other, and again after one was started anew: one generation after another, in a store.

A generation is a set of ranks that said hello under its number. When one of them is lost, the others end the
generation and wait in the next; the rank that was started again finds that it has already said hello in the present one
and ends it too. Whatever belongs to a generation has its number in its keys, so nothing of an old one is taken for new.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragkv.distributed.hello import Hello, require_alike
from ragkv.errors import RanksError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Meeting", "meet"]

_LOOK = 0.1  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Ranks that go together: `hellos` by rank."""

    generation: int
    rank: int
    hellos: tuple[Hello, ...]

    @property
    def prefix(self) -> str:
        """Before all keys of this generation."""
        return f"ragkv/{self.generation}"


def meet(store: Store, rank: int, size: int, hello: Hello, *, timeout: float, after: int = -1) -> Meeting:
    """Say hello in the first generation after number `after`, and wait until all `size` ranks have.

    RanksError when some do not come within `timeout` seconds, or when one differs (`require_alike`): all get the same
    sentence, naming the rank.
    """
    until = time.monotonic() + timeout
    try:
        generation = _generation(store)
        while generation <= after or store.check([_key(generation, rank)]):
            generation = _end(store, generation, until)
        while True:
            store.set(_key(generation, rank), hello.to_json())
            missing = [other for other in range(size) if not store.check([_key(generation, other)])]
            if not missing:
                break
            if time.monotonic() > until:
                raise RanksError(_missing(missing, size, timeout))
            time.sleep(_LOOK)  # TCPStore's own waiting would print a warning each time
            if (newest := _generation(store)) > generation:  # somebody was started again meanwhile
                generation = newest
        found = tuple(Hello.from_bytes(store.get(_key(generation, other)), other) for other in range(size))
    except RuntimeError as error:
        raise RanksError(
            "The store where the ranks meet cannot be reached; check MASTER_ADDR and MASTER_PORT, and that rank 0's "
            "machine accepts connections there."
        ) from error
    require_alike(found)
    return Meeting(generation=generation, rank=rank, hellos=found)


def is_over(store: Store, generation: int) -> bool:
    """Whether a rank has ended the generation."""
    return _generation(store) > generation


def _generation(store: Store) -> int:
    return int(store.add("ragkv/generation", 0))


def _end(store: Store, generation: int, until: float) -> int:
    """End a generation, once however many ranks do it, and return the next."""
    if store.add(f"ragkv/{generation}/over", 1) == 1:
        store.add("ragkv/generation", 1)
    while (newest := _generation(store)) <= generation:
        if time.monotonic() > until:
            raise RanksError("The rank that was to begin the next generation has ended; start all ranks again.")
        time.sleep(_LOOK)
    return newest


def _key(generation: int, rank: int) -> str:
    return f"ragkv/{generation}/hello/{rank}"


def _missing(missing: list[int], size: int, timeout: float) -> str:
    named = ", ".join(map(str, missing))
    return (
        f"Of {size} ranks, {'this one' if len(missing) == 1 else 'these'} did not come within {timeout:g} seconds: "
        f"{named}. Look at what they say, and start them again."
    )
