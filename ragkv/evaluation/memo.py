"""Embedders and rerankers that are asked the same by every mode of retrieval, and compute it once.

Only the last question is remembered: `measure` puts one question to all searches before the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragkv.retrievers import Embedder, Embedding, Reranker, ScoreKind

__all__ = ["MemoEmbedder", "MemoReranker"]


class MemoEmbedder:
    """An `Embedder` that embeds a question once."""

    def __init__(self, embedder: Embedder) -> None:
        self.name = embedder.name
        self.modes: frozenset[ScoreKind] = embedder.modes
        self.fingerprint = embedder.fingerprint
        self._embedder = embedder
        self._last: tuple[str, Embedding] | None = None

    def embed_documents(self, texts: Sequence[str]) -> Embedding:
        return self._embedder.embed_documents(texts)

    def embed_query(self, text: str) -> Embedding:
        last = self._last
        if last is None or last[0] != text:
            self._last = last = (text, self._embedder.embed_query(text))
        return last[1]


class MemoReranker:
    """A `Reranker` that judges a question and a text once. A logit differs in its last bits from one that was
    computed beside other texts."""

    def __init__(self, reranker: Reranker) -> None:
        self.name = reranker.name
        self._reranker = reranker
        self._question: str | None = None
        self._known: dict[str, float] = {}

    def score(self, question: str, texts: Sequence[str]) -> list[float]:
        if question != self._question:
            self._question, self._known = question, {}
        new = list(dict.fromkeys(text for text in texts if text not in self._known))
        self._known |= dict(zip(new, self._reranker.score(question, new), strict=True))
        return [self._known[text] for text in texts]
