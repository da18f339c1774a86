"""Measure how well an embedder and a reranker find passages of worlds that neither has seen, compared with BM25."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.finetune.retrieval_data import Ask, world_step
from ragkv.retrievers import BM25, colbert_scores, load_embedder, load_reranker
from ragkv.worlds.paraphrase import shared_words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ragkv.retrievers import Embedding

__all__ = ["RetrievalRow", "measure_retrieval"]

FEW_WORDS = 1
"""The most words, without stop words, that a question of the slice "few" shares with the passage that answers it."""
RERANKED = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalRow:
    """recall@5 and nDCG@10 of one search over the `n` questions of a slice (few, named, described)."""

    slice: str
    system: str
    recall_5: float
    ndcg_10: float
    n: int


def measure_retrieval(
    embedder: Path, reranker: Path | None, *, seeds: Sequence[int] = range(4), size: int = 60, asks: int = 160
) -> list[RetrievalRow]:
    """Ask up to `asks` questions per seed about the passages of one held-out world of `size` entities."""
    import numpy as np
    from transformers import AutoTokenizer

    model = load_embedder(str(embedder), device="cpu")
    judge = None if reranker is None else load_reranker(str(reranker), device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(embedder, trust_remote_code=False)
    ranks: dict[tuple[str, str], list[tuple[list[int], tuple[int, ...]]]] = {}
    for seed in seeds:
        rng = random.Random(f"ragkv-retrieval-measure:{seed}")
        step = world_step(rng, tokenizer, split="heldout", worlds=1, size=size, asks=asks)
        said = model.embed_documents(step.passages)
        dense, sparse, colbert = _parts(said)
        words = BM25()
        words.build(((str(place), text) for place, text in enumerate(step.passages)), 1)
        for ask in step.asks:
            query = model.embed_query(ask.question)
            asked = _parts(query)
            found = {
                "bm25": [int(hit.chunk_id) for hit in words.search(ask.question, 50)],
                "dense": _order(dense @ asked[0][0]),
                "sparse": _order(np.array([_inner(asked[1][0], weights) for weights in sparse])),
                "colbert": _order(np.array(colbert_scores(asked[2][0], colbert))),
            }
            if judge is not None:
                best = found["dense"][:RERANKED]
                logits = judge.score(ask.question, [step.passages[place] for place in best])
                found["dense+rerank"] = [place for _, place in sorted(zip((-x for x in logits), best, strict=True))]
            for system, order in found.items():
                ranks.setdefault((_slice(ask, step.passages), system), []).append((order, ask.answers))
    return [
        RetrievalRow(
            slice=name,
            system=system,
            recall_5=sum(any(p in answers for p in order[:5]) for order, answers in asked) / len(asked),
            ndcg_10=sum(_ndcg(order, answers) for order, answers in asked) / len(asked),
            n=len(asked),
        )
        for (name, system), asked in sorted(ranks.items())
    ]


def _parts(said: Embedding) -> tuple[Any, Any, Any]:
    """The dense, sparse and ColBERT vectors, which our embedder always returns."""
    return said.dense, said.sparse, said.colbert


def _slice(ask: Ask, passages: Sequence[str]) -> str:
    if all(shared_words(ask.question, passages[place]) <= FEW_WORDS for place in ask.answers):
        return "few"
    return "named" if ask.named else "described"


def _order(scores: NDArray[np.floating]) -> list[int]:
    return [int(place) for place in (-scores).argsort(kind="stable")[:50]]


def _inner(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    return sum(weight * b[token] for token, weight in a.items() if token in b)


def _ndcg(order: Sequence[int], answers: Sequence[int], k: int = 10) -> float:
    gained = sum(1 / math.log2(rank + 2) for rank, place in enumerate(order[:k]) if place in answers)
    return gained / sum(1 / math.log2(rank + 2) for rank in range(min(k, len(answers))))
