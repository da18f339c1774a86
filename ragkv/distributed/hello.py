"""What a rank says of itself before it answers with others: they must have the same model, prompt and settings."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from ragkv import __version__
from ragkv.errors import RanksError

__all__ = ["Hello", "require_alike"]

_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """`same` are facts, by what they are called in a sentence, that must be equal on all ranks."""

    same: Mapping[str, str]
    version: str = __version__
    host: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)

    def to_json(self) -> str:
        """For `from_bytes`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes, rank: int) -> Hello:
        """What `to_json` made; RanksError for anything else."""
        try:
            if len(data) > _MOST_BYTES:
                raise ValueError("it is too long")
            found = json.loads(data)
            same = {str(name): str(value) for name, value in found["same"].items()}
            return cls(same=same, version=str(found["version"]), host=str(found["host"]), process=int(found["process"]))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RanksError(
                f"What rank {rank} says of itself cannot be read ({error}); run the same version of ragkv on all ranks."
            ) from error

    def named(self, rank: int) -> str:
        """The rank for a sentence, with what finds it."""
        return f"rank {rank} ({self.host}, process {self.process})"


def require_alike(hellos: Sequence[Hello]) -> None:
    """RanksError that names the first rank that differs from rank 0, and in what."""
    first = hellos[0]
    for rank, other in enumerate(hellos):
        mine, theirs = ({"ragkv": each.version, **each.same} for each in (first, other))
        for name in mine | theirs:
            if mine.get(name) != theirs.get(name):
                raise RanksError(
                    f"{_capital(other.named(rank))} has another {name} than rank 0: {theirs.get(name, 'none')}, not "
                    f"{mine.get(name, 'none')}; all ranks must have the same."
                )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
