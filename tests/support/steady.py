"""A clock that goes on by the same step whenever it is read: what depends on time is the same on every machine."""

from __future__ import annotations

from itertools import count

from ragkv.planning.stopwatch import Stopwatch


def steady(step: float = 0.01, *, waited: float | None = 0.0) -> Stopwatch:
    """`step` seconds a reading, of which this process waited for a core for the share `waited`."""
    now, processor, waits = (count() for _ in range(3))
    return Stopwatch(
        now=lambda: next(now) * step,
        processor=lambda: next(processor) * (1 - (waited or 0)),
        waited=lambda: None if waited is None else next(waits) * waited,
    )
