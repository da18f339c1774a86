"""A lock for many at a time, or for one alone."""

from __future__ import annotations

import threading

__all__ = ["Gate"]


class Gate:
    """A lock that transactions share, and that resizing, forking and closing take alone."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._shut = False

    def enter(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: not self._shut)
            self._inside += 1

    def leave(self) -> None:
        with self._condition:
            self._inside -= 1
            self._condition.notify_all()

    def shut(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: not self._shut)
            self._shut = True
            self._condition.wait_for(lambda: not self._inside)

    def reopen(self) -> None:
        with self._condition:
            self._shut = False
            self._condition.notify_all()
