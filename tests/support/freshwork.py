"""Work for a new process (`ragkv.benchmarks.speed.report`), which is forked from one that has imported this module."""

import os
import signal
from typing import Any

import ragkv.benchmarks.speed.report  # noqa: F401 - else each process would import it
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
