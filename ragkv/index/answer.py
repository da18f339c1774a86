"""An answer on its way: retrieve, load, decode, and account for all of it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Self

from ragkv.errors import RetrievalError, StoreError
from ragkv.index.finder import Finder
from ragkv.index.index import Index
from ragkv.index.recall import Ahead, Recall
from ragkv.index.task import Task
from ragkv.types import Answer, KVUse, ScoredChunk, Source, Timing

if TYPE_CHECKING:
    from ragkv.engines import Request
    from ragkv.runtime import Job, Lease, Runtime

__all__ = ["AnswerStream"]


class AnswerStream:
    """An answer on its way: iterate once over its text; `answer` is complete when the iteration ends.

    Retrieval and loading happen at the first step. `warning` is the engine's, to be shown before the text. Any
    thread may `cancel` it; the text that was given out until then is the answer, with `finish_reason` "cancelled".
    """

    def __init__(self, index: Index, finder: Finder, recall: Recall, task: Task) -> None:
        self.question = task.question
        self.index = index
        self._finder = finder
        self._recall = recall
        self._task = task
        self._cancelled = threading.Event()
        self._answer: Answer | None = None
        # what is known so far; written by the iterating thread alone
        self._text = ""
        self._scored: list[ScoredChunk] = []
        self._won: Counter[int] = Counter()
        self._use = KVUse(hits=0, misses=0, bytes=0, tokens=0)
        self._times: dict[str, float] = {}
        self._finish: str | None = None
        self._runtime: Runtime | None = None
        self._job: Job | None = None
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cancel(self) -> None:
        """End the iteration at the next token, from any thread; nothing happens to a finished answer."""
        self._cancelled.set()
        if self._runtime is not None:
            if self._job is not None:
                self._runtime.cancel(self._job)
            self._runtime.nudge()

    def close(self) -> None:
        """Cancel and end the iteration now; for the thread that iterates."""
        self.cancel()
        self._pieces.close()

    @property
    def answer(self) -> Answer:
        """The finished answer, or the one so far of a cancelled stream; ValueError before either."""
        if self._answer is not None:
            return self._answer
        if not self._cancelled.is_set():
            raise ValueError("the answer is not finished: iterate over the stream first, or cancel it")
        return self._so_far()

    @property
    def warning(self) -> str | None:
        """What to know before trusting this engine with this model; loads the model."""
        return self._task.engine.warning(self.index.model)

    def _run(self) -> Generator[str]:
        try:
            yield from self._decode()
        except GeneratorExit:
            self._answer = self._so_far()
            raise
        self._answer = self._so_far()

    def _decode(self) -> Iterator[str]:
        if self._cancelled.is_set():
            return
        begun_open = not self.index.closed
        try:
            yield from self._tokens()
        except StoreError:
            if begun_open:  # closed under way: the store could not say what it was closed for
                self.index.require_open()
            raise

    def _tokens(self) -> Iterator[str]:
        index = self.index
        index.require_same_model()
        runtime = self._runtime = index.runtime  # loading models is not part of answering
        if self._task.chunks is None:
            index.encoders.load(embedder=self._task.search.mode != "bm25", reranker=self._task.search.rerank)
        self._mark("started")
        lease: Lease | None = None
        try:
            ahead = self._retrieve()
            try:
                sizes = self._recall.sizes(self._task.engine.encoding, self._scored)
                lease = runtime.lease(sizes, owner=index, cancelled=self._cancelled.is_set)
                if lease is None:
                    return
                request = self._load(ahead)
            finally:
                if ahead is not None:
                    ahead.drop()  # the losers' KV
            self._job = runtime.submit(self._task.engine, request, self._task.generation, owner=index, lease=lease)
            lease = None  # the job's own now
            del request  # the engine keeps what it reads; the rest need not outlive the question
            for token in runtime.tokens(self._job):
                if self._cancelled.is_set():  # perhaps before there was a job to tell
                    return
                self._mark("first")
                if token.winner is not None:
                    self._won[token.winner] += 1
                self._finish = token.finish_reason
                if token.text:
                    self._text += token.text
                    yield token.text
        finally:
            if lease is not None:
                runtime.release(lease)
            if self._job is not None:
                runtime.cancel(self._job)

    def _retrieve(self) -> Ahead | None:
        """Find the chunks; the likely winners' KV is loaded while the reranker works."""
        task, engine = self._task, self._task.engine
        ahead: Ahead | None = None

        def begin(likely: list[ScoredChunk]) -> None:
            nonlocal ahead
            self._mark("retrieved")
            if task.search.rerank:
                ahead = self._recall.ahead(engine.encoding, likely[: engine.most_chunks])

        try:
            if task.chunks is None:
                scored = self._finder.find(task.question, task.search, on_candidates=begin)
            else:
                scored = list(task.chunks)
                self._mark("retrieved")
            scored = scored[: engine.most_chunks]
            if not scored:
                raise RetrievalError(
                    f"The index at {self.index.folder} holds no document yet; add some with: ragkv ingest PATH"
                    if self.index.store.empty
                    else "No chunk of the index matches the question; ask with words that the documents use."
                )
        except BaseException:
            if ahead is not None:
                ahead.drop()
            raise
        scored.reverse()  # ascending relevance: the best chunk stands next to the question
        self._scored = scored
        self._mark("reranked")
        return ahead

    def _load(self, ahead: Ahead | None) -> Request:
        task = self._task
        request, self._use = self._recall.request(task.engine, task.question, self._scored, ahead, keep=task.keep)
        self._mark("loaded")
        return request

    def _mark(self, stage: str) -> None:
        self._times.setdefault(stage, time.perf_counter())

    def _so_far(self) -> Answer:
        """The answer as it stands now; without its last token it was cancelled."""
        counts = self._task.engine.counts_winners
        sources = [_source(s, self._won[i] if counts else None) for i, s in enumerate(self._scored)]
        ended = time.perf_counter()
        started = self._times.get("started", ended)
        retrieved = self._times.get("retrieved", ended)
        reranked = self._times.get("reranked", ended)
        loaded = self._times.get("loaded", ended)
        return Answer(
            question=self.question,
            text=self._text.strip(),
            engine=self._task.engine.name,
            finish_reason=self._finish or "cancelled",
            sources=tuple(reversed(sources)),
            timing=Timing(
                retrieve=_ms(started, retrieved),
                rerank=_ms(retrieved, reranked),
                load=_ms(reranked, loaded),
                first_token=_ms(loaded, self._times.get("first", ended)),
                total=_ms(started, ended),
            ),
            kv=self._use,
            decoding={"max_new_tokens": self._task.max_new_tokens, **asdict(self._task.decoding)},
        )


def _source(scored: ScoredChunk, won: int | None) -> Source:
    return Source(
        document=scored.source,
        chunk_id=scored.chunk.chunk_id,
        text=scored.chunk.text,
        page=scored.chunk.page,
        heading=scored.chunk.heading,
        score=scored.score,
        retrieval_score=scored.retrieval_score,
        rerank_score=scored.rerank_score,
        stages=scored.stages,
        tokens_won=won,
    )


def _ms(start: float, end: float) -> float:
    return round((end - start) * 1000, 3)
