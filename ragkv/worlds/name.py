"""Invented names, composed of syllables, which no model knows.

A stable hash of each word decides whether it belongs to the split `train` or `heldout`. So worlds of different splits
share no name, not even a surname.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal

__all__ = ["Kind", "Names", "Split", "listed", "split_of"]

Split = Literal["train", "heldout"]
Kind = Literal["company", "product", "person", "town"]

HELDOUT_BUCKET = 0
"""Words whose hash is in this bucket of ten are held out."""


def listed(text: str, separator: str | None = None) -> tuple[str, ...]:
    """Split a list that is written as text."""
    return tuple(text.split(separator))


_STARTS = listed(
    "Al An Ar As Bal Bar Bel Ben Ber Bor Bran Bre Cal Cam Car Cas Cor Cul Dal Dan Dar Del Dor Dun Ed El Em Er Fal "
    "Far Fel Fen Fin For Gal Gar Gil Gor Gra Hal Han Har Hel Hol Il In Is Jar Jen Jor Kal Kar Kel Ken Kir Kol Lam "
    "Lan Lar Len Lin Lor Mal Mar Mel Mer Min Mor Nal Nar Nel Nor Ol Or Os Pal Par Pel Per Por Quin Ral Ran Rel Ren "
    "Ros Sal San Sel Sor Sul Tal Tam Tar Tel Tor Tul Ul Ur Val Var Vel Ven Vor Wal Wen Wil Yar Yel Zan Zel Zor"
)
_MIDDLES = listed("a e i o an en in on ar er ol il ad os am et")
_ENDS: Mapping[str, Sequence[str]] = {
    "first": listed("a ia ina ek io is ra la na on ro do mi sa en ette us ko da ric win bert ya ly mond lo"),
    "last": listed(
        "kel man sen berg strom ski dal vik nik mann quist field wood stone ter ler ner lund zar dek rick gard"
    ),
    "town": listed("by ford wick mere ton ham burgh holm stead dale port bridge haven brook cliff gate hurst minster"),
    "company": listed("den tek dyne mont cor tan vex lex nova via sol tra max phor gen dra bix lith quor zon"),
    "product": listed("vane bex tix mio dora ska lume rix pod zia flex nia trix jet lux dex quo bri wing pax"),
    "river": listed("der ne we ster th ven low wash run gle ble ver se bourn sk re"),
    "region": listed("land shire mark wald ria nia marsh moor vale fell"),
}
_COMPANY_WORDS = listed(
    "Works Labs Motors Foods Glass Press Mills Tools Systems Textiles Instruments Shipyards Ceramics Paper Clocks "
    "Optics Brewery Furniture Pumps Robotics"
)


def split_of(word: str) -> Split:
    """The split that a word belongs to, by a hash that is the same on every machine and version of Python."""
    digest = hashlib.blake2b(word.lower().encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "little") % 10 == HELDOUT_BUCKET else "train"


@cache
def _words(part: str, split: Split) -> tuple[str, ...]:
    """Every word of one kind (a key of `_ENDS`) that belongs to `split`."""
    middles = ("", *_MIDDLES) if part not in ("first", "river") else ("", *_MIDDLES[:4])
    words = {start + middle + end for start in _STARTS for middle in middles for end in _ENDS[part]}
    return tuple(sorted(word for word in words if split_of(word) == split))


class Names:
    """Draws names that are unique in a world; each word is used once per kind."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self._rng = rng
        self._split: Split = split
        self._used: set[str] = set()

    def word(self, part: str) -> str:
        words = _words(part, self._split)
        while True:
            word = self._rng.choice(words)
            if word not in self._used:
                self._used.add(word)
                return word

    def name(self, kind: Kind) -> str:
        if kind == "person":
            return f"{self.word('first')} {self.word('last')}"
        if kind == "company":
            return f"{self.word('company')} {self._rng.choice(_COMPANY_WORDS)}"
        return self.word(kind)
