"""A clock that goes on by the same step whenever it is read: what depends on time is the same on every machine."""

from itertools import accumulate, cycle
from types import ModuleType, SimpleNamespace

import pytest

from ragkv.planning.calibration import Clock


def steady(*steps: float) -> Clock:
    """Each reading is a step after the one before: 0.01 seconds, or the given ones in turn."""
    readings = accumulate(cycle(steps or (0.01,)))
    return lambda: next(readings)


def stopwatches(patch: pytest.MonkeyPatch, module: ModuleType, seconds: float = 0.01) -> None:
    """Every clock that `module` reads as `time.…` goes on by so many seconds whenever any of them is read."""
    clocks = dict.fromkeys(("monotonic", "perf_counter", "process_time", "thread_time"), steady(seconds))
    patch.setattr(module, "time", SimpleNamespace(**clocks))
