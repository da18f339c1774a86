"""How far a long job on the store has come, for a progress bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Counter", "Notify", "Progress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`done` of about `total` units of the step that is running."""

    step: str
    done: int
    total: int
    unit: str = "bytes"


Notify: TypeAlias = Callable[[Progress], None]


class Counter:
    """Calls `notify` at every hundredth of a step, and at its end."""

    def __init__(self, notify: Notify | None, step: str, total: int, unit: str = "bytes") -> None:
        self._notify = notify
        self._step, self._total, self._unit = step, max(1, total), unit
        self._done = self._told = 0

    def add(self, amount: int = 1) -> None:
        self._done += amount
        if 100 * (self._done - self._told) >= self._total:
            self._tell(min(self._done, self._total))

    def finish(self) -> None:
        self._tell(self._total)

    def _tell(self, done: int) -> None:
        self._told = self._done
        if self._notify is not None:
            self._notify(Progress(step=self._step, done=done, total=self._total, unit=self._unit))
