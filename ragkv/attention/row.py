"""One token stream: what it sees besides its own tokens, where it stands, and its own KV."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ragkv.attention.kv import Segment
from ragkv.attention.ownkv import OwnKV
from ragkv.attention.part import Part

__all__ = ["Group", "Row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Segments under one softmax, and how the group weighs against the rest of the row.

    `temperature` T divides the softmax scale; the group's logsumexp enters the merge as S·T·lse (`power`, APE §4.4
    with the searched pair) or T·lse + log S (`log`, the variant of its later code). T = S = 1 is ordinary attention.
    """

    segments: tuple[Segment, ...]
    temperature: float = 1.0
    scale: float = 1.0
    scale_mode: Literal["power", "log"] = "power"

    @property
    def plain(self) -> bool:
        """Whether the group is ordinary attention, so that its segments merge with the rest in one step."""
        return self.temperature == 1.0 and self.scale == 1.0

    @property
    def weight(self) -> tuple[float, float]:
        """(a, b): the group's logsumexp enters the row's softmax as a·lse + b."""
        if self.scale_mode == "power":
            return self.scale * self.temperature, 0.0
        return self.temperature, math.log(self.scale)

    def weigh(self, part: Part) -> Part:
        """The merged group as it enters the row's softmax."""
        factor, addend = self.weight
        return Part(part.out, part.lse * factor + addend)


@dataclass(slots=True, eq=False)
class Row:
    """One token stream: a question, one expert or the amateur of PCED, one question of an IPPD prompt.

    `groups` are all KV that it reads besides its own tokens; `position` is where its next token will stand. Its own
    KV, `own`, grows by what it reads. `settled`: its groups are laid out for single tokens (`ragkv.runtime.pool`).
    `silent`: it is read for its KV, and nobody wants its logits.
    """

    groups: tuple[Group, ...]
    position: int
    own: OwnKV = field(default_factory=OwnKV)
    settled: bool = False
    silent: bool = False

    @classmethod
    def over(cls, segments: Iterable[Segment], *, position: int) -> Row:
        """A row that sees these segments as ordinary attention does."""
        found = tuple(segments)
        return cls((Group(segments=found),) if found else (), position)

    @classmethod
    def for_kv(cls, segments: Iterable[Segment], *, position: int) -> Row:
        """A row that is read once, for its KV alone: it has room for no more, and nobody wants its logits."""
        row = cls.over(segments, position=position)
        row.own, row.silent = OwnKV(reserve=0), True
        return row

    def places(self, n: int) -> Sequence[int]:
        """Positions of its next `n` tokens."""
        return range(self.position, self.position + n)

    def kept(self, n: int) -> list[int]:
        """After which of its next `n` tokens logits are wanted: the last of them, if any."""
        return [] if self.silent else [n - 1]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, of all groups."""
        return tuple(segment for group in self.groups for segment in group.segments)
