"""What each mode of retrieval searches, and which modes an index can serve with the vectors that it keeps."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from ragkv.config import MODES, NEEDED, Mode
from ragkv.retrievers import ScoreKind

__all__ = ["indexes_of", "kinds_of", "refusal", "served", "useful_kinds"]


def kinds_of(mode: Mode) -> frozenset[ScoreKind]:
    """The kinds of vectors without which a mode cannot be served."""
    return cast("frozenset[ScoreKind]", frozenset(NEEDED[mode]))


def useful_kinds(mode: Mode) -> frozenset[ScoreKind]:
    """The kinds of vectors that a mode uses if they are there."""
    return kinds_of(mode) | ({"sparse"} if mode == "hybrid" else set())


def indexes_of(mode: Mode, kinds: Collection[str]) -> tuple[str, ...]:
    """The retrieval indexes that a mode searches where these kinds of vectors are kept.

    ColBERT scores the candidates of the dense index with vectors from the store. Hybrid searches by words where there
    are no sparse vectors.
    """
    if mode == "bm25":
        return ("bm25",)
    if mode == "hybrid":
        return ("dense", "sparse") if "sparse" in kinds else ("bm25", "dense")
    return tuple(sorted(kinds_of(mode) - {"colbert"}))


def served(kinds: Collection[str]) -> tuple[Mode, ...]:
    """The modes that can be served with these kinds of vectors, and without any."""
    return tuple(mode for mode in MODES if kinds_of(mode) <= set(kinds))


def refusal(mode: Mode, kinds: Collection[str], what: str) -> str | None:
    """Why a mode cannot be served where only these kinds of vectors are kept, and which can be; None if it can be."""
    if not (missing := sorted(kinds_of(mode) - set(kinds))):
        return None
    *others, last = served(kinds)
    can = f"{', '.join(others)} and {last}" if others else last
    return f'{what} has no {" and no ".join(missing)} vectors, which retrieval "{mode}" needs; it can serve {can}.'
