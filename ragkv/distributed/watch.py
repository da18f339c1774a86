"""Who is alive: each rank leaves a sign in the store every second, and looks for those of the others.

A collective that does not end says nothing about whose fault it is. These signs do: a rank whose sign has stood still
is gone; one that is alive but has started fewer collectives than the others is what they wait for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from ragkv.distributed.hello import Hello
from ragkv.errors import RanksError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Watch"]

logger = logging.getLogger(__name__)

EVERY = 1.0
"""Seconds between two signs."""
GONE = 10.0
"""Seconds without a new sign after which a rank counts as gone."""
_MOST_BYTES = 4096


class Watch:
    """The signs of one generation of ranks, in `store`, a connection that nobody else uses."""

    def __init__(self, store: Store, rank: int, hellos: Sequence[Hello], *, gone: float = GONE) -> None:
        self.rank = rank
        self.hellos = tuple(hellos)
        self.number = 0
        """How many collectives this rank has started."""
        self._gone = gone
        self._store = store
        self._notices: dict[int, str] = {}
        self._numbers = dict.fromkeys(range(len(hellos)), 0)
        self._signs: dict[int, tuple[bytes, float]] = {r: (b"", time.monotonic()) for r in range(len(hellos))}
        self._told: str | None = None
        self._lost: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ragkv-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave no more signs."""
        self._stop.set()
        self._thread.join()

    def tell(self, why: str) -> None:
        """Have the others know why this rank gives up; they learn it at their next look."""
        self._told = why
        self._thread.join(0 if self._stop.wait(0) else 2 * EVERY)

    def trouble(self) -> str | None:
        """Why no collective will end any more, as far as is known."""
        if self._lost is not None:
            return self._lost
        now = time.monotonic()
        for rank, why in sorted(self._notices.items()):
            return f"{self._named(rank)} gave up: {why}"
        for rank, (_, when) in sorted(self._signs.items()):
            if rank != self.rank and now - when > self._gone:
                return (
                    f"{self._named(rank)} has ended or cannot be reached: there was no sign of it for "
                    f"{self._gone:.0f} seconds. Start it again, and ask again."
                )
        return None

    def after_failure(self, error: Exception) -> RanksError:
        """A collective has failed: wait until it is known whose fault it was, if that becomes known."""
        until = time.monotonic() + self._gone + 2 * EVERY
        while (why := self.trouble()) is None and time.monotonic() < until:
            time.sleep(EVERY / 4)
        reason = str(error).strip().split("\n")[0]
        found = RanksError(why or f"The ranks cannot speak to each other any more ({reason}); start them again.")
        found.__cause__ = error
        return found

    def too_slow(self, timeout: float) -> RanksError:
        """A collective has not ended in time although all are alive."""
        behind = [rank for rank, number in self._numbers.items() if rank != self.rank and number < self.number]
        named = ", ".join(self._named(rank) for rank in behind) or "Another rank"
        verb = "is" if len(behind) < 2 else "are"
        return RanksError(
            f"{named[:1].upper()}{named[1:]} {verb} alive, but {verb} not where the others have waited for {timeout:g} "
            "seconds; if that is only slow, raise --timeout."
        )

    def _named(self, rank: int) -> str:
        named = self.hellos[rank].named(rank)
        return named[:1].upper() + named[1:]

    def _run(self) -> None:
        count = 0
        others = [rank for rank in self._signs if rank != self.rank]
        try:
            while True:
                count += 1
                self._store.set(f"sign/{self.rank}", f"{count} {self.number}")
                if self._told is not None:
                    self._store.set(f"notice/{self.rank}", self._told[: _MOST_BYTES // 4])
                    return
                self._look(others)
                if self._stop.wait(EVERY):
                    return
        except (dist.DistError, RuntimeError) as error:
            logger.debug("the store of the ranks is gone: %s", error)
            self._lost = (
                "The store where the ranks meet cannot be reached: rank 0, or torchrun on its machine, has ended. "
                "Start all ranks again."
            )

    def _look(self, others: Sequence[int]) -> None:
        now = time.monotonic()
        for rank in others:
            if rank not in self._notices and self._store.check([f"notice/{rank}"]):
                self._notices[rank] = self._store.get(f"notice/{rank}")[:_MOST_BYTES].decode(errors="replace")
            if self._store.check([f"sign/{rank}"]):
                sign = self._store.get(f"sign/{rank}")
                if sign != self._signs[rank][0]:
                    self._signs[rank] = sign, now
                    number = sign.split(b" ")[-1][:20]
                    self._numbers[rank] = int(number) if number.isdigit() else 0
