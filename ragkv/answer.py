"""An answer on its way: retrieve, load, decode, and account for all of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ragkv.errors import RetrievalError
from ragkv.types import Answer, ScoredChunk, Source, Timing

if TYPE_CHECKING:
    from ragkv.engines import Engine
    from ragkv.pipeline import RagKV

__all__ = ["AnswerStream"]


class AnswerStream:
    """An answer on its way: iterate once over its text; `answer` is complete when the iteration ends.

    Retrieval and loading happen at the first step. `warning` is the engine's, to be shown before the text.
    """

    def __init__(self, rag: RagKV, question: str, engine: Engine, top_k: int, max_new_tokens: int) -> None:
        self.question = question
        self._rag = rag
        self._engine = engine
        self._top_k = top_k
        self._max_new_tokens = max_new_tokens
        self._answer: Answer | None = None
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    @property
    def answer(self) -> Answer:
        """The finished answer; ValueError before the text was read to its end."""
        if self._answer is None:
            raise ValueError("the answer is not finished: iterate over the stream first")
        return self._answer

    @property
    def warning(self) -> str | None:
        """What to know before trusting this engine with this model; loads the model."""
        return self._engine.warning(self._rag.model)

    def _run(self) -> Iterator[str]:
        from ragkv.engines import decode

        rag, engine = self._rag, self._engine
        rag.require_same_model()
        model = rag.model  # loading it is not part of answering
        started = time.perf_counter()
        scored = rag.retrieve(self.question, top_k=self._top_k)
        if not scored:
            raise RetrievalError("No chunk of the index matches the question; ask with words that the documents use.")
        scored.reverse()  # ascending relevance: the best chunk stands next to the question
        retrieved = time.perf_counter()
        request, use = rag.request(engine, self.question, scored)
        loaded = time.perf_counter()
        stream = engine.start(model, request)
        text, finish, won = "", "stop", [0] * len(scored)
        first: float | None = None
        for token in decode(model, stream, max_new_tokens=self._max_new_tokens):
            first = first or time.perf_counter()
            if token.winner is not None:
                won[token.winner] += 1
            finish = token.finish_reason or finish
            if token.text:
                text += token.text
                yield token.text
        ended = time.perf_counter()
        self._answer = Answer(
            question=self.question,
            text=text.strip(),
            engine=engine.name,
            finish_reason=finish,
            sources=tuple(_source(s, w if engine.counts_winners else None) for s, w in zip(scored, won, strict=True))[
                ::-1
            ],
            timing=Timing(
                retrieve=_ms(started, retrieved),
                rerank=0.0,
                load=_ms(retrieved, loaded),
                first_token=_ms(loaded, first or ended),
                total=_ms(started, ended),
            ),
            kv=use,
        )


def _source(scored: ScoredChunk, won: int | None) -> Source:
    return Source(
        document=scored.source,
        chunk_id=scored.chunk.chunk_id,
        text=scored.chunk.text,
        page=scored.chunk.page,
        score=scored.score,
        retrieval_score=scored.retrieval_score,
        rerank_score=scored.rerank_score,
        tokens_won=won,
    )


def _ms(start: float, end: float) -> float:
    return round((end - start) * 1000, 3)
