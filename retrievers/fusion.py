"""From raw scores to one relevance r in [0, 1) per chunk: PCED Appendix B, Eqs. 4-7.

PCED adds gamma * log r to an expert's logits (Eq. 2), so that all kinds of scores have to be on one scale. All
functions raise ValueError for NaN and infinities, which are a fault of the model or the index and must not become a
rank.
"""

from __future__ import annotations

import math

from ragkv.retrievers.base import ScoreKind

__all__ = ["EPSILON", "fuse", "normalise_rerank", "normalise_retrieval"]

EPSILON = 1e-8


def normalise_retrieval(score: float, kind: ScoreKind) -> float:
    """Eq. 4 for dense and colbert: clip((s + 1) / 2); Eq. 5 for sparse: clip(2 / pi * arctan(max(s, 0)))."""
    _require_finite(score)
    if kind == "sparse":
        return _clip(2 / math.pi * math.atan(max(score, 0.0)))
    if kind in ("dense", "colbert"):
        return _clip((score + 1) / 2)
    raise ValueError(f"unknown kind of score: {kind!r}")


def normalise_rerank(logit: float) -> float:
    """Eq. 6: the clipped sigmoid of a raw reranker logit, in the form that never overflows."""
    _require_finite(logit)
    small = math.exp(-abs(logit))  # in (0, 1]
    return _clip((1.0 if logit >= 0 else small) / (1.0 + small))


def fuse(retrieval: float, rerank: float | None) -> float:
    """Eq. 7: the harmonic mean of two normalised scores; without a reranker, r is the retrieval score."""
    for score in (retrieval, 0.0 if rerank is None else rerank):
        if not 0.0 <= score < 1.0:
            raise ValueError(f"a normalised score must be in [0, 1), not {score!r}")
    if rerank is None:
        return retrieval
    return 2 * retrieval * rerank / (retrieval + rerank + EPSILON)


def _clip(value: float) -> float:
    return min(max(value, 0.0), 1.0 - EPSILON)


def _require_finite(score: float) -> None:
    if not math.isfinite(score):
        raise ValueError(f"a score must be a finite number, not {score!r}")
