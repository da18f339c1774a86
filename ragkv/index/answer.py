"""Answer one question: resolve all settings, retrieve, load KV, decode, and account for the answer.

A question is complete and validated before anything is loaded. An `AnswerBackend` provides the chunks, their KV and the
runtime, so that the same code answers from an index and from given texts.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from ragkv.config import IndexConfig, StepsConfig
from ragkv.decoding import GREEDY, Decoding
from ragkv.errors import NothingFoundError, StoreError
from ragkv.index.conversation import WrittenQueries, first_line, interleaved
from ragkv.index.index import Index
from ragkv.index.intent import MAX_SUMMARY_CHUNKS, QUESTION, SUMMARY_PARAMETERS, Intent, intent_of, outline, summarised
from ragkv.index.kv_source import After, KVSource, Prefetch, Reads
from ragkv.index.search import Finder
from ragkv.index.snippets import WordWeights, snippets
from ragkv.question import Question
from ragkv.types import Answer, Encoding, KVUse, ScoredChunk, Source, Timing, TracedToken, field_sources
from ragkv.util.telemetry import Span, span

if TYPE_CHECKING:
    from ragkv.engines import Engine, Request
    from ragkv.model.language_model import LanguageModel
    from ragkv.model.prompt import Prompt, Tokens
    from ragkv.runtime import Generation, Job, Lease, Runtime, Token


_UNSEARCHED = 0.5  # relevance of a chunk that no search has found


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTask:
    """A question with every option set, the engine that answers it, and how the model writes search queries."""

    query: Question
    engine: Engine
    decoding: Decoding
    writing: StepsConfig = field(default_factory=StepsConfig)
    intent: Intent = QUESTION

    def query_task(self, prompt: str, *, engine: Engine | None = None) -> AnswerTask:
        """The task of writing a search query: greedy, unconstrained and without thinking."""
        return replace(
            self,
            query=replace(
                self.query,
                question=prompt,
                max_new_tokens=self.writing.max_new_tokens,
                logits_processors=(),
                stopping_criteria=(),
                tail=None,
                system="",
            ),
            engine=engine or self.engine,
            decoding=GREEDY.settled(),
        )

    @property
    def generation(self) -> Generation:
        """The settings of sampling and of the answer's end."""
        from ragkv.runtime import Generation

        return Generation(
            max_new_tokens=self.query.max_new_tokens,
            decoding=self.decoding,
            processors=self.query.logits_processors,
            criteria=self.query.stopping_criteria,
            control=self.query.tail is not None and self.decoding.grammar is not None,
            after=self.query.prompt_ids[-8:],
        )

    def suffix_ids(self, prompt: Prompt, tokens: Tokens) -> tuple[int, ...]:
        """The prompt after the documents; for the model alone, the whole one."""
        query = self.query
        if query.prompt_ids:
            return tuple(query.prompt_ids)
        text = f"{query.system}\n\n{query.question}" if query.system else query.question
        ids = prompt.suffix_ids(tokens, text, query.tail, thinking=self.decoding.thinking != "off")
        return prompt.with_bos(tokens, ids) if self.alone else ids

    @property
    def alone(self) -> bool:
        """Whether the model is asked without documents and without the index's prompt."""
        query = self.query
        return query.chunks is not None and not query.chunks and (query.tail is not None or bool(query.prompt_ids))


def validate_task(config: IndexConfig, asked: str | Question | Mapping[str, Any], **common: Any) -> AnswerTask:
    """The task of a question (`Question.of`), completed from the index's configuration.

    Raises UsageError for an unknown option or engine, and for a bad setting.
    """
    from ragkv.engines import make_engine

    query = Question.of(asked, **common)
    decoding, query = query.decoding_settings(config), query.completed(config)
    engine = make_engine(query.engine, config.tuning, context=config.encoding.context)
    shaped = decoding.schema or decoding.regex or decoding.grammar or query.tail is not None
    free = query.chunks is None and query.only is None and not shaped
    intent = intent_of(query.message or query.question) if free else QUESTION
    return AnswerTask(query=query, engine=engine, decoding=decoding, writing=config.steps, intent=intent)


class AnswerOwner(Protocol):
    """The owner of an answer; closing it ends all of its answers (`Runtime.close`)."""

    @property
    def closed(self) -> bool: ...

    def require_open(self) -> None:
        """AnswerInterruptedError if it has been closed."""

    @property
    def model(self) -> LanguageModel:
        """The generation model, loaded at the first use."""


class AnswerBackend(Protocol):
    """Provides an `AnswerStream` with chunks, KV and the runtime. Chunks are best first in `find`, best last
    elsewhere."""

    @property
    def owner(self) -> AnswerOwner: ...

    @property
    def runtime(self) -> Runtime:
        """The runtime that answers the questions."""

    def require(self, task: AnswerTask) -> None:
        """Load the models, outside the timed answer, and check that they support the task."""

    def find(self, task: AnswerTask, on_candidates: Callable[[list[ScoredChunk]], None]) -> list[ScoredChunk]:
        """The chunks for a question; NothingFoundError if there are none."""

    def beginnings(self, task: AnswerTask) -> list[ScoredChunk]:
        """The first chunks of the documents that a summary is asked of; none if there is no such document."""

    def word_weights(self, words: Sequence[str]) -> Mapping[str, float]:
        """The rarity of words, for snippets (`WordWeights`)."""

    def plan(self, engine: Engine, scored: Sequence[ScoredChunk]) -> Reads:
        """What the engine reads for a question with these chunks."""

    def prefetch(self, engine: Engine, likely: Sequence[ScoredChunk]) -> Prefetch | None:
        """Begin to load these chunks' KV in the background."""

    def request(self, task: AnswerTask, reads: Reads, prefetch: Prefetch | None, after: After) -> tuple[Request, KVUse]:
        """The engine's request and its KV use; `after` collects the writes to do later."""

    def store(self, after: After) -> None:
        """Run the writes that `request` deferred; called after the first token."""

    def ended(self) -> None:
        """Called when an answer has ended."""


class IndexBackend:
    """Answers from an index: its documents are searched, its KV is stored."""

    def __init__(self, index: Index, finder: Finder, kv_source: KVSource) -> None:
        self.owner = self._index = index
        self._finder = finder
        self._kv_source = kv_source
        self.plan, self.prefetch = kv_source.plan, kv_source.prefetch
        self.word_weights = finder.word_weights

    @property
    def runtime(self) -> Runtime:
        return self._index.runtime

    def require(self, task: AnswerTask) -> None:
        from ragkv.engines import require_supported

        index = self._index
        index.require_same_model()
        require_supported(task.engine, index.model)  # before any KV is loaded or encoded
        if task.engine.reads is Encoding.CONTEXT:
            index.require_room_for_context()
        index.runtime.require(task.engine)
        if task.query.chunks is None or task.query.steps > 1:
            if task.query.retrieval != "bm25":
                _ = index.encoders.embedder
            if task.query.rerank:
                _ = index.encoders.reranker

    def find(self, task: AnswerTask, on_candidates: Callable[[list[ScoredChunk]], None]) -> list[ScoredChunk]:
        if task.alone:
            return []
        if task.query.chunks is not None:
            chunks = list(task.query.chunks)
        else:
            chunks = self._finder.find(task.query, on_candidates=on_candidates)
        if not chunks:
            raise NothingFoundError(
                f"The index at {self._index.folder} holds no document yet; add some with: ragkv ingest PATH"
                if self._index.store.empty
                else "No chunk of the index matches the question; ask with words that the documents use."
            )
        return chunks

    def beginnings(self, task: AnswerTask) -> list[ScoredChunk]:
        documents = self._finder.documents(task.query.where)
        chosen = [stored.document for stored in summarised(task.intent, documents, task.query.top_k)]
        return [
            ScoredChunk(chunk=chunk, source=document.source, retrieval_score=0.0, rerank_score=None, score=_UNSEARCHED)
            for document in chosen
            for chunk in islice(self._index.store.chunks(document.document_id), MAX_SUMMARY_CHUNKS)
        ]

    def request(self, task: AnswerTask, reads: Reads, prefetch: Prefetch | None, after: After) -> tuple[Request, KVUse]:
        ids = task.suffix_ids(self._index.prompt, self._index.model.tokens)
        if task.alone:
            from ragkv.engines import Request

            return Request(prefix_ids=(), chunks=(), suffix_ids=ids), KVUse()
        return self._kv_source.request(
            task.engine, reads, task.query.question, ids, prefetch=prefetch, keep=task.query.keep, after=after
        )

    def store(self, after: After) -> None:
        while after:
            self._index.write_behind.submit(after.pop(0))

    def ended(self) -> None:
        self._index.write_behind.settle()


class AnswerStream:
    """A running answer: iterate once over its text; `answer` is complete when the iteration ends.

    Retrieval and loading happen at the first step. Show the engine's `warning` before the text. Any thread may
    `cancel`; the answer is then the text so far, with `finish_reason` "cancelled".

    To run many answers at once, call `begin`, then `collect` after each step of the runtime (`ragkv.index.batch`).
    """

    def __init__(self, backend: AnswerBackend, task: AnswerTask) -> None:
        self.question = task.query.question
        self.tokens = 0
        """Generated tokens so far."""
        self.prompt_tokens = 0
        """Tokens of the prompt (prefix, chunks and question); known once the answer has begun."""
        self.reasoning = ""
        """The model's thinking so far; the iteration yields empty texts meanwhile."""
        self.trace: list[TracedToken] = []
        """The answer's tokens so far; append-only, by the iterating thread."""
        self.queries: list[str] = []
        """The search queries that the model has written so far; complete once there are `sources`."""
        self.when_found: Callable[[], object] = lambda: None
        """Called by the iterating thread for each of `queries`, and once `sources` has the chunks."""
        self._backend = backend
        self._task = task
        self._cancelled = threading.Event()
        self._answer: Answer | None = None
        # state so far, written only by the iterating thread
        self._text = ""
        self._scored: list[ScoredChunk] = []
        self._found = False
        self._won: Counter[int] = Counter()
        self._use = KVUse()
        self._charge: float | None = None
        self._dtype = ""
        self._times: dict[str, float] = {}
        self._finish: str | None = None
        self._runtime: Runtime | None = None
        self._job: Job | None = None
        self._limits: tuple[bool, int | None] = True, None
        """Whether `_go_on` waits for room, and how many tokens it takes."""
        self._after: After = []
        self._span: Span | None = None
        self._work = self._answering()
        self._deltas = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._deltas

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cancel(self) -> None:
        """End the iteration at the next token, from any thread; no effect on a finished answer."""
        self._cancelled.set()
        if self._runtime is not None:
            if self._job is not None:
                self._runtime.cancel(self._job)
            self._runtime.nudge()

    def close(self) -> None:
        """Cancel and end the iteration now; call it in the iterating thread."""
        self.cancel()
        self._deltas.close()
        self._work.close()
        self._end_span()

    @property
    def answer(self) -> Answer:
        """The finished answer, or the partial one of a cancelled stream; ValueError before either."""
        if self._answer is not None:
            return self._answer
        if not self._cancelled.is_set():
            raise ValueError("the answer is not finished: iterate over the stream first, or cancel it")
        return self._so_far()

    @property
    def sources(self) -> tuple[Source, ...]:
        """The answer's chunks, best first, with the tokens that each has won and the snippets for the answer so far;
        empty until all are found.
        """
        if not self._found:
            return ()
        query, counts = self._task.query, self._task.engine.counts_winners
        sources = sources_of(self._scored[::-1], query.searches[0], self._backend.word_weights, answer=self._text)
        won = [self._won[at] if counts else None for at in range(len(sources))][::-1]
        return tuple(replace(source, tokens_won=tokens) for source, tokens in zip(sources, won, strict=True))

    @property
    def warning(self) -> str | None:
        """A warning about this engine with this model, if any; loads the model.

        None for an engine that the model cannot run: that is an error when the answer begins.
        """
        from ragkv.engines import unsupported_reason

        if unsupported_reason(self._task.engine, self._backend.owner.model) is not None:
            return None
        return self._task.engine.warning(self._backend.owner.model)

    def begin(self, *, wait: bool = True) -> bool:
        """Find the chunks, load their KV and submit the question (or the model's first query) to the runtime; True once
        that is done.

        Without `wait` it returns False if there is no room for the KV beside that of other answers. It then holds no
        lease, and a later call continues with the chunks that were found.
        """
        return self._cancelled.is_set() or self._go_on(wait=wait) or self._job is not None

    def wait(self) -> None:
        """Wait until there is something to `collect`, driving the runtime if no other thread does."""
        if self._runtime is not None and self._job is not None:
            self._runtime.wait(self._job)
        elif not self._cancelled.is_set():
            self._go_on(wait=True)  # for room

    def collect(self) -> bool:
        """Take the available tokens without waiting; True when complete. Raises the answer's error."""
        return self._go_on(wait=False)

    def _run(self) -> Generator[str]:
        try:
            complete = self._go_on(wait=True)
            if self._text:  # a reply, without the model
                yield self._text
            while not complete:
                self.wait()
                shown, thought = len(self._text), len(self.reasoning)
                complete = self._go_on(wait=True, most=1)
                if len(self._text) > shown or len(self.reasoning) > thought:
                    yield self._text[shown:]
        except GeneratorExit:
            self._answer = self._so_far()
            raise
        except BaseException as error:
            self._end_span(error)
            raise
        finally:
            self._work.close()
            self._end_span()

    def _go_on(self, *, wait: bool, most: int | None = None) -> bool:
        """Answer up to where the runtime has to go on, taking at most `most` tokens; True when complete.

        With `wait`, wait for room for the KV. The StoreError of an index that was closed meanwhile becomes
        AnswerInterruptedError.
        """
        self._span = self._span or Span("ragkv.answer", {"gen_ai.operation.name": "chat"})
        self._limits = wait, most
        begun_open = not self._backend.owner.closed
        try:
            with self._span.current():
                complete = next(self._work, True) is True
        except BaseException as error:
            self._end_span(error)
            if isinstance(error, StoreError) and begun_open:
                self._backend.owner.require_open()
            raise
        if complete:
            self._answer = self._so_far()
            self._end_span()
        return complete

    def _answering(self) -> Generator[None]:
        """The whole answer; yields where the runtime has to go on."""
        from ragkv.engines import make_engine

        backend, task, query = self._backend, self._task, ""
        if self._cancelled.is_set():
            return
        try:
            if task.intent.reply:
                self._reply(task.intent.reply)
                return
            begun = backend.beginnings(task) if task.intent.name == "summary" else []
            if begun and backend.owner.model.parameters < SUMMARY_PARAMETERS:
                self._reply(outline(begun), begun)
                return
            if begun:
                task = replace(task, query=replace(task.query, chunks=self._opening(begun), steps=1, rewrite=None))
                self._task = task
            elif task.intent is not QUESTION:
                task = self._task = replace(task, intent=QUESTION)
            backend.require(task)
            self._runtime = backend.runtime
            self._mark("started")
            if task.query.rewrite is not None and task.query.chunks is None:
                rewriting = task.query_task(task.query.rewrite, engine=make_engine("full", {}))
                query = first_line((yield from self._written(rewriting, None)))
                if self._cancelled.is_set():
                    return
            searched = query or task.query.searches[0]
            steps = WrittenQueries(task.writing, task.query.question, searched, task.query.steps)
            more, prefetch = self._search(steps, query)
            while more:
                text, prefetch = (yield from self._written(task.query_task(steps.prompt), prefetch)), None
                if self._cancelled.is_set():
                    return
                if (following := steps.next(text)) is None:
                    break
                more, prefetch = self._search(steps, following)
            self._found = True
            self._mark("retrieved")
            self._mark("reranked")
            self.when_found()
            yield from self._decode(task, prefetch, self._count)
        finally:
            if self._runtime is not None and self._job is not None:
                self._runtime.cancel(self._job)
            self._store()
            backend.ended()

    def _opening(self, begun: Sequence[ScoredChunk]) -> list[ScoredChunk]:
        """As many chunks as a question reads, from the beginnings of these documents alike."""
        each: dict[str, list[ScoredChunk]] = {}
        for scored in begun:
            each.setdefault(scored.chunk.document_id, []).append(scored)
        return interleaved(list(each.values()), self._task.query.top_k, _chunk_id)

    def _reply(self, text: str, begun: Sequence[ScoredChunk] = ()) -> None:
        """Answer without the model."""
        self._mark("started")
        self._scored = self._opening(begun)[::-1]
        self._found = True
        for stage in ("retrieved", "reranked", "loaded", "first"):
            self._mark(stage)
        self.when_found()
        self.trace.append(TracedToken(token_id=-1, text=text))
        self._text, self._finish = text, "stop"

    def _written(self, task: AnswerTask, prefetch: Prefetch | None) -> Generator[None, None, str]:
        """A search query that the model writes: the text up to the end of its first line."""
        written = ""

        def take(token: Token) -> bool:
            nonlocal written
            written += token.text
            return "\n" in written.lstrip()

        yield from self._decode(task, prefetch, take)
        if self._runtime is not None and self._job is not None:
            self._runtime.cancel(self._job)
        self._job, self._times = None, {"started": self._times["started"]}
        return written

    def _search(self, steps: WrittenQueries, query: str) -> tuple[bool, Prefetch | None]:
        """Search for the question, or for a query of the model; returns whether another search may follow. Chunks come
        in ascending relevance, so the best one is next to the question.
        """
        task = self._task
        chunks, prefetch = list[ScoredChunk](), None
        if query:
            self.queries.append(query)
            self.when_found()
            with suppress(NothingFoundError):
                again = replace(task.query, search_for=query, chunks=None)
                chunks, prefetch = self._find(replace(task, query=again))
        if not chunks and not steps.rankings:
            chunks, prefetch = self._find(task)
        more = steps.found(chunks, _chunk_id)
        self._scored = steps.best(task.query.top_k, _chunk_id)[: task.engine.most_chunks][::-1]
        self._mark("retrieved")
        self._mark("reranked")
        return more, prefetch

    def _find(self, task: AnswerTask) -> tuple[list[ScoredChunk], Prefetch | None]:
        """The chunks for a search, best first; the likely winners' KV is loaded while the reranker works."""
        backend, engine = self._backend, task.engine
        prefetch: Prefetch | None = None

        def begin(likely: list[ScoredChunk]) -> None:
            nonlocal prefetch
            self._mark("retrieved")
            if task.query.rerank:
                prefetch = backend.prefetch(engine, likely[: engine.most_chunks])

        try:
            chunks = backend.find(task, begin)
        except BaseException:
            if prefetch is not None:
                prefetch.drop()
            raise
        return chunks, prefetch

    def _decode(
        self, task: AnswerTask, prefetch: Prefetch | None, take: Callable[[Token], bool | None]
    ) -> Generator[None]:
        """Submit a prompt and `take` its tokens, until it returns True, they end, or the answer is cancelled."""
        yield from self._submit(task, prefetch)
        ended = False
        while not ended:
            yield
            if self._cancelled.is_set():
                return
            assert self._runtime is not None
            assert self._job is not None
            tokens, ended = self._runtime.taken(self._job, most=self._limits[1])
            for token in tokens:
                ended = bool(take(token)) or ended
                self._store()
                self.tokens += 1

    def _submit(self, task: AnswerTask, prefetch: Prefetch | None) -> Generator[None]:
        """Lease room for the KV, load it and submit a prompt to the runtime; yields while there is no room."""
        backend, runtime = self._backend, self._backend.runtime
        lease: Lease | None = None
        try:
            reads = backend.plan(task.engine, self._scored)
            while (lease := self._lease(reads)) is None:
                if prefetch is not None:
                    prefetch.drop()  # no KV waits without a lease
                if self._cancelled.is_set():
                    return
                yield
            waited = 1000 * (time.perf_counter() - self._times.get("reranked", self._times["started"]))
            with span("ragkv.kv.load", {"ragkv.kv.waited_ms": waited}) as loading:
                request, use = backend.request(task, reads, prefetch, self._after)
                loading.note({f"ragkv.kv.{name}": value for name, value in asdict(use).items()})
            self._use += use
            self.prompt_tokens = request.tokens
            self._mark("loaded")
            self._job = runtime.submit(task.engine, request, task.generation, owner=backend.owner, lease=lease)
            lease = None  # now owned by the job
            self._charge = task.engine.charge(request, backend.owner.model)
            self._dtype = backend.owner.model.precision
        finally:
            if prefetch is not None:
                prefetch.drop()  # KV that was prefetched in vain
            if lease is not None:
                runtime.release(lease)
        if self._cancelled.is_set():  # it may have been cancelled before there was a job
            runtime.cancel(self._job)

    def _lease(self, reads: Reads) -> Lease | None:
        backend = self._backend
        if self._limits[0]:
            return backend.runtime.lease(reads.sizes, owner=backend.owner, cancelled=self._cancelled.is_set)
        return backend.runtime.try_lease(reads.sizes, owner=backend.owner)

    def _count(self, token: Token) -> None:
        """Add a token to the answer."""
        self._mark("first")
        self._finish = token.finish_reason
        if token.thought:
            self.reasoning += token.text
            return
        source = None
        if token.winner is not None:
            self._won[token.winner] += 1
            source = len(self._scored) - 1 - token.winner  # the prompt has the best chunk last
        self.trace.append(TracedToken(token_id=token.token_id, text=token.text, source=source))
        self._text += token.text

    def _store(self) -> None:
        """Store the KV that was encoded for the question, after the first token or if there will be none."""
        if self._after:
            self._backend.store(self._after)

    def _end_span(self, error: BaseException | None = None) -> None:
        """End the answer's span, and add one for each stage without its own: search, rerank, prefill and decode."""
        ended, now = self._span, time.perf_counter()
        if ended is None:
            return
        self._span = Span("", off=True)  # once
        task, times = self._task, self._times
        if ended.records:
            model = Path(self._backend.owner.model.checkpoint.name)
            stages: list[tuple[str, str, str, dict[str, Any]]] = [
                ("search", "started", "retrieved", {"mode": task.query.retrieval, "chunks": len(self._scored)}),
                ("rerank", "retrieved", "reranked", {"candidates": task.query.candidates}),
                ("prefill", "loaded", "first", {"tokens": self.prompt_tokens}),
                ("decode", "first", "", {"tokens": self.tokens}),
            ]
            with ended.current():
                for name, begin, end, facts in stages:
                    if begin in times and (name != "rerank" or (task.query.rerank and task.query.chunks is None)):
                        stage = {f"ragkv.{name}.{key}": value for key, value in facts.items()}
                        Span(f"ragkv.{name}", stage, started=times[begin]).end(ended=times.get(end, now))
            ended.note(
                {
                    "gen_ai.request.model": model.name if model.is_absolute() else str(model),
                    "gen_ai.usage.input_tokens": self.prompt_tokens,
                    "gen_ai.usage.output_tokens": self.tokens,
                    "gen_ai.response.finish_reasons": (self._finish or ("error" if error else "cancelled"),),
                    "ragkv.engine": task.engine.name,
                    "ragkv.chunks": len(self._scored),
                }
            )
        ended.end(error)

    def _mark(self, stage: str) -> None:
        self._times.setdefault(stage, time.perf_counter())

    def _so_far(self) -> Answer:
        """The answer so far; it counts as cancelled if its last token is missing."""
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
            decoding={"max_new_tokens": self._task.query.max_new_tokens, **asdict(self._task.decoding)},
            dtype=self._dtype,
            charge=self._charge,
            trace=tuple(self.trace),
            reasoning=self.reasoning.strip(),
            queries=tuple(self.queries),
            intent=self._task.intent.name,
            fields=field_sources(self.trace) if self._finish == "stop" and self._task.decoding.schema else {},
        )


def _chunk_id(scored: ScoredChunk) -> str:
    return scored.chunk.chunk_id


def sources_of(
    chunks: Sequence[ScoredChunk], question: str, weights: WordWeights, *, answer: str = ""
) -> tuple[Source, ...]:
    """Retrieved chunks as sources, with snippets for the question and, if there is one, the answer."""
    shown = snippets([scored.chunk.text for scored in chunks], question, answer, weights)
    return tuple(
        Source(
            document=scored.source,
            chunk_id=scored.chunk.chunk_id,
            text=scored.chunk.text,
            page=scored.chunk.page,
            heading=scored.chunk.heading,
            score=scored.score,
            retrieval_score=scored.retrieval_score,
            rerank_score=scored.rerank_score,
            stages=scored.stages,
            snippet=snippet.text,
            highlights=snippet.highlights,
        )
        for scored, snippet in zip(chunks, shown, strict=True)
    )


def _ms(start: float, end: float) -> float:
    return round((end - start) * 1000, 3)
