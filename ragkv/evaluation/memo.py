"""Embedders and rerankers that compute once what several modes of retrieval ask of them.

They remember only the last question, because `measure` asks all searches one question before the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragkv.retrievers import Embedder, Embedding, Reranker, ScoreKind

__all__ = ["MemoEmbedder", "MemoReranker"]


class MemoEmbedder:
    """An `Embedder` that embeds consecutive equal questions once."""

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
    """A `Reranker` that scores each pair of question and text once.

    The last bits of a logit depend on the other texts of its batch, so they may differ from those without the memo.
    """

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
