"""Work that takes long says now and then that it goes on, so that its caller can show that, or end it."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Pulse"]

EVERY = 1 << 16
"""Characters to be tokenised between two times: some tenths of a second."""


class Pulse:
    """Calls `tell` after every so many characters of work; what that raises ends the work.

    It counts work, not time, so that a slow machine makes no other calls than a fast one.
    """

    def __init__(self, tell: Callable[[], object]) -> None:
        self._tell = tell
        self._done = 0

    def __call__(self, characters: int = EVERY) -> None:
        self._done += characters
        if self._done >= EVERY:
            self._done = 0
            self._tell()
