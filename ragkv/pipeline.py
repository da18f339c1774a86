"""`RagKV`, the public API of an index: ingest, ask, search, inspect and maintain (docs/operations.md)."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ragkv.config import VLLM, History, IndexConfig, RuntimeConfig, one_of
from ragkv.errors import IngestError, UnsupportedModelError, UsageError
from ragkv.index.answer import AnswerStream, IndexBackend, sources_of, validate_task
from ragkv.index.batch import Answers, AsyncAnswers, AsyncAnswerStream, Result
from ragkv.index.conversation import Conversation
from ragkv.index.create import create_index, open_index
from ragkv.index.filters import match
from ragkv.index.index import Index
from ragkv.index.ingestion import run_ingest
from ragkv.index.kv_source import KVSource
from ragkv.index.maintenance import IndexMaintenance, delete_document
from ragkv.index.pack import Pack, write_pack
from ragkv.index.samples import sample_questions
from ragkv.index.search import (
    DocumentPage,
    Finder,
    list_documents,
    select,
)
from ragkv.ingest import IngestProgress, IngestReport, Make, ParseLimits, ReadyDocument, SourceFile, preview
from ragkv.ingest.ingester import is_current
from ragkv.ingest.source import GivenPath, flat_paths
from ragkv.ingest.watch import FolderChanges, FolderWatcher
from ragkv.question import Asked, Question
from ragkv.store import (
    Holder,
    Notify,
    Store,
    StoredDocument,
)
from ragkv.types import Answer, Capability, Chunk, KVUse, ScoredChunk, Source
from ragkv.util.display import one_line

if TYPE_CHECKING:
    from ragkv.engines import Engine, Request
    from ragkv.model.language_model import LanguageModel

logger = logging.getLogger(__name__)
__all__ = [
    "Question",
    "RagKV",
    "Result",
    "ingest_bar",
]


OnProgress = Callable[[IngestProgress], None]


@contextmanager
def ingest_bar(notify: OnProgress | None, *, show: bool) -> Iterator[OnProgress | None]:
    """Yields `notify`; with `show`, a callback that also draws a bar, on stderr or as a notebook widget."""
    if not show:
        yield notify
        return
    from tqdm.auto import tqdm

    with tqdm(unit="B", unit_scale=True, unit_divisor=1024, desc="ingest", dynamic_ncols=True) as bar:

        def move(progress: IngestProgress) -> None:
            bar.total = progress.total_bytes
            bar.set_postfix_str(one_line(progress.current)[-40:], refresh=False)
            bar.update(int(progress.done_bytes) - bar.n)
            if notify is not None:
                notify(progress)

        yield move


class RagKV:
    """An index: documents, chunks and their KV, and the model that reads them.

    Make one with `create` or open it with `open`; it is a context manager. The model is loaded when a question or a
    changed document first needs it. Thread-safe.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        """The implementation below this facade, which may change without notice."""
        self.kv_source = KVSource(index)
        """The KV of the index's chunks, for its model and prompt."""
        self._finder = Finder(index)
        self.maintenance = IndexMaintenance(index, self.kv_source, self._finder)
        """Checks, repairs, copies and warms the index."""
        self._backend = IndexBackend(index, self._finder, self.kv_source)

    @classmethod
    def create(
        cls,
        index: str | Path,
        *,
        device: str | None = None,
        replace_empty: bool = False,
        load: bool = True,
        vllm: str | None = None,
        **settings: Any,
    ) -> Self:
        """Make an index; `settings` are the fields of `IndexConfig` (`model="mini"`, `chunk_tokens=…`, `codec=…`).

        By default, `chunk_tokens` and `default_engine` are those that the checkpoint recommends. The default embedder
        and reranker are the mini ones for the mini model, and none for any other, because they were trained on
        fictional documents.

        Model, embedder and reranker are loaded before anything is written, so that a mistyped name leaves nothing
        behind; with `load` False they are loaded at the first use. With `replace_empty`, an index without documents is
        made again; its prompt, decoding, limits and memory budget stay unless `settings` change them.

        `vllm` is the URL of the vLLM server that encodes chunks, and answers (docs/vllm.md). Raises ConfigError if the
        folder holds something else, ModelLoadError or UnsupportedModelError if a model cannot be used.
        """
        if vllm is not None:
            settings["executor"] = VLLM
        made = create_index(Path(index), settings, device=device, replace_empty=replace_empty, load=load, vllm=vllm)
        return cls(made)

    @classmethod
    def open(
        cls,
        index: str | Path,
        *,
        device: str | None = None,
        readonly: bool | None = None,
        batch_tokens: int | None = None,
        max_sequences: int | None = None,
        runtime: tuple[str, str] | None = None,
    ) -> Self:
        """Open an index. Raises ConfigError if there is none, StoreError if it cannot be read.

        With `readonly` None, the index is writable if the system permits it. A read-only index answers questions too,
        but does not store the KV that they encode.

        `batch_tokens` and `max_sequences` override `[runtime]` in `ragkv.toml`; a question that needs more sequences is
        refused.

        `runtime=("vllm", URL)`: a vLLM server with `ragkv.integrations.vllm.RagKVConnector` answers (docs/vllm.md).
        """
        if runtime is not None:
            one_of("runtime", runtime[0], (VLLM,))
        limits = RuntimeConfig(
            batch_tokens="auto" if batch_tokens is None else batch_tokens,
            max_sequences="auto" if max_sequences is None else max_sequences,
        )
        vllm = None if runtime is None else runtime[1]
        return cls(open_index(Path(index), device=device, readonly=readonly, limits=limits, vllm=vllm))

    def close(self) -> None:
        """Cancel running answers and close the store. The model is freed with the object."""
        self.index.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle holds the folder, the device and the limits; unpickling opens the index again."""
        options: dict[str, Any] = {
            "device": self.index.device,
            "readonly": self.store.readonly or None,
            "runtime": None if self.index.vllm is None else ("vllm", self.index.vllm),
            **self.index.limits.given,
        }
        return partial(type(self).open, str(self.folder.absolute()), **options), ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        return self.index.folder

    @property
    def config(self) -> IndexConfig:
        """The settings that the index was built with, from its `ragkv.toml`."""
        return self.index.config

    @property
    def store(self) -> Store:
        """The store of documents and KV, for maintenance."""
        return self.index.store

    @property
    def model(self) -> LanguageModel:
        """The generation model; it is loaded and self-checked at the first use."""
        return self.index.model

    def ingest(
        self,
        *paths: GivenPath | Iterable[GivenPath],
        prune: bool = False,
        dry_run: bool = False,
        memory: int | str | None = None,
        make: Make | None = None,
        on_progress: Callable[[IngestProgress], None] | None = None,
        show_progress: bool = False,
        timeout: float | None = None,
        on_wait: Callable[[Holder], None] | None = None,
    ) -> IngestReport:
        """Ingest files and folders. Unchanged files are skipped; `prune` deletes the documents whose files are gone.

        Every argument is a path or a list of paths: `ingest("a.md", "docs/")` and `ingest(["a.md", "docs/"])` are the
        same. For bytes, pass `ragkv.ingest.from_bytes(data, name=…)`. `dry_run` reports what would be done. `memory` is
        about how much the ingest uses besides its models ("512MiB"; default: `[ingest] memory`).
        `show_progress` draws a bar, on stderr or in the notebook. `make` makes the documents in other processes
        (`ragkv.index.ingestion`).

        One ingest runs at a time. Another one waits for it, for at most `timeout` seconds; `on_wait` gets its holder.
        Raises UsageError for a missing path, IngestError if nothing could be read, StoreFullError if the disk is full
        (what was committed stays), StoreBusyError after `timeout`.
        """
        sources = flat_paths(paths)
        if dry_run:
            limits = ParseLimits.of(self.config.ingest)
            return preview(self.store, self.index.recipe.digest(), sources, prune=prune, limits=limits)
        command = " ".join(["ragkv ingest", *(p.name if isinstance(p, SourceFile) else str(p) for p in sources)])
        with (
            self.store.writing(textwrap.shorten(command, 120), timeout=timeout, on_wait=on_wait),
            ingest_bar(on_progress, show=show_progress) as notify,
        ):
            return run_ingest(
                self.index,
                self._finder,
                lambda each: each.run(sources, prune=prune, make=make),
                on_progress=notify,
                memory=memory,
            )

    def watcher(
        self, folders: Iterable[Path], *, prune: bool = False, notify: Callable[[str], object]
    ) -> FolderWatcher:
        """Finds changes in folders, for `follow`. `prune`: also the documents whose files are gone."""
        recipe = self.index.recipe.digest()
        return FolderWatcher(
            folders,
            self.store,
            lambda source, digest: is_current(self.store, source, recipe, digest),
            prune=prune,
            largest=ParseLimits.of(self.config.ingest).file,
            notify=notify,
        )

    def follow(
        self,
        changes: FolderChanges,
        *,
        memory: int | str | None = None,
        on_progress: Callable[[IngestProgress], None] | None = None,
        timeout: float | None = None,
        on_wait: Callable[[Holder], None] | None = None,
    ) -> IngestReport:
        """Ingest the files that a `watcher` has found, and delete the documents whose files are gone.

        As `ingest`, but files of which none could be read are in the report.
        """
        report = IngestReport()
        if changes.sources:
            try:
                report = self.ingest(
                    *changes.sources, memory=memory, on_progress=on_progress, timeout=timeout, on_wait=on_wait
                )
            except IngestError as error:
                report.skipped += error.skipped
        if changes.gone:
            report.pruned += self.delete(*changes.gone, timeout=timeout, on_wait=on_wait)
        return report

    def add_chunks(
        self,
        documents: Sequence[ReadyDocument],
        *,
        on_progress: Callable[[IngestProgress], None] | None = None,
        timeout: float | None = None,
        on_wait: Callable[[Holder], None] | None = None,
    ) -> IngestReport:
        """Ingest documents that another program has read and cut into chunks with ids; otherwise as `ingest`."""
        with self.store.writing(f"adding {len(documents)} documents", timeout=timeout, on_wait=on_wait):
            return run_ingest(
                self.index, self._finder, lambda each: each.run_chunks(documents), on_progress=on_progress
            )

    def query(self, question: Asked, **options: Any) -> Answer:
        """Answer one question; see `stream` for the options and errors."""
        stream = self.stream(question, **options)
        for _ in stream:
            continue
        return stream.answer

    def stream(self, question: Asked, **options: Any) -> AnswerStream:
        """Stream the answer: iterate over the text, then read `.answer`.

        The options are the fields of `Question` (`engine`, `top_k`, `decoding`, `where`, …).

        Raises UsageError for an unknown engine, `top_k` below 1, an empty question or a bad decoding setting;
        RetrievalError if no chunk matches; KVMismatchError if the index was made by another model.
        """
        return AnswerStream(self._backend, validate_task(self.config, question, **options))

    def query_many(self, questions: Iterable[Asked], **options: Any) -> list[Answer]:
        """Answer questions together, in their order; see `query_each`. The first error ends the rest and is raised."""
        return self.query_each(questions, **options).in_order()

    def query_each(self, questions: Iterable[Asked], **options: Any) -> Answers:
        """Answer questions together: an iterator of results, in the order in which they finish, with their numbers.

        `options` are those of `stream` for all questions; a question may override them: `{"question": "…", "engine":
        "ape"}`. The answers are the same as one by one. Questions are taken as there is room, so only those that are
        being answered hold KV. An error of one question is its result.
        """
        return Answers(self._backend, self.config, questions, options)

    async def aquery_many(self, questions: Iterable[Asked], **options: Any) -> list[Answer]:
        """`query_many` without blocking the event loop."""
        return await self.aquery_each(questions, **options).in_order()

    def aquery_each(self, questions: Iterable[Asked], **options: Any) -> AsyncAnswers:
        """`query_each` for `async for`; leaving it early cancels the running answers."""
        return AsyncAnswers(self.index, lambda: self.query_each(questions, **options))

    async def aquery(self, question: Asked, **options: Any) -> Answer:
        """`query` without blocking the event loop; cancelling the task stops the answer at its next token."""
        async with self.astream(question, **options) as stream:
            async for _ in stream:
                continue
        return stream.answer

    def astream(self, question: Asked, **options: Any) -> AsyncAnswerStream:
        """`stream` for `async for`: the text as it is generated, then `.answer`; errors come with the first text."""
        return AsyncAnswerStream(self.index, lambda: self.stream(question, **options))

    def conversation(
        self, *, history: History | None = None, history_tokens: int = 512, rewrite: bool | None = None
    ) -> Conversation:
        """A conversation, for questions that follow others.

        Ask with `rag.query(talk.ask(question))`, then record the turn with `talk.add(question, answer.text)`.
        `history`, `history_tokens` and `rewrite` are those of `ragkv chat`.
        """
        return Conversation.of(self.index, history=history, history_tokens=history_tokens, rewrite=rewrite)

    def retrieve(self, question: Asked, **options: Any) -> list[ScoredChunk]:
        """The best chunks for a question, best first, with raw and fused scores (PCED Eqs. 4-7).

        Of the options of `Question`, `top_k` and `SEARCH_OPTIONS` matter. With `rerank`, the reranker scores the best
        `candidates`, and the best `top_k` of these are returned. Raises UsageError for an invalid setting,
        RetrievalError if the index lacks something that the mode needs.
        """
        return self._finder.find(Question.of(question, **options))

    def sources(self, question: str, chunks: Sequence[ScoredChunk], *, answer: str = "") -> tuple[Source, ...]:
        """The chunks of `retrieve` as sources: each with its best sentences for the question, or for the answer."""
        return sources_of(chunks, question, self._finder.word_weights, answer=answer)

    def sample_questions(self, count: int = 3) -> list[str]:
        """Up to `count` questions that the documents answer, to begin with; the same ones each time. No model runs."""

        def find(question: str) -> str | None:
            found = self.retrieve(question, retrieval="bm25", rerank=False, top_k=1)
            return found[0].chunk.chunk_id if found else None

        return sample_questions(self.store, find, count)

    def chunk(self, text: str, *, chunk_id: str, document_id: str = "") -> Chunk:
        """A chunk of any text, tokenised as in the prompt. The index's KV serves it if a stored chunk has the same
        text."""
        return Chunk(
            chunk_id=chunk_id,
            document_id=document_id,
            ordinal=0,
            text=text,
            token_ids=self.index.prompt.chunk_ids(self.model.tokens, text),
            start=0,
            end=len(text),
        )

    def request(self, engine: Engine, question: str, scored: Sequence[ScoredChunk]) -> tuple[Request, KVUse]:
        """An engine's request, for programs that run an engine themselves, and how much of its KV was stored.

        Make the engine with `context=rag.config.encoding.context` to read the KV that the index stores for it.
        """
        suffix = self.index.prompt.suffix_ids(self.model.tokens, question)
        return self.kv_source.request(engine, self.kv_source.plan(engine, scored), question, suffix)

    def prove_runtime(self) -> None:
        """Have vLLM compare stored chunks with what it computes now, instead of with the first question.

        ModelServerError if they differ. Without `runtime`, or if nothing is stored for `block`, it does nothing.
        """
        from ragkv.engines import make_engine
        from ragkv.runtime.vllm import VLLMRuntime

        engine = make_engine("block", self.config.tuning, context=self.config.encoding.context)
        documents = islice(self.store.documents(), 2)
        chunks = [next(self.store.chunks(stored.document.document_id), None) for stored in documents]
        scored = [
            ScoredChunk(chunk=chunk, source="", retrieval_score=0, rerank_score=None, score=0)
            for chunk in chunks
            if chunk is not None
        ]
        reads = self.kv_source.plan(engine, scored)
        runtime = self.index.runtime
        if isinstance(runtime, VLLMRuntime) and self.store.has_many(reads.identities) == {*reads.identities} != set():
            runtime.prove(engine, self.request(engine, "", scored)[0])

    def generate_inputs(self, question: Asked, *, engine: str = "block", **options: Any) -> dict[str, Any]:
        """Arguments for the `generate` of any transformers model with these weights: `input_ids`, `attention_mask` and
        `past_key_values`, which hold the KV of prefix and chunks as engine `block` places them.

        `options` are those of `retrieve`. With `full` and `single` there is no KV, and `generate` prefills the prompt.
        UsageError for another engine, because a cache is one run of keys; UnsupportedModelError for an index whose
        runtime keeps KV in a form of its own.
        """
        from ragkv.engines import make_engine
        from ragkv.engines.block import BlockAttention
        from ragkv.engines.full import FullAttention

        chosen = make_engine(engine, self.config.tuning, context=self.config.encoding.context)
        if not isinstance(chosen, BlockAttention | FullAttention):
            raise UsageError(f"Engine {engine!r} is not one run of keys for generate; use block, full or single.")
        if why := self.model.missing_capabilities.get(Capability.TENSORS):
            raise UnsupportedModelError(
                f"generate cannot read this index: {why}; make one with --runtime transformers."
            )
        asked = Question.of(question, **options)
        chunks = self.retrieve(asked)[::-1]  # the best chunk stands next to the question
        return chosen.cache(self.model, self.request(chosen, asked.question, chunks)[0])

    def select(self, names: Sequence[str] = (), where: Sequence[str] = ()) -> list[StoredDocument]:
        """The documents that `names` select and that meet the conditions `where`; without names, all that do.

        UsageError for a name without a document or an ambiguous one, and if no document meets `where`.
        """
        return select(self.store, names, where) if names else self._finder.documents(where)

    def list_documents(
        self, names: Sequence[str] = (), where: Sequence[str] = (), *, after: str = "", limit: int | None = None
    ) -> DocumentPage:
        """The documents of `select` with their sizes, page by page: at most `limit` after the id `after`.

        `after` may also be a name as in `match`; the id of a deleted document is valid too.
        """
        if after and self.store.document(after) is None:
            with suppress(UsageError):
                found = match(list(self.store.documents()), [after])
                after = found[0].document.document_id if len(found) == 1 else after
        chosen = self.select(names, where) if names or where else None
        return list_documents(self.store, chosen, after=after, limit=limit)

    def delete(
        self, *document_ids: str, timeout: float | None = None, on_wait: Callable[[Holder], None] | None = None
    ) -> list[str]:
        """Delete documents and what only they need, and hide them in the retrieval indexes; each in its own
        transaction. Returns the ids of those that existed.
        """
        with self.store.writing("ragkv delete", timeout=timeout, on_wait=on_wait):
            gone = [document_id for document_id in document_ids if delete_document(self.index, document_id)]
            self._finder.catch_up(build=False)
            return gone

    def pack(self, path: str | Path, *, names: Sequence[str] = (), on_progress: Notify | None = None) -> Pack:
        """Write the index, or the documents that `names` select, with their KV to the new file `path`.

        `ragkv.index.pack.unpack` makes an index of the file.
        """
        return write_pack(self.index, Path(path), names=names, on_progress=on_progress)
