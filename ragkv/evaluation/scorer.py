"""Score given chunks by their relevance to a question, as a pipeline would, but without an index."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from ragkv.config import Mode
from ragkv.errors import UsageError
from ragkv.evaluation.answerer import GIVEN
from ragkv.evaluation.memo import MemoEmbedder, MemoReranker
from ragkv.evaluation.searcher import build_searcher
from ragkv.index.mode import indexes_of, kinds_of, useful_kinds
from ragkv.index.search import Searcher
from ragkv.retrievers import (
    Embedder,
    Embedding,
    Reranker,
    ScoreKind,
    embedder_fingerprint,
    load_embedder,
    load_reranker,
    reranker_fingerprint,
)

__all__ = ["Ranked", "Scorer"]

Ranked = list[tuple[int, float]]
"""Pairs of (index of the chunk, relevance r in [0, 1)) in ascending relevance; the last chunk is read last."""

_EQUAL = 1.0 - 1e-8  # r of chunks without a score: the greatest r, with a logarithm of almost 0


@dataclass(slots=True)
class _Over:
    """The embedding and indexes of the chunks that were ranked last; the next question often has the same chunks."""

    chunks: tuple[str, ...]
    embedding: Embedding | None = None
    searchers: dict[Mode, Searcher] = field(default_factory=dict)


class Scorer:
    """Ranks the chunks of one question. Models are loaded when a mode first needs them.

    A chunk that the mode does not find (BM25: no common word) comes first with r = 0, so that every engine reads the
    same number of chunks. Rankings are remembered, and an index is reused while consecutive questions have the same
    chunks.
    """

    def __init__(self, *, embedder: str | None = None, reranker: str | None = None, device: str | None = None) -> None:
        self._names = (embedder, reranker)
        self._device = device
        self._embedder: Embedder | None = None
        self._reranker: Reranker | None = None
        self._known: dict[tuple[str, tuple[str, ...], str, bool], Ranked] = {}
        self._facts: dict[tuple[str, bool], dict[str, Any]] = {}
        self._over = _Over(chunks=())

    def check(self, mode: str, *, rerank: bool) -> None:
        """Raise UsageError if the embedder or reranker that a mode needs was not named."""
        embedder, reranker = self._names
        if mode != GIVEN and kinds_of(cast("Mode", mode)) and embedder is None:
            raise UsageError(f"--retrieval {mode} needs an embedder: give --embedder mini, a folder or a hub id.")
        if rerank and reranker is None:
            raise UsageError("--rerank needs a reranker: give --reranker mini, a folder or a hub id.")

    def facts(self, mode: str, *, rerank: bool) -> dict[str, Any]:
        """What a ranking depends on besides question and chunks, without loading a model."""
        if (mode, rerank) not in self._facts:
            self.check(mode, rerank=rerank)
            embedder, reranker = self._names
            vectors = mode != GIVEN and kinds_of(cast("Mode", mode))
            self._facts[mode, rerank] = {
                "mode": mode,
                "embedder": embedder_fingerprint(str(embedder)) if vectors else None,
                "reranker": reranker_fingerprint(str(reranker)) if rerank else None,
            }
        return self._facts[mode, rerank]

    def rank(self, question: str, chunks: tuple[str, ...], mode: str, *, rerank: bool) -> Ranked:
        """Every chunk with its r by PCED Eqs. 4-7. `given` keeps the order, with the same r for all."""
        if mode == GIVEN:
            return [(index, _EQUAL) for index in range(len(chunks))]
        key = (question, chunks, mode, rerank)
        if key not in self._known:
            self._known[key] = self._ranked(question, chunks, cast("Mode", mode), rerank=rerank)
        return self._known[key]

    def _ranked(self, question: str, chunks: tuple[str, ...], mode: Mode, *, rerank: bool) -> Ranked:
        self.check(mode, rerank=rerank)
        if not chunks:
            return []
        found = self._searcher(chunks, mode, rerank=rerank).search(
            question, mode=mode, top_k=len(chunks), candidates=len(chunks), rerank=rerank
        )
        best = [(int(each.chunk_id), each.score) for each in found]
        missed = sorted(set(range(len(chunks))) - {index for index, _ in best})
        return [(index, 0.0) for index in missed] + best[::-1]

    def _searcher(self, chunks: tuple[str, ...], mode: Mode, *, rerank: bool) -> Searcher:
        if rerank and self._reranker is None:
            self._reranker = MemoReranker(load_reranker(str(self._names[1]), device=self._place))
            self._over.searchers.clear()  # they were built without it
        if self._over.chunks != chunks:
            self._over = _Over(chunks=chunks)
        if mode not in self._over.searchers:
            self._over.searchers[mode] = self._index(self._over, mode)
        return self._over.searchers[mode]

    def _index(self, over: _Over, mode: Mode) -> Searcher:
        """The pipeline's own search over these chunks. Ids are the positions, so that ties keep the order."""
        ids = [f"{index:06d}" for index in range(len(over.chunks))]
        texts = dict(zip(ids, over.chunks, strict=True))
        found: dict[ScoreKind, dict[str, Any]] = {}
        if mode != "bm25":
            embedder = self._load_embedder()
            if over.embedding is None:
                over.embedding = embedder.embed_documents(over.chunks)
            for kind in useful_kinds(mode):
                if (vectors := getattr(over.embedding, kind)) is not None:
                    found[kind] = dict(zip(ids, vectors, strict=True))
        rows = found.pop("colbert", {})
        return build_searcher(
            texts,
            vectors={kind: vectors.items() for kind, vectors in found.items()},
            colbert=lambda wanted: {name: rows[name] for name in wanted},
            bm25="bm25" in indexes_of(mode, found),
            embedder=self._embedder,
            reranker=self._reranker,
        )

    def _load_embedder(self) -> Embedder:
        if self._embedder is None:
            self._embedder = MemoEmbedder(load_embedder(str(self._names[0]), device=self._place))
        return self._embedder

    @property
    def _place(self) -> str:
        from ragkv.model.language import pick_device

        return str(pick_device(self._device))
