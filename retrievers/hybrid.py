"""One ranking from several whose scores are on different scales.

`relative_score_fusion` scales each ranking to the range of its own scores. `reciprocal_rank_fusion` forgets the scores
(Cormack, Clarke and Buettcher, SIGIR 2009). Either only orders chunks. PCED cannot decode with it: the relevance is
computed from the raw scores of the rankings (`fusion`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from ragkv.retrievers.base import Hit, best_hits

__all__ = ["reciprocal_rank_fusion", "relative_score_fusion"]


def relative_score_fusion(rankings: Sequence[Sequence[Hit]]) -> list[Hit]:
    """Every chunk of `rankings` by the sum of (s - least) / (greatest - least) over the rankings that found it.

    The best of each ranking adds 1, the last one nothing, as much as one that was not found. If all scores of a ranking
    are equal, each adds 1. The order of the rankings does not matter; ties by chunk id. `ValueError` when a ranking has
    a chunk twice, or a score that is not finite.
    """
    return _fused(rankings, _relative)


def reciprocal_rank_fusion(rankings: Sequence[Sequence[Hit]], *, k: int = 60) -> list[Hit]:
    """Every chunk of `rankings` (each best first) by the sum of 1 / (k + rank), with ranks from 1; ties by chunk id.

    Neither the order of the rankings nor the scores in them matter. `ValueError` when a ranking has a chunk twice.
    """
    if k < 0:
        raise ValueError(f"k must be 0 or more, not {k}")
    return _fused(rankings, lambda ranking: (1 / (k + rank) for rank in range(1, len(ranking) + 1)))


def _fused(rankings: Sequence[Sequence[Hit]], shares_of: Callable[[Sequence[Hit]], Iterable[float]]) -> list[Hit]:
    """Every chunk by the sum of its shares, of which `shares_of` a ranking gives one for each hit."""
    shares: defaultdict[str, list[float]] = defaultdict(list)
    for ranking in rankings:
        if len({hit.chunk_id for hit in ranking}) != len(ranking):
            raise ValueError("a ranking has a chunk twice")
        for hit, share in zip(ranking, shares_of(ranking), strict=True):
            shares[hit.chunk_id].append(share)
    return best_hits(Hit(chunk_id=chunk_id, score=math.fsum(found)) for chunk_id, found in shares.items())


def _relative(ranking: Sequence[Hit]) -> list[float]:
    if not all(math.isfinite(hit.score) for hit in ranking):
        raise ValueError("a ranking has a score that is not finite")
    least = min((hit.score for hit in ranking), default=0.0)
    span = max((hit.score for hit in ranking), default=0.0) - least
    return [(hit.score - least) / span if span else 1.0 for hit in ranking]
