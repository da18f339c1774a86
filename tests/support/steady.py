"""A clock that advances by a fixed step whenever it is read, so results do not depend on the machine."""

from collections.abc import Callable
from itertools import accumulate, cycle
from types import ModuleType, SimpleNamespace

import pytest

Clock = Callable[[], float]


def steady(*steps: float) -> Clock:
    """Each reading is one step later: 0.01 seconds, or the given steps in turn."""
    readings = accumulate(cycle(steps or (0.01,)))
    return lambda: next(readings)


def stopwatches(patch: pytest.MonkeyPatch, module: ModuleType, seconds: float = 0.01) -> None:
    """Replace `module`'s `time` clocks by ones that advance by this many seconds at each reading."""
    clocks = dict.fromkeys(("monotonic", "perf_counter", "process_time", "thread_time"), steady(seconds))
    patch.setattr(module, "time", SimpleNamespace(**clocks))
