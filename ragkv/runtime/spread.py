"""A step of rows whose chunks lie on several ranks: which rank runs which row, and everybody's logits.

A row that reads chunks of several ranks is run by all of them, and they merge its attention in every layer. One that
reads the chunks of a single rank (an expert of PCED) is run there alone, and only its logits travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ragkv.attention.across import Ranks
from ragkv.attention.row import Row

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel

__all__ = ["home_of", "step_across"]


def home_of(row: Row) -> int | None:
    """The rank that runs the row: that of its chunks, 0 if no rank has chunks of its own in it; None: all run it.

    Whatever is read for its KV alone is read by all: rows of any rank may see it afterwards.
    """
    owners = {segment.kv.owner for segment in row.segments if segment.kv.tokens} - {None}
    if row.silent or len(owners) > 1:
        return None
    return next(iter(owners), 0)


def step_across(model: LanguageModel, rows: Sequence[Row], ids: Sequence[Sequence[int]], ranks: Ranks) -> Tensor:
    """What `model.step(rows, ids)` gives where every rank holds all chunks: fp32 logits, the same bits on all ranks.

    The rows that all run are a pass of their own, so that it is packed alike on all ranks.
    """
    homes = [home_of(row) for row in rows]
    kept = [len(row.kept(len(each))) for row, each in zip(rows, ids, strict=True)]
    found: list[Tensor] = [torch.empty(0)] * len(rows)

    def run(which: Sequence[int], among: Ranks | None) -> Tensor:
        some, their = [rows[i] for i in which], [ids[i] for i in which]
        return model.step(some, their) if among is None else model.step(some, their, ranks=among)

    def put(which: Sequence[int], logits: Tensor) -> None:
        counts = [kept[i] for i in which]
        for i, scores in zip(which, torch.split(logits[: sum(counts)], counts), strict=True):
            found[i] = scores

    common = [i for i, home in enumerate(homes) if home is None]
    if common:
        put(common, run(common, ranks))
    theirs = {rank: [i for i, home in enumerate(homes) if home == rank] for rank in range(ranks.size)}
    most = max(sum(kept[i] for i in which) for which in theirs.values())
    if most:
        mine = theirs[ranks.rank]
        told = torch.zeros((most, model.config.vocab_size), device=model.device)
        if mine:
            logits = run(mine, None)
            told[: len(logits)] = logits
        for i in {i for which in theirs.values() for i in which}.difference(mine):
            rows[i].own.commit(len(ids[i]))
            rows[i].position += len(ids[i])
        for rank, logits in enumerate(ranks.gather(told)):
            put(theirs[rank], logits.to(model.device))
    wanted = [scores for scores, count in zip(found, kept, strict=True) if count]
    return torch.cat(wanted) if wanted else torch.empty((0, 0))
