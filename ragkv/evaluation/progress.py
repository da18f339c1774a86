"""How an evaluation reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

__all__ = ["Progress"]

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what is done next)."""
