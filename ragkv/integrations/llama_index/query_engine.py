"""`RagKVQueryEngine`: ragkv's engines as a LlamaIndex query engine.

Chunk ids have to reach the engine, because they find the stored KV. A query engine keeps them; a `BaseSynthesizer` or
an `LLM` would only get strings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import llama_index.core.instrumentation as instrument
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.settings import Settings
from llama_index.core.vector_stores.types import MetadataFilters

from ragkv.decoding import Decoding
from ragkv.engines import engine_class
from ragkv.errors import UsageError
from ragkv.index.answer import AnswerStream
from ragkv.index.batch import AsyncAnswerStream
from ragkv.index.search import Retrieval
from ragkv.integrations.llama_index.nodes import refuse_unknown, to_scored
from ragkv.integrations.llama_index.retriever import RagKVRetriever
from ragkv.pipeline import QueryOptions, RagKV
from ragkv.retrievers import ScoreKind
from ragkv.types import Answer

EMPTY = "Empty Response"  # the answer of LlamaIndex's own synthesizers when nothing was retrieved

dispatcher = instrument.get_dispatcher(__name__)


class RagKVQueryEngine(BaseQueryEngine):
    """Answers from the stored KV of an index.

    A response's metadata has engine, finish_reason, kv, timing_ms, decoding and charge.

    `top_k` (or `similarity_top_k`), `filters` and `search` go to a `RagKVRetriever`. Any retriever of LlamaIndex
    can be given instead. Nodes that are chunks of the index (same id and text) use stored KV; others are encoded for
    the question, and with `keep` their KV is stored until the next `ragkv gc`. `score_kind` is the scale of such a
    retriever's scores ("dense" for cosine similarity, "sparse" for BM25).

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
        engine: str | None = None,
        top_k: int | None = None,
        similarity_top_k: int | None = None,
        filters: MetadataFilters | None = None,
        search: Retrieval | None = None,
        max_new_tokens: int = 128,
        decoding: Decoding | Mapping[str, Any] | None = None,
        streaming: bool = False,
        keep: bool = False,
        score_kind: ScoreKind = "dense",
        callback_manager: CallbackManager | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self), unknown)
        super().__init__(callback_manager=callback_manager or Settings.callback_manager)
        self.rag = rag
        sought = {"top_k": top_k, "similarity_top_k": similarity_top_k, "filters": filters, "search": search}
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
        self._engine = engine_class(engine or rag.config.default_engine)
        self._score_kind = score_kind
        self._options = QueryOptions(
            engine=self._engine.name, max_new_tokens=max_new_tokens, decoding=decoding, keep=keep
        )

    @classmethod
    def from_index(cls, index: str | Path, *, device: str | None = None, **options: Any) -> Self:
        """Open the index at a folder, with the options of the constructor; `close` closes it."""
        rag = RagKV.open(index, device=device)
        try:
            return cls(rag, **options)
        except BaseException:
            rag.close()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Without the callback manager, whose handlers belong to this process."""
        return {key: value for key, value in self.__dict__.items() if key != "callback_manager"}

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
        dispatcher.event(SynthesizeStartEvent(query=query))
        with self._event(CBEventType.SYNTHESIZE, query) as event:
            request = self._request(nodes, retrieve_ms)
            sources = [*request.nodes, *more]
            deltas = _one(EMPTY)
            if request.nodes:
                deltas = _deltas(self.rag.stream(query.query_str, **request.options), request)
            response: RESPONSE_TYPE
            if self.streaming:
                response = StreamingResponse(deltas, sources, request.metadata)
            else:
                response = Response("".join(deltas).strip(), sources, request.metadata)
            event.on_end(payload={EventPayload.RESPONSE: response})
        dispatcher.event(SynthesizeEndEvent(query=query, response=response))
        return response

    async def _asynthesize(
        self, query: QueryBundle, nodes: Sequence[NodeWithScore], more: Sequence[NodeWithScore], retrieve_ms: float
    ) -> RESPONSE_TYPE:
        dispatcher.event(SynthesizeStartEvent(query=query))
        with self._event(CBEventType.SYNTHESIZE, query) as event:
            request = await asyncio.to_thread(self._request, nodes, retrieve_ms)
            sources = [*request.nodes, *more]
            deltas = _async_one(EMPTY)
            if request.nodes:
                deltas = _async_deltas(self.rag, self.rag.stream(query.query_str, **request.options), request)
            response: RESPONSE_TYPE
            if self.streaming:
                response = AsyncStreamingResponse(deltas, sources, request.metadata)
            else:
                text = "".join([delta async for delta in deltas]).strip()
                response = Response(text, sources, request.metadata)
            event.on_end(payload={EventPayload.RESPONSE: response})
        dispatcher.event(SynthesizeEndEvent(query=query, response=response))
        return response

    def _event(self, kind: CBEventType, query: QueryBundle) -> Any:
        return self.callback_manager.event(kind, payload={EventPayload.QUERY_STR: query.query_str})

    def _request(self, nodes: Sequence[NodeWithScore], retrieve_ms: float) -> _Request:
        pairs = to_scored(self.rag, nodes, self._score_kind, limit=self._engine.most_chunks)
        return _Request(
            nodes=[node for node, _ in pairs],
            options=QueryOptions(**self._options, chunks=[scored for _, scored in pairs]),
            metadata={"engine": self._engine.name},
            retrieve_ms=retrieve_ms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The nodes and options of one answer, and the metadata of its response, which `finish` completes."""

    nodes: list[NodeWithScore]
    options: QueryOptions
    metadata: dict[str, Any]
    retrieve_ms: float

    def finish(self, answer: Answer) -> None:
        result = answer.to_json()
        self.metadata.update({key: result[key] for key in ("finish_reason", "kv", "timing_ms", "decoding", "charge")})
        timing = self.metadata["timing_ms"]  # without retrieval, because the answer was given its chunks
        timing["retrieve"], timing["total"] = self.retrieve_ms, round(timing["total"] + self.retrieve_ms, 3)
        won = {source.chunk_id: source.tokens_won for source in answer.sources}
        for node in self.nodes:
            if won.get(node.node_id) is not None:
                node.metadata["tokens_won"] = won[node.node_id]


def _deltas(stream: AnswerStream, request: _Request) -> Generator[str]:
    try:
        yield from stream
    finally:
        stream.close()
        request.finish(stream.answer)


async def _async_deltas(rag: RagKV, stream: AnswerStream, request: _Request) -> AsyncGenerator[str]:
    deltas = AsyncAnswerStream(rag.index, lambda: stream)
    try:
        async for delta in deltas:
            yield delta
    finally:
        stream.cancel()
        await deltas.aclose()
        request.finish(stream.answer)


def _one(text: str) -> Generator[str]:
    yield text


async def _async_one(text: str) -> AsyncGenerator[str]:
    yield text


def _since(started: float) -> float:
    return round((time.perf_counter() - started) * 1000, 3)
