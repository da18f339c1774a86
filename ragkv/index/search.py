"""Search the retrieval indexes in one of five modes, rerank the result, and keep the raw score of every stage.

It gets indexes, texts and vectors through callables and protocols and never sees a store. `finder` gives it those of
an index on disk; the evaluation gives it those of a corpus that is in no index.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ragkv.config import MODES, NONE, Fusion, IndexConfig, Mode
from ragkv.errors import RetrievalError, UsageError
from ragkv.index.mode import refusal
from ragkv.retrievers import (
    Hit,
    colbert_scores,
    fuse,
    normalise_rerank,
    normalise_retrieval,
    reciprocal_rank_fusion,
    relative_score_fusion,
)
from ragkv.types import Chunk, Document, ScoredChunk

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ragkv.retrievers import BM25, Embedder, Embedding, Reranker, ScoreKind, VectorIndex
    from ragkv.retrievers.roster import KeySet

__all__ = ["Found", "Retrieval", "SearchSettings", "Searcher", "search_settings"]

_FUSIONS: Mapping[Fusion, Callable[[Sequence[Sequence[Hit]]], list[Hit]]] = {
    "relative": relative_score_fusion,
    "rrf": reciprocal_rank_fusion,
}


class Retrieval(TypedDict, total=False):
    """What a question may set for its retrieval. A value that is missing or None is that of `ragkv.toml`.

    `search_for` is the text to search for instead of the question: a follow-up question may not name its subject.
    `only` decides whether a chunk of a document may be found. Like `where`, it applies before the best are taken.
    """

    retrieval: str | None
    rerank: bool | None
    candidates: int | None
    where: Sequence[str]
    search_for: str | None
    only: Callable[[Document, Chunk], bool] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """How one question searches, with all defaults filled in."""

    mode: Mode
    top_k: int
    candidates: int
    rerank: bool
    where: tuple[str, ...] = ()
    search_for: str | None = None
    only: Callable[[Document, Chunk], bool] | None = None


def search_settings(config: IndexConfig, top_k: int, **asked: Unpack[Retrieval]) -> SearchSettings:
    """The settings that a question asks for, completed from the index's configuration. UsageError for bad values."""
    retrieval, rerank, candidates = asked.get("retrieval"), asked.get("rerank"), asked.get("candidates")
    if top_k < 1:
        raise UsageError(f"--top-k must be at least 1, not {top_k}.")
    if candidates is not None and candidates < 1:
        raise UsageError(f"--candidates must be at least 1, not {candidates}.")
    if retrieval is not None and retrieval not in MODES:
        raise UsageError(f"--retrieval must be one of {', '.join(MODES)}, not {retrieval!r}.")
    return SearchSettings(
        mode=retrieval or config.retrieval,
        top_k=top_k,
        candidates=candidates or config.candidates,
        rerank=config.rerank and config.reranker != NONE if rerank is None else rerank,
        where=tuple(asked.get("where") or ()),
        search_for=asked.get("search_for"),
        only=asked.get("only"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A chunk with the scores of every stage.

    `stages` holds the raw scores by stage: dense, sparse, colbert, bm25, relative, rrf. `retrieval_score` is the one
    from which `score` was computed (PCED Eqs. 4-7), on the scale `score_kind`.
    """

    chunk_id: str
    stages: Mapping[str, float]
    retrieval_score: float
    score_kind: ScoreKind
    rerank_score: float | None = None
    score: float = field(default=0.0)

    def scored(self, chunk: Chunk, source: str) -> ScoredChunk:
        """The chunk that it is about, of the document called `source`, with these scores."""
        return ScoredChunk(
            chunk=chunk,
            source=source,
            retrieval_score=self.retrieval_score,
            rerank_score=self.rerank_score,
            score=self.score,
            stages=self.stages,
        )


class Searcher:
    """Searches one set of chunks; threads may share one.

    `indexes` holds the vectors by kind, `bm25` the words; `fusion` is how hybrid merges two rankings. `texts` and
    `colbert` return the texts and ColBERT vectors of chunks by id, without those of deleted chunks. If a mode needs
    something that is missing, the search raises.
    """

    def __init__(
        self,
        *,
        embedder: Embedder | None,
        indexes: Mapping[ScoreKind, VectorIndex[Any]],
        bm25: BM25 | None,
        texts: Callable[[Sequence[str]], Mapping[str, str]],
        colbert: Callable[[Sequence[str]], Mapping[str, NDArray[np.floating[Any]]]],
        reranker: Reranker | None,
        fusion: Fusion = "relative",
    ) -> None:
        self._embedder = embedder
        self._fusion = fusion
        self._indexes = indexes
        self._bm25 = bm25
        self._texts = texts
        self._colbert = colbert
        self._reranker = reranker

    def candidates(
        self, question: str, *, mode: Mode, count: int, pool: int = 0, among: Collection[str] | KeySet | None = None
    ) -> list[Found]:
        """The best `count` chunks of a mode, best first, scored without the reranker.

        ColBERT and hybrid choose them among the best `pool` (at least `count`) of each index that they search.
        """
        if mode not in MODES:
            raise UsageError(f"--retrieval must be one of {', '.join(MODES)}, not {mode!r}.")
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}")
        if mode == "bm25":
            return [_found(hit.chunk_id, {"bm25": hit.score}, "bm25") for hit in self._bm(question, count, among)]
        query = self._embed(question, mode)
        if mode == "dense" or mode == "sparse":
            return [_found(hit.chunk_id, {mode: hit.score}, mode) for hit in self._hits(mode, query, count, among)]
        pool = max(count, pool)
        if mode == "colbert":
            return self._late(query, self._hits("dense", query, pool, among))[:count]
        return self._hybrid(question, query, pool, among)[:count]

    def rerank(self, question: str, found: Sequence[Found]) -> list[Found]:
        """The same chunks with the reranker's logit in their score, best first, without deleted ones."""
        if self._reranker is None:
            raise RetrievalError("This index has no reranker: set `reranker` in its ragkv.toml, or use --no-rerank.")
        texts = self._texts([each.chunk_id for each in found])
        there = [each for each in found if each.chunk_id in texts]
        logits = self._reranker.score(question, [texts[each.chunk_id] for each in there])
        judged = [
            replace(each, rerank_score=logit, score=_relevance(each.retrieval_score, each.score_kind, logit))
            for each, logit in zip(there, logits, strict=True)
        ]
        return sorted(judged, key=lambda each: (-each.score, each.chunk_id))

    def search(
        self,
        question: str,
        *,
        mode: Mode,
        top_k: int,
        candidates: int,
        rerank: bool,
        among: Collection[str] | KeySet | None = None,
    ) -> list[Found]:
        """The best `top_k`, best first: with `rerank`, the best by the fused score of `candidates`."""
        pool = max(top_k, candidates)
        found = self.candidates(question, mode=mode, count=pool if rerank else top_k, pool=pool, among=among)
        return self.rerank(question, found)[:top_k] if rerank else found

    def _embed(self, question: str, mode: Mode) -> Embedding:
        if self._embedder is None:
            raise RetrievalError(f"--retrieval {mode} needs an embedder, and this index has none; use bm25.")
        if why := refusal(mode, self._embedder.modes, f"Embedder {self._embedder.name!r}"):
            raise RetrievalError(why)
        return self._embedder.embed_query(question)

    def _hits(self, kind: ScoreKind, query: Embedding, count: int, among: Collection[str] | KeySet | None) -> list[Hit]:
        index = self._indexes.get(kind)
        if index is None:
            raise RetrievalError(f"There is no index of {kind} vectors of these chunks.")
        vector = query.dense[0] if kind == "dense" else query.sparse[0]  # type: ignore[index]
        return index.search(vector, count, among=among)

    def _bm(self, question: str, count: int, among: Collection[str] | KeySet | None) -> list[Hit]:
        if self._bm25 is None:
            raise RetrievalError("There is no BM25 index of these chunks.")
        return self._bm25.search(question, count, among=among)

    def _late(self, query: Embedding, hits: Sequence[Hit]) -> list[Found]:
        """Score the candidates by late interaction (ColBERT). A candidate without vectors was deleted meanwhile."""
        assert query.colbert is not None
        vectors = self._colbert([hit.chunk_id for hit in hits])
        there = [hit for hit in hits if hit.chunk_id in vectors]
        scores = colbert_scores(query.colbert[0], [vectors[hit.chunk_id] for hit in there])
        return self._judged_late(there, {hit.chunk_id: float(score) for hit, score in zip(there, scores, strict=True)})

    def _judged_late(self, hits: Sequence[Hit], scores: Mapping[str, float]) -> list[Found]:
        """The hits that have a ColBERT score, best first."""
        found = [
            _found(hit.chunk_id, {"dense": hit.score, "colbert": scores[hit.chunk_id]}, "colbert")
            for hit in hits
            if hit.chunk_id in scores
        ]
        return sorted(found, key=lambda each: (-each.retrieval_score, each.chunk_id))

    def _hybrid(
        self, question: str, query: Embedding, count: int, among: Collection[str] | KeySet | None
    ) -> list[Found]:
        """Merge the dense list with the sparse one, or with BM25's where there are no sparse vectors.

        The score is the dense one, as every chunk has it.
        """
        words = "sparse" if "sparse" in self._indexes else "bm25"
        dense = self._hits("dense", query, count, among)
        lexical = self._hits("sparse", query, count, among) if words == "sparse" else self._bm(question, count, among)
        merged = _FUSIONS[self._fusion]([dense, lexical])[:count]
        cosine = {hit.chunk_id: hit.score for hit in dense}
        if lacking := {hit.chunk_id for hit in merged} - cosine.keys():
            more = self._hits("dense", query, len(lacking), lacking)
            cosine |= {hit.chunk_id: hit.score for hit in more}
        weights = {hit.chunk_id: hit.score for hit in lexical}
        found = []
        for hit in merged:
            stages = {self._fusion: hit.score, "dense": cosine.get(hit.chunk_id, 0.0)}
            if hit.chunk_id in weights:
                stages[words] = weights[hit.chunk_id]
            found.append(_found(hit.chunk_id, stages, "dense"))
        return found


def _found(chunk_id: str, stages: Mapping[str, float], stage: str) -> Found:
    kind: ScoreKind = "sparse" if stage == "bm25" else stage  # type: ignore[assignment]
    score = stages[stage]
    return Found(
        chunk_id=chunk_id,
        stages=stages,
        retrieval_score=score,
        score_kind=kind,
        score=_relevance(score, kind, None),
    )


def _relevance(score: float, kind: ScoreKind, logit: float | None) -> float:
    """r of PCED Eqs. 4-7."""
    return fuse(normalise_retrieval(score, kind), None if logit is None else normalise_rerank(logit))
