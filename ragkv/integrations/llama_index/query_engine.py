"""ragkv in LlamaIndex: the query engine `RagKVQueryEngine`, `RagKVRetriever` for any part of LlamaIndex that takes a
retriever, and the post-processor `RagKVRerank`.

Chunk ids have to reach the engine, because they find the stored KV. A query engine keeps them; a `BaseSynthesizer` or
an `LLM` would only get strings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, get_args

import llama_index.core.instrumentation as instrument
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import IndexNode, NodeWithScore, QueryBundle
from llama_index.core.settings import Settings
from llama_index.core.vector_stores.types import MetadataFilters

from ragkv.engines import engine_class
from ragkv.errors import UsageError
from ragkv.index.answer import AnswerStream
from ragkv.index.batch import AsyncAnswerStream
from ragkv.integrations.llama_index.nodes import (
    FUSED,
    OF_ANSWER,
    RERANK,
    RETRIEVAL,
    chunk_count,
    chunk_filter,
    fused,
    metadata_filter,
    node_text,
    refuse_unknown,
    to_nodes,
    to_scored,
    with_scores,
)
from ragkv.model.checkpoint import pick_device
from ragkv.pipeline import RagKV
from ragkv.question import SEARCH_OPTIONS, Question
from ragkv.retrievers import Reranker, ScoreKind, fuse, load_reranker, normalise_rerank
from ragkv.types import Answer, Chunk, Document, ScoredChunk

dispatcher = instrument.get_dispatcher(__name__)


class _OverIndex:
    """What is made over an open index: it can open one itself, and its pickle reopens it."""

    rag: RagKV

    @classmethod
    def from_index(cls, index: str | Path, *, device: str | None = None, **options: Any) -> Self:
        """Open the index at a folder, with the options of the constructor; `rag.close()` closes it."""
        rag = RagKV.open(index, device=device)
        try:
            return cls(rag, **options)  # type: ignore[call-arg]
        except BaseException:
            rag.close()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Without the callback manager, whose handlers belong to this process."""
        return {key: value for key, value in self.__dict__.items() if key != "callback_manager"}


class RagKVRetriever(_OverIndex, BaseRetriever):
    """Returns the best chunks as nodes, best first. A node has the chunk's id, the fused score, and all raw scores.

    `top_k` (LlamaIndex calls it `similarity_top_k`) None is the index's setting. `filters` are LlamaIndex's
    `MetadataFilters`, with all operators and nesting; they apply before the best chunks are taken. `search` holds the
    other arguments of `RagKV.retrieve` (retrieval, rerank, candidates, where, only).

    Async retrieval runs in a thread. A pickle or a deep copy reopens the index. Raises the errors of `RagKV.retrieve`,
    and UsageError for an invalid filter or unsupported arguments.
    """

    def __init__(
        self,
        rag: RagKV,
        *,
        top_k: int | None = None,
        similarity_top_k: int | None = None,
        filters: MetadataFilters | None = None,
        search: Mapping[str, Any] | None = None,
        callback_manager: CallbackManager | None = None,
        object_map: dict[str, Any] | None = None,
        objects: list[IndexNode] | None = None,
        verbose: bool = False,
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self), unknown)
        self.rag = rag
        self.top_k = chunk_count(top_k, similarity_top_k)
        self.filters = filters
        self.search = dict(search or {})
        super().__init__(callback_manager=callback_manager, object_map=object_map, objects=objects, verbose=verbose)

    @property
    def similarity_top_k(self) -> int | None:
        """LlamaIndex's name for `top_k`."""
        return self.top_k

    @similarity_top_k.setter
    def similarity_top_k(self, count: int | None) -> None:
        self.top_k = chunk_count(None, count)

    @property
    def filters(self) -> MetadataFilters | None:
        """Filters on the metadata of chunks; None for no filter."""
        return self._filters

    @filters.setter
    def filters(self, filters: MetadataFilters | None) -> None:
        if filters is not None:
            metadata_filter(filters)
        self._filters = filters

    @property
    def search(self) -> Mapping[str, Any]:
        """The other arguments of `RagKV.retrieve`."""
        return self._search

    @search.setter
    def search(self, search: Mapping[str, Any]) -> None:
        if unknown := [*(search.keys() - {*SEARCH_OPTIONS})]:
            raise UsageError(f"search does not take {unknown[0]!r}; it takes {', '.join(SEARCH_OPTIONS)}.")
        self._search = search

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.callback_manager = CallbackManager()

    @property
    def filtered_search(self) -> Mapping[str, Any]:
        """`search` with the filters."""
        if self.filters is None:
            return self.search
        return {**self.search, "only": _both(chunk_filter(self.filters), self.search.get("only"))}

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = self.rag.retrieve(query_bundle.query_str, top_k=self.top_k, **self.filtered_search)
        nodes = to_nodes(self.rag, found)
        if any(node.metadata[RERANK] is not None for node in nodes):
            self._report_reranking(query_bundle, nodes)
        return nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)

    def _report_reranking(self, query_bundle: QueryBundle, nodes: list[NodeWithScore]) -> None:
        """Send the events of the index's reranker, after it has run inside `RagKV.retrieve`."""
        before = sorted(nodes, key=lambda node: -float(node.metadata[RETRIEVAL]))
        name = self.rag.config.reranker
        dispatcher.event(ReRankStartEvent(query=query_bundle, nodes=before, top_n=len(nodes), model_name=name))
        dispatcher.event(ReRankEndEvent(nodes=nodes))


def _both(
    first: Callable[[Document, Chunk], bool], second: Callable[[Document, Chunk], bool] | None
) -> Callable[[Document, Chunk], bool]:
    if second is None:
        return first
    return lambda document, chunk: first(document, chunk) and second(document, chunk)


class RagKVRerank(BaseNodePostprocessor):
    """Scores nodes against the question, fuses the score with that of retrieval (PCED Eqs. 4-7), and sorts by it.

    `reranker` is a `ragkv.retrievers.Reranker` or a name ("mini", "BAAI/bge-reranker-v2-m3"). `top_n` None keeps all
    nodes. `score_kind` is the scale of scores from retrievers other than ragkv's. It returns copies of the nodes, with
    `retrieval_score`, `rerank_score` and `fused_score` in their metadata.
    """

    model_name: str = Field(description="The reranker's name.")
    top_n: int | None = Field(default=None, description="How many nodes to keep; None keeps all.")
    score_kind: ScoreKind = Field(default="dense", description="The scale of foreign retrieval scores.")
    _reranker: Reranker = PrivateAttr()
    _made: dict[str, Any] = PrivateAttr()

    def __init__(
        self,
        reranker: Reranker | str = "mini",
        *,
        top_n: int | None = None,
        score_kind: ScoreKind = "dense",
        device: str | None = None,
        max_tokens: int | None = None,
        callback_manager: CallbackManager | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self), unknown)
        if top_n is not None and top_n < 1:
            raise UsageError(f"top_n must be at least 1, or None for all nodes, not {top_n}.")
        loaded = reranker
        if isinstance(loaded, str):
            loaded = load_reranker(loaded, device=str(pick_device(device)), max_tokens=max_tokens)
        options: dict[str, Any] = {"model_name": loaded.name, "top_n": top_n, "score_kind": score_kind}
        if callback_manager is not None:
            options["callback_manager"] = callback_manager
        super().__init__(**options)
        self._reranker = loaded
        self._made = {"reranker": reranker, "device": device, "max_tokens": max_tokens}

    @classmethod
    def from_dict(cls, data: dict[str, Any], **options: Any) -> RagKVRerank:
        """Create it from the result of `to_dict`; the reranker is loaded again by name."""
        kept = {key: data[key] for key in ("top_n", "score_kind") if key in data}
        return cls(data["model_name"], **(kept | options))

    def __getstate__(self) -> dict[str, Any]:
        """A reranker given by name is loaded again; one given as an object is pickled."""
        return self._made | {"top_n": self.top_n, "score_kind": self.score_kind}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @classmethod
    def class_name(cls) -> str:
        return "RagKVRerank"

    def _postprocess_nodes(
        self, nodes: Sequence[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise UsageError("RagKVRerank needs the question: call postprocess_nodes(nodes, query_str=...).")
        candidates = list(nodes)
        if not candidates:
            return []
        top_n = min(self.top_n or len(candidates), len(candidates))
        dispatcher.event(
            ReRankStartEvent(query=query_bundle, nodes=candidates, top_n=top_n, model_name=self._reranker.name)
        )
        payload: dict[str, Any] = {
            EventPayload.NODES: candidates,
            EventPayload.MODEL_NAME: self._reranker.name,
            EventPayload.QUERY_STR: query_bundle.query_str,
            EventPayload.TOP_K: top_n,
        }
        with self.callback_manager.event(CBEventType.RERANKING, payload=payload) as event:
            logits = self._reranker.score(query_bundle.query_str, [node_text(node.node) for node in candidates])
            scored = [self._scored(node, logit) for node, logit in zip(candidates, logits, strict=True)]
            scored.sort(key=lambda node: (-node.get_score(), node.node_id))
            event.on_end(payload={EventPayload.NODES: scored[:top_n]})
        dispatcher.event(ReRankEndEvent(nodes=scored[:top_n]))
        return scored[:top_n]

    def _scored(self, node: NodeWithScore, logit: float) -> NodeWithScore:
        """A copy with the new scores. If the node was reranked before, its earlier fused score is fused again."""
        score = fuse(fused(node, self.score_kind), normalise_rerank(logit))
        stages = {RETRIEVAL: node.metadata.get(RETRIEVAL, node.score), RERANK: logit, FUSED: score}
        return with_scores(node, stages, score)


EMPTY = "Empty Response"  # the answer of LlamaIndex's own synthesizers when nothing was retrieved


_OPTIONS = tuple(
    each.name
    for each in fields(Question)
    if each.name not in ("question", "top_k", "chunks", "tail", "rewrite", "message", *SEARCH_OPTIONS)
)
"""The options of a question that belong to its answer; `search` and `top_k` are those of the retriever."""


class RagKVQueryEngine(_OverIndex, BaseQueryEngine):
    """Answers from the stored KV of an index.

    A response's metadata has engine, finish_reason, kv, timing_ms, decoding, charge and queries.

    Takes the options of `ragkv.question.Question` that belong to an answer (`engine`, `max_new_tokens`, `decoding`,
    `system`, `keep`, `steps`, …). `top_k` (or `similarity_top_k`), `filters` and `search` go to a `RagKVRetriever`. Any
    retriever of LlamaIndex can be given instead. Nodes that are chunks of the index (same id and text) use stored KV;
    others are encoded for the question, and with `keep` their KV is stored until the next `ragkv gc`. `score_kind` is
    the scale of such a retriever's scores ("dense" for cosine similarity, "sparse" for BM25). With `steps`, the model
    writes further queries for ragkv's own retriever; their nodes pass no post-processor.

    With `streaming` the response is a stream whose metadata is complete at its end. Async methods run the model in a
    thread; cancelling the task ends the answer. Thread-safe. A pickle or a deep copy reopens the index. UsageError for
    an unknown engine or unsupported arguments.
    """

    def __init__(
        self,
        rag: RagKV,
        *,
        retriever: BaseRetriever | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        top_k: int | None = None,
        similarity_top_k: int | None = None,
        filters: MetadataFilters | None = None,
        search: Mapping[str, Any] | None = None,
        streaming: bool = False,
        score_kind: ScoreKind = "dense",
        callback_manager: CallbackManager | None = None,
        **options: Any,
    ) -> None:
        refuse_unknown(type(self), options, _OPTIONS)
        if score_kind not in (kinds := get_args(ScoreKind)):
            raise UsageError(f"score_kind must be one of {', '.join(kinds)}, not {score_kind!r}.")
        super().__init__(callback_manager=callback_manager or Settings.callback_manager)
        self.rag = rag
        sought = {"top_k": top_k, "similarity_top_k": similarity_top_k, "filters": filters, "search": search}
        sought["steps"] = options.get("steps")
        if retriever is not None and (given := [name for name, value in sought.items() if value is not None]):
            raise UsageError(f"{given[0]} is for ragkv's own retriever; set it on the retriever that you give.")
        self.retriever = retriever or RagKVRetriever(
            rag,
            top_k=top_k,
            similarity_top_k=similarity_top_k,
            filters=filters,
            search=search,
            callback_manager=self.callback_manager,
        )
        self.streaming = streaming
        self._postprocessors = tuple(node_postprocessors)
        self._share_callbacks()
        self._engine = engine_class(options.get("engine") or rag.config.default_engine)
        self._score_kind = score_kind
        self._options = {**options, "engine": self._engine.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.callback_manager = Settings.callback_manager
        if isinstance(self.retriever, RagKVRetriever):
            self.retriever.callback_manager = self.callback_manager
        self._share_callbacks()

    def _share_callbacks(self) -> None:
        for postprocessor in self._postprocessors:
            postprocessor.callback_manager = self.callback_manager

    def close(self) -> None:
        """Close the index."""
        self.rag.close()

    def _get_prompt_modules(self) -> PromptMixinType:
        """None: stored KV depends on the prompt, so it is set in the index (`[prompt]` in ragkv.toml)."""
        return {}

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """The retriever's nodes after all post-processors, best first."""
        nodes = self.retriever.retrieve(query_bundle)
        for postprocessor in self._postprocessors:
            nodes = postprocessor.postprocess_nodes(nodes, query_bundle=query_bundle)
        return nodes

    async def aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Like `retrieve`. The retriever decides whether the event loop stays free."""
        nodes = await self.retriever.aretrieve(query_bundle)
        for postprocessor in self._postprocessors:
            nodes = await postprocessor.apostprocess_nodes(nodes, query_bundle=query_bundle)
        return nodes

    def synthesize(
        self,
        query_bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """Answer from these nodes (best first); additional nodes are only listed as sources."""
        return self._synthesize(query_bundle, nodes, additional_source_nodes or (), 0.0)

    async def asynthesize(
        self,
        query_bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """Like `synthesize`, without blocking the event loop."""
        return await self._asynthesize(query_bundle, nodes, additional_source_nodes or (), 0.0)

    @dispatcher.span
    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self._event(CBEventType.QUERY, query_bundle) as event:
            started = time.perf_counter()
            nodes = self.retrieve(query_bundle)
            response = self._synthesize(query_bundle, nodes, (), _since(started))
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    @dispatcher.span
    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self._event(CBEventType.QUERY, query_bundle) as event:
            started = time.perf_counter()
            nodes = await self.aretrieve(query_bundle)
            response = await self._asynthesize(query_bundle, nodes, (), _since(started))
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    def _synthesize(
        self, query: QueryBundle, nodes: Sequence[NodeWithScore], more: Sequence[NodeWithScore], retrieve_ms: float
    ) -> RESPONSE_TYPE:
        with self._synthesis(query) as end:
            request = self._request(nodes, retrieve_ms)
            sources = request.sources = [*request.nodes, *more]
            deltas = _deltas(self._stream(query, request), request)
            if self.streaming:
                return end(StreamingResponse(deltas, sources, request.metadata))
            return end(Response("".join(deltas).strip(), sources, request.metadata))

    async def _asynthesize(
        self, query: QueryBundle, nodes: Sequence[NodeWithScore], more: Sequence[NodeWithScore], retrieve_ms: float
    ) -> RESPONSE_TYPE:
        with self._synthesis(query) as end:
            request = await asyncio.to_thread(self._request, nodes, retrieve_ms)
            sources = request.sources = [*request.nodes, *more]
            deltas = _async_deltas(self.rag, self._stream(query, request), request)
            if self.streaming:
                return end(AsyncStreamingResponse(deltas, sources, request.metadata))
            text = "".join([delta async for delta in deltas]).strip()
            return end(Response(text, sources, request.metadata))

    @contextmanager
    def _synthesis(self, query: QueryBundle) -> Iterator[Callable[[RESPONSE_TYPE], RESPONSE_TYPE]]:
        """The events of a synthesis, around code that passes its response to the function that it gets."""
        dispatcher.event(SynthesizeStartEvent(query=query))
        with self._event(CBEventType.SYNTHESIZE, query) as event:

            def end(response: RESPONSE_TYPE) -> RESPONSE_TYPE:
                event.on_end(payload={EventPayload.RESPONSE: response})
                dispatcher.event(SynthesizeEndEvent(query=query, response=response))
                return response

            yield end

    def _stream(self, query: QueryBundle, request: _Request) -> AnswerStream | None:
        return self.rag.stream(query.query_str, **request.options) if request.nodes else None

    def _event(self, kind: CBEventType, query: QueryBundle) -> Any:
        return self.callback_manager.event(kind, payload={EventPayload.QUERY_STR: query.query_str})

    def _request(self, nodes: Sequence[NodeWithScore], retrieve_ms: float) -> _Request:
        pairs = to_scored(self.rag, nodes, self._score_kind, limit=self._engine.most_chunks)
        options = {**self._options, "chunks": [scored for _, scored in pairs]}
        if isinstance(self.retriever, RagKVRetriever) and self._options.get("steps"):
            options = {**options, "top_k": self.retriever.top_k, **self.retriever.filtered_search}
        return _Request(
            rag=self.rag,
            nodes=[node for node, _ in pairs],
            options=options,
            metadata={"engine": self._engine.name},
            retrieve_ms=retrieve_ms,
            sources=[],
        )


@dataclass(slots=True, kw_only=True)
class _Request:
    """The nodes and options of one answer, and the sources and metadata of its response, which `finish` completes."""

    rag: RagKV
    nodes: list[NodeWithScore]
    options: dict[str, Any]
    metadata: dict[str, Any]
    retrieve_ms: float
    sources: list[NodeWithScore]

    def finish(self, answer: Answer) -> None:
        result = answer.to_json()
        shown = ("finish_reason", "kv", "timing_ms", "decoding", "charge", "queries")
        self.metadata.update({key: result[key] for key in shown})
        if answer.queries and answer.sources:
            self._found_later(answer)
        timing = self.metadata["timing_ms"]  # without retrieval, because the answer was given its chunks
        timing["retrieve"], timing["total"] = self.retrieve_ms, round(timing["total"] + self.retrieve_ms, 3)
        sources = {source.chunk_id: source.to_json() for source in answer.sources}
        for node in self.nodes:
            source = sources.get(node.node_id, {})
            node.metadata.update({key: source[key] for key in OF_ANSWER if source.get(key) is not None})

    def _found_later(self, answer: Answer) -> None:
        """Replace the nodes by those of all steps."""
        chunks = self.rag.store.chunk_many(source.chunk_id for source in answer.sources)
        names = ("retrieval_score", "rerank_score", "score", "stages")
        scored = [
            ScoredChunk(
                chunk=chunks[source.chunk_id],
                source=source.document,
                **{name: getattr(source, name) for name in names},
            )
            for source in answer.sources
            if source.chunk_id in chunks
        ]
        known = {node.node_id: node for node in (*to_nodes(self.rag, scored), *self.nodes)}
        nodes = [known[source.chunk_id] for source in answer.sources if source.chunk_id in known]
        self.sources[: len(self.nodes)], self.nodes = nodes, nodes


def _deltas(stream: AnswerStream | None, request: _Request) -> Generator[str]:
    if stream is None:
        yield EMPTY
        return
    try:
        yield from stream
    finally:
        stream.close()
        request.finish(stream.answer)


async def _async_deltas(rag: RagKV, stream: AnswerStream | None, request: _Request) -> AsyncGenerator[str]:
    if stream is None:
        yield EMPTY
        return
    deltas = AsyncAnswerStream(rag.index, lambda: stream)
    try:
        async for delta in deltas:
            yield delta
    finally:
        stream.cancel()
        await deltas.aclose()
        request.finish(stream.answer)


def _since(started: float) -> float:
    return round((time.perf_counter() - started) * 1000, 3)
