"""Reciprocal rank fusion: one ranking from several (Cormack, Clarke and Buettcher, SIGIR 2009).

Scores of different kinds are on different scales, ranks are not. The fused score only orders chunks. PCED cannot decode
with it: the relevance is computed from the raw scores of the rankings (`fusion`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from ragkv.retrievers.base import Hit, best_hits

__all__ = ["reciprocal_rank_fusion"]


def reciprocal_rank_fusion(rankings: Sequence[Sequence[Hit]], *, k: int = 60) -> list[Hit]:
    """Every chunk of `rankings` (each best first) by the sum of 1 / (k + rank), with ranks from 1; ties by chunk id.

    Neither the order of the rankings nor the scores in them matter. `ValueError` when a ranking has a chunk twice.
    """
    if k < 0:
        raise ValueError(f"k must be 0 or more, not {k}")
    shares: defaultdict[str, list[float]] = defaultdict(list)
    for ranking in rankings:
        if len({hit.chunk_id for hit in ranking}) != len(ranking):
            raise ValueError("a ranking has a chunk twice")
        for rank, hit in enumerate(ranking, 1):
            shares[hit.chunk_id].append(1 / (k + rank))
    fused = [Hit(chunk_id=chunk_id, score=math.fsum(found)) for chunk_id, found in shares.items()]
    return best_hits(fused)
