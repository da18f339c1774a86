"""An answer on its way: retrieve, load, decode, and account for all of it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Self

from ragkv.errors import StoreError
from ragkv.index.ground import Ground
from ragkv.index.recall import After, Ahead
from ragkv.index.task import Task
from ragkv.types import Answer, KVUse, ScoredChunk, Source, Timing, TracedToken

if TYPE_CHECKING:
    from ragkv.runtime import Job, Lease, Runtime, Token

__all__ = ["AnswerStream"]


class AnswerStream:
    """An answer on its way: iterate once over its text; `answer` is complete when the iteration ends.

    Retrieval and loading happen at the first step. `warning` is the engine's, to be shown before the text. Any
    thread may `cancel` it; the text that was given out until then is the answer, with `finish_reason` "cancelled".

    Whoever leads many answers at once does not iterate: `begin`, then `collect` after each step of the runtime
    (`ragkv.index.many`).
    """

    def __init__(self, ground: Ground, task: Task) -> None:
        self.question = task.question
        self.tokens = 0
        """How many were generated so far."""
        self.prompt_tokens = 0
        """How many the prompt has: prefix, chunks and question; known once the answer has begun."""
        self.trace: list[TracedToken] = []
        """The tokens so far; only ever appended to, by the iterating thread."""
        self.when_found: Callable[[], object] = lambda: None
        """Called once by the iterating thread, when the chunks are found and `sources` has them."""
        self._ground = ground
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
        self._after: After = []
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
        self._store()

    @property
    def answer(self) -> Answer:
        """The finished answer, or the one so far of a cancelled stream; ValueError before either."""
        if self._answer is not None:
            return self._answer
        if not self._cancelled.is_set():
            raise ValueError("the answer is not finished: iterate over the stream first, or cancel it")
        return self._so_far()

    @property
    def sources(self) -> tuple[Source, ...]:
        """The chunks that the answer is made from, best first, with the tokens that each has won so far; none before
        they are found."""
        counts = self._task.engine.counts_winners
        sources = [_source(s, self._won[i] if counts else None) for i, s in enumerate(self._scored)]
        return tuple(reversed(sources))

    @property
    def warning(self) -> str | None:
        """What to know before trusting this engine with this model; loads the model.

        None for an engine that cannot run on it: that is an error when the answer begins.
        """
        from ragkv.engines import refusal

        if refusal(self._task.engine, self._ground.model) is not None:
            return None
        return self._task.engine.warning(self._ground.model)

    def begin(self, *, wait: bool = True) -> bool:
        """Find the chunks, load their KV and give the question to the runtime; True when that is done.

        Without `wait` it is False while others hold so much KV that there is no room for this: nothing is held
        meanwhile, and a later call goes on with the chunks that were found.
        """
        if self._cancelled.is_set():
            return True
        with self._told_of_closing():
            ahead = None if self._scored else self._retrieve()
            return self._submit(ahead, wait=wait)

    def wait(self) -> None:
        """Return when there is something to `collect`, driving the runtime if nobody does."""
        if self._runtime is not None and self._job is not None:
            self._runtime.wait(self._job)

    def collect(self) -> bool:
        """Take in the tokens that have come, without waiting; True when it is complete. Raises what ended it."""
        if self._runtime is not None and self._job is not None:
            tokens, ended = self._runtime.taken(self._job)
            for token in tokens:
                self._count(token)
            if not ended:
                return False
        self._store()
        self._ground.ended()
        self._answer = self._so_far()
        return True

    def _run(self) -> Generator[str]:
        try:
            if self.begin() and self._runtime is not None and self._job is not None:
                for token in self._runtime.tokens(self._job):
                    if self._cancelled.is_set():
                        break
                    if text := self._count(token):
                        yield text
        except GeneratorExit:
            self._answer = self._so_far()
            raise
        finally:
            if self._runtime is not None and self._job is not None:
                self._runtime.cancel(self._job)
            self._store()
            self._ground.ended()
        self._answer = self._so_far()

    @contextmanager
    def _told_of_closing(self) -> Iterator[None]:
        """An error of a store that was closed under way is AnswerInterruptedError: it could not say what happened."""
        begun_open = not self._ground.closed
        try:
            yield
        except StoreError:
            if begun_open:
                self._ground.require_open()
            raise

    def _retrieve(self) -> Ahead | None:
        """Find the chunks; the likely winners' KV is loaded while the reranker works."""
        ground, task, engine = self._ground, self._task, self._task.engine
        ground.require(task)
        self._runtime = ground.runtime
        self._mark("started")
        ahead: Ahead | None = None

        def begin(likely: list[ScoredChunk]) -> None:
            nonlocal ahead
            self._mark("retrieved")
            if task.search.rerank:
                encoding = None if engine.whole_documents else engine.encoding
                ahead = ground.ahead(encoding, likely[: engine.most_chunks])

        try:
            scored = ground.find(task, begin)[: engine.most_chunks]
        except BaseException:
            if ahead is not None:
                ahead.drop()
            raise
        self._mark("retrieved")
        scored.reverse()  # ascending relevance: the best chunk stands next to the question
        self._scored = scored
        self._mark("reranked")
        self.when_found()
        return ahead

    def _submit(self, ahead: Ahead | None, *, wait: bool) -> bool:
        """Lease the KV, load it and give the question to the runtime; False without a lease."""
        ground, task, runtime = self._ground, self._task, self._ground.runtime
        lease: Lease | None = None
        try:
            sizes = ground.sizes(task.engine.encoding, self._scored, whole=task.engine.whole_documents)
            if wait:
                lease = runtime.lease(sizes, owner=ground.owner, cancelled=self._cancelled.is_set)
            else:
                lease = runtime.try_lease(sizes, owner=ground.owner)
            if lease is None:
                return False
            request, self._use = ground.request(task, self._scored, ahead, self._after)
            self.prompt_tokens = request.tokens
            self._mark("loaded")
            self._job = runtime.submit(task.engine, request, task.generation, owner=ground.owner, lease=lease)
            lease = None  # the job's own now
        finally:
            if ahead is not None:
                ahead.drop()  # the losers' KV
            if lease is not None:
                runtime.release(lease)
        if self._cancelled.is_set():  # perhaps before there was a job to tell
            runtime.cancel(self._job)
        return True

    def _count(self, token: Token) -> str:
        """Take in one token: the text that it adds."""
        self._mark("first")
        self._store()
        self.tokens += 1
        source = None
        if token.winner is not None:
            self._won[token.winner] += 1
            source = len(self._scored) - 1 - token.winner  # the prompt has the best chunk last
        self.trace.append(TracedToken(token_id=token.token_id, text=token.text, source=source))
        self._finish = token.finish_reason
        self._text += token.text
        return token.text

    def _store(self) -> None:
        """What was encoded for the question is stored when the first token is there, or will never come."""
        if self._after:
            self._ground.store(self._after)

    def _mark(self, stage: str) -> None:
        self._times.setdefault(stage, time.perf_counter())

    def _so_far(self) -> Answer:
        """The answer as it stands now; without its last token it was cancelled."""
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
            sources=self.sources,
            timing=Timing(
                retrieve=_ms(started, retrieved),
                rerank=_ms(retrieved, reranked),
                load=_ms(reranked, loaded),
                first_token=_ms(loaded, self._times.get("first", ended)),
                total=_ms(started, ended),
            ),
            kv=self._use,
            decoding={"max_new_tokens": self._task.max_new_tokens, **asdict(self._task.decoding)},
            trace=tuple(self.trace),
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
