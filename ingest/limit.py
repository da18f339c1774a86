"""What one document may cost, so that no file, however it was made, takes the machine or the ingest with it.

A parser asks as it goes: `check_text` and `check_sections` raise `Unreadable` as soon as what it has found is too much.
Memory and time of a parser are the system's to limit (`ragkv.ingest.isolated`), as nothing in it can be trusted to ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self

from ragkv.config import IngestConfig, byte_count

__all__ = ["Limits", "Unreadable", "check_sections", "check_text", "limited", "limits"]


class Unreadable(Exception):  # noqa: N818 - carries a reason up to `read_source`, which knows the name
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`[ingest]` of `ragkv.toml` in numbers: bytes of a file, characters of its text, bytes of memory, seconds."""

    file: int
    characters: int
    memory: int
    seconds: int

    @classmethod
    def of(cls, config: IngestConfig) -> Self:
        return cls(
            file=byte_count("ingest.max_file", config.max_file),
            characters=config.max_characters,
            memory=byte_count("ingest.max_memory", config.max_memory),
            seconds=config.max_seconds,
        )

    @property
    def sections(self) -> int:
        """Pages, headings or rows of one document; each costs as much memory as some words."""
        return max(1000, self.characters // 32)

    def seconds_for(self, size: int) -> int:
        """Of computing, for a file of so many bytes: 10 a MiB more than for an empty one."""
        return self.seconds + 10 * (size >> 20)

    def check_file(self, size: int) -> None:
        if size > self.file:
            raise Unreadable(f"larger than {self.file:,} bytes, which is ingest.max_file")

    def too_much_memory(self) -> str:
        return f"takes more than {self.memory >> 20:,} MiB of memory to read, which is ingest.max_memory"

    def too_long(self, size: int) -> str:
        return f"takes more than {self.seconds_for(size)} s of computing to read: raise ingest.max_seconds"


_in_force: ContextVar[Limits] = ContextVar("limits")
_DEFAULT = Limits.of(IngestConfig())


def limits() -> Limits:
    """The limits of this context: those of `limited`, else the defaults."""
    return _in_force.get(_DEFAULT)


@contextmanager
def limited(to: Limits) -> Iterator[None]:
    """Use these limits inside the `with` block."""
    token = _in_force.set(to)
    try:
        yield
    finally:
        _in_force.reset(token)


def check_text(characters: int) -> None:
    """`Unreadable` when so many characters are more than a document's text may have."""
    most = limits().characters
    if characters > most:
        raise Unreadable(f"its text is longer than {most:,} characters, which is ingest.max_characters")


def check_sections(count: int) -> None:
    """`Unreadable` when so many pages, headings or rows are more than a document may have."""
    most = limits().sections
    if count > most:
        raise Unreadable(f"it has more than {most:,} pages, headings or rows: raise ingest.max_characters")
