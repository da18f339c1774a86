"""`RagKV`, the facade: what can be done with an index. The rooms below do it."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from ragkv.config import IndexConfig, RuntimeConfig
from ragkv.index.answer import AnswerStream
from ragkv.index.background import AsyncAnswerStream
from ragkv.index.care import Care
from ragkv.index.creation import create_index, open_index
from ragkv.index.finder import Finder
from ragkv.index.ground import IndexGround
from ragkv.index.index import Index
from ragkv.index.ingestion import run_ingest
from ragkv.index.many import Answers, AsyncAnswers, Result
from ragkv.index.progressbar import ingest_bar
from ragkv.index.recall import Recall
from ragkv.index.requested import index_request
from ragkv.index.search import Retrieval, search_settings
from ragkv.index.task import Asked, QueryOptions, settle_asked, settle_task
from ragkv.ingest import IngestProgress, IngestReport, Limits, ReadyDocument, SourceFile, preview
from ragkv.store import (
    Holder,
    Store,
)
from ragkv.types import Answer, Chunk, KVUse, ScoredChunk

if TYPE_CHECKING:
    from ragkv.engines import Engine, Request
    from ragkv.model.language import LanguageModel
    from ragkv.model.prompt import Prompt
    from ragkv.retrievers import Embedder, Reranker

__all__ = ["Asked", "QueryOptions", "RagKV", "Result"]


class RagKV(Care):
    """An index: documents, chunks and their KV, and the model that reads them.

    Make one with `create`, reopen it with `open`; both are context managers. The model is loaded when a question or
    a changed document first needs it. Threads may share one; engines keep nothing between requests.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        """What is below this facade; its parts may change without notice."""
        self.recall = Recall(index)
        """The KV of the index's chunks, for its model and prompt."""
        self._finder = Finder(index)
        self._ground = IndexGround(index, self._finder, self.recall)

    @classmethod
    def create(
        cls,
        index: str | Path,
        *,
        device: str | None = None,
        replace_empty: bool = False,
        load: bool = True,
        **settings: Any,
    ) -> Self:
        """Make an index; `settings` are the fields of `IndexConfig` (`model="mini"`, `chunk_tokens=…`, `codec=…`).

        Unset, `chunk_tokens` and `default_engine` are what the checkpoint recommends; `embedder` and `reranker` are
        the mini ones beside the mini model, and none beside any other (they know nothing of the real world).

        Nothing is written before model, embedder and reranker are loaded, so that a mistyped name can be corrected;
        `load` False leaves loading to the first use. With `replace_empty`, an index that holds no document is made
        anew; its prompt, decoding, limits and memory budget stay, unless `settings` say otherwise. Raises ConfigError
        when the folder holds something else, ModelLoadError or UnsupportedModelError when a model cannot be used.
        """
        made = create_index(Path(index), settings, device=device, replace_empty=replace_empty, load=load)
        return cls(made)

    @classmethod
    def open(
        cls,
        index: str | Path,
        *,
        device: str | None = None,
        readonly: bool | None = None,
        batch_tokens: int | None = None,
        max_rows: int | None = None,
    ) -> Self:
        """Open an index. Raises ConfigError when there is none, StoreError when it cannot be read.

        `readonly` None: writable where the system permits it. An index that may not be written answers all the same;
        what a question has to encode is then not kept.

        `batch_tokens` and `max_rows` limit what is answered at a time, whatever `[runtime]` in `ragkv.toml` says; a
        question that needs more rows is refused.
        """
        limits = RuntimeConfig(
            batch_tokens="auto" if batch_tokens is None else batch_tokens,
            max_rows="auto" if max_rows is None else max_rows,
        )
        return cls(open_index(Path(index), device=device, readonly=readonly, limits=limits))

    def close(self) -> None:
        """End the answers on their way, and close the store; the model is freed with the object."""
        self.index.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle holds the folder, the device and the limits, and opens the index again where it is loaded."""
        given = {"device": self.index.device, "readonly": self.store.readonly or None, **self.index.limits.given}
        return _reopen, (type(self), str(self.folder.absolute()), given)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        return self.index.folder

    @property
    def config(self) -> IndexConfig:
        """What the index was built with: its `ragkv.toml`."""
        return self.index.config

    @property
    def store(self) -> Store:
        """The documents and KV themselves, for those who look after an index rather than ask it."""
        return self.index.store

    @property
    def model(self) -> LanguageModel:
        """The generation model, loaded once and proved exact."""
        return self.index.model

    @property
    def prompt(self) -> Prompt:
        """The prompt's parts: prefix, contexts, suffix."""
        return self.index.prompt

    @property
    def fingerprint(self) -> str:
        """The model's identity now; a local checkpoint is hashed without being loaded."""
        return self.index.fingerprint

    @property
    def embedder(self) -> Embedder | None:
        """What turns texts into vectors, loaded once; None for an index that searches by words alone."""
        return self.index.encoders.embedder

    @property
    def reranker(self) -> Reranker | None:
        """The cross-encoder that judges candidates, loaded once; None for an index without."""
        return self.index.encoders.reranker

    def ingest(
        self,
        *paths: str | Path | SourceFile,
        prune: bool = False,
        dry_run: bool = False,
        memory: int | str | None = None,
        on_progress: Callable[[IngestProgress], None] | None = None,
        show_progress: bool = False,
        timeout: float | None = None,
        on_wait: Callable[[Holder], None] | None = None,
    ) -> IngestReport:
        """Ingest files and folders; what did not change is left alone, `prune` drops what is gone.

        Bytes that are no file come as `ragkv.ingest.supplied(data, name=…)`. `dry_run` reports what would be done.
        `memory` is about how much the ingest holds beside its models ("512MiB"; unset, `[ingest] memory`).
        `show_progress` draws a bar, on stderr or in the notebook.

        One ingest runs at a time: the next one waits for it (`on_wait` is told for whom), `timeout` seconds at most.
        Raises UsageError for a missing path, IngestError when nothing could be read, StoreFullError when the disk is
        full (everything committed before stays), StoreBusyError when the time is over.
        """
        given = [path if isinstance(path, SourceFile) else Path(path) for path in paths]
        if dry_run:
            limits = Limits.of(self.config.ingest)
            return preview(self.store, self.index.recipe.digest(), given, prune=prune, limits=limits)
        command = " ".join(["ragkv ingest", *(p.name if isinstance(p, SourceFile) else str(p) for p in paths)])
        with (
            self.store.writing(textwrap.shorten(command, 120), timeout=timeout, on_wait=on_wait),
            ingest_bar(on_progress, show=show_progress) as tell,
        ):
            return run_ingest(
                self.index, self._finder, lambda each: each.run(given, prune=prune), on_progress=tell, memory=memory
            )

    def add_chunks(
        self,
        documents: Sequence[ReadyDocument],
        *,
        on_progress: Callable[[IngestProgress], None] | None = None,
        timeout: float | None = None,
        on_wait: Callable[[Holder], None] | None = None,
    ) -> IngestReport:
        """Ingest documents that another program has read and cut, their chunk ids kept; else as `ingest`."""
        with self.store.writing(f"adding {len(documents)} documents", timeout=timeout, on_wait=on_wait):
            return run_ingest(
                self.index, self._finder, lambda each: each.run_chunks(documents), on_progress=on_progress
            )

    def query(self, question: str, **options: Unpack[QueryOptions]) -> Answer:
        """Answer one question; see `stream` for the options and errors."""
        stream = self.stream(question, **options)
        for _ in stream:
            continue
        return stream.answer

    def stream(self, question: str, **options: Unpack[QueryOptions]) -> AnswerStream:
        """Answer piece by piece: iterate over the text, then read `.answer`.

        The options are those of `QueryOptions` (`engine`, `top_k`, `decoding`, `where`, …).

        Raises UsageError for an unknown engine, `top_k` below 1, an empty question or a bad decoding setting;
        RetrievalError when no chunk matches; KVMismatchError when the index was made by another model.
        """
        return AnswerStream(self._ground, settle_task(self.config, question, **options))

    def query_many(self, questions: Iterable[str | Asked], **options: Unpack[QueryOptions]) -> list[Answer]:
        """Answer questions together, in their order; see `query_each`. The first error ends the rest and is raised."""
        return self.query_each(questions, **options).in_order()

    def query_each(self, questions: Iterable[str | Asked], **options: Unpack[QueryOptions]) -> Answers:
        """Answer questions together: an iterator of results, each as soon as it is there, with its question's number.

        `options` are those of `stream`, for all; a question may bring its own: `{"question": "…", "engine": "ape"}`.
        The answers are those of asking one by one, whatever the batch. Questions are taken as there is room for them:
        a thousand hold no more KV than those that are being answered. An error of one question is its result.
        """
        settle_task(self.config, "?", **options)  # what is wrong for all is said at once

        def start(asked: str | Asked) -> AnswerStream:
            return AnswerStream(self._ground, settle_asked(self.config, asked, options))

        return Answers(start, questions, lambda: self.index.runtime)

    async def aquery_many(self, questions: Iterable[str | Asked], **options: Unpack[QueryOptions]) -> list[Answer]:
        """`query_many` without blocking the event loop."""
        return await self.aquery_each(questions, **options).in_order()

    def aquery_each(self, questions: Iterable[str | Asked], **options: Unpack[QueryOptions]) -> AsyncAnswers:
        """`query_each` for `async for`; leaving it early ends the answers that are on their way."""
        return AsyncAnswers(self.index, lambda: self.query_each(questions, **options))

    async def aquery(self, question: str, **options: Unpack[QueryOptions]) -> Answer:
        """`query` without blocking the event loop; cancelling the task ends the answer at its next token."""
        async with self.astream(question, **options) as stream:
            async for _ in stream:
                continue
        return stream.answer

    def astream(self, question: str, **options: Unpack[QueryOptions]) -> AsyncAnswerStream:
        """`stream` for `async for`: the text piece by piece, then `.answer`; errors come with the first piece."""
        return AsyncAnswerStream(self.index, lambda: self.stream(question, **options))

    def retrieve(self, question: str, *, top_k: int | None = None, **retrieval: Unpack[Retrieval]) -> list[ScoredChunk]:
        """The best chunks for a question, best first, with raw and fused scores (PCED Eqs. 4-7).

        `retrieval` is a mode of `ragkv.index.search`; `rerank` whether the reranker judges the best `candidates` of it,
        of which `top_k` remain; `where` are conditions on documents, "source=notes/*.md", and `only(document, chunk)`
        is a condition in Python, which may leave nothing to find. Unset: as `ragkv.toml` says.
        Raises UsageError for a wrong setting, RetrievalError when the index has not what a mode needs.
        """
        limit = self.config.top_k if top_k is None else top_k
        return self._finder.find(question, search_settings(self.config, limit, **retrieval))

    async def aretrieve(
        self, question: str, *, top_k: int | None = None, **retrieval: Unpack[Retrieval]
    ) -> list[ScoredChunk]:
        """`retrieve` without blocking the event loop."""
        return await asyncio.to_thread(self.retrieve, question, top_k=top_k, **retrieval)

    def chunk(self, text: str, *, chunk_id: str, document_id: str = "") -> Chunk:
        """A chunk of any text, as the prompt would hold it; the index's own KV serves it when the text is the same."""
        return Chunk(
            chunk_id=chunk_id,
            document_id=document_id,
            ordinal=0,
            text=text,
            token_ids=self.prompt.chunk_ids(self.model.tokens, text),
            start=0,
            end=len(text),
        )

    def request(self, engine: Engine, question: str, scored: Sequence[ScoredChunk]) -> tuple[Request, KVUse]:
        """What an engine starts from, for programs that drive one themselves, and how much of it was stored."""
        return index_request(self.index, self.recall, engine, question, scored)


def _reopen(cls: type[RagKV], folder: str, given: dict[str, Any]) -> RagKV:
    return cls.open(folder, **given)
