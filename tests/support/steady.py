"""A clock that goes on by the same step whenever it is read: what depends on time is the same on every machine."""

from __future__ import annotations

from itertools import accumulate, cycle

from ragkv.planning.calibration import Clock


def steady(*steps: float) -> Clock:
    """Each reading is a step after the one before: 0.01 seconds, or the given ones in turn."""
    readings = accumulate(cycle(steps or (0.01,)))
    return lambda: next(readings)
