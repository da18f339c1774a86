"""Work for a fresh process (`ragkv.benchmarks.speed.report`) that imports next to nothing."""

from __future__ import annotations

import os
import signal
from typing import Any

from ragkv.errors import UsageError


def result(number: int, progress: Any) -> tuple[int, int]:
    progress(1, 2)
    return os.getpid(), number


def failing(progress: Any) -> None:
    raise UsageError("wrong")


def broken(progress: Any) -> None:
    raise ZeroDivisionError("of ours")


def killed(progress: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
