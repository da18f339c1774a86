"""What commands share: where text goes, how an error ends, what a size looks like.

Results go to stdout, everything else to stderr (docs/design.md).
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

__all__ = ["count", "fail", "note", "note_wait", "print_json", "size", "stderr"]

stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def note(message: str) -> None:
    """One line for the person, on stderr."""
    stderr.print(message, markup=False, style="dim")


def note_wait(holder: object) -> None:
    """For whom a command waits (`Store.writing`'s `on_wait`), on stderr."""
    note(f"waiting for {holder} …")


def fail(message: str) -> None:
    """One sentence that says what is wrong and what to do, on stderr."""
    stderr.print(f"ragkv: {message.rstrip('.')}.", markup=False, style="red")


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    json.dump(value, sys.stdout, ensure_ascii=False, indent=None if not sys.stdout.isatty() else 2)
    sys.stdout.write("\n")


def size(nbytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def count(number: int, noun: str) -> str:
    """1 -> "1 chunk", 1200 -> "1,200 chunks"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
