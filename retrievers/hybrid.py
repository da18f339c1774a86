"""One ranking of several: reciprocal rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009).

Scores of different kinds are on different scales, ranks are not. The fused score orders chunks and is nothing that
PCED could decode with: the raw scores of the lists remain the ones to fuse into a relevance (`fusion`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from ragkv.retrievers.base import Hit

__all__ = ["reciprocal_rank_fusion"]


def reciprocal_rank_fusion(rankings: Sequence[Sequence[Hit]], *, k: int = 60) -> list[Hit]:
    """Every chunk of `rankings` (each best first), by the sum of 1 / (k + rank), ranks from 1; ties by chunk id.

    The order of the lists does not matter, nor do the scores in them. `ValueError` when one has a chunk twice.
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
    return sorted(fused, key=lambda hit: (-hit.score, hit.chunk_id))
