"""Whether a text contains another without regard to case, white space and punctuation."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ragkv.evaluation.question import normal

__all__ = ["Wording"]

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_PUNCTUATION = re.compile(r"(?<!\d)[.,:]|[.,:](?!\d)|[^\w\s.,:#%&@+$€£°=<>*/\\]|_")
"""Signs that carry meaning are none: those of numbers (3.5, 10:30), and such as make C# of C."""


@dataclass(frozen=True, slots=True)
class Wording:
    """A text in three readings, of which one must match. `plain` only ignores case and white space.

    In `apart` punctuation separates words, in `joined` it does not: of `Oskel's well-known "U.S." mill` they are
    `oskel s well known u s mill` and `oskels wellknown us mill`.
    """

    plain: str
    apart: str
    joined: str

    @classmethod
    def of(cls, text: str) -> Wording:
        plain = normal(text)
        bare = _THOUSANDS.sub("", plain)
        return cls(plain, *(" ".join(_PUNCTUATION.sub(sign, bare).split()) for sign in (" ", "")))

    def holds(self, wanted: Wording) -> bool:
        """Whether `wanted` occurs in this text. If it is all punctuation, it must occur as it is."""
        if not wanted.joined:
            return wanted.plain in self.plain
        return wanted.plain in self.plain or wanted.apart in self.apart or wanted.joined in self.joined
