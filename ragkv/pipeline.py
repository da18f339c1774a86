"""`RagKV`: an index on disk and the questions asked of it; the only place where store meets engines at query time."""

from __future__ import annotations

import asyncio
import logging
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from ragkv.config import CONFIG_FILE, NONE, IndexConfig, build_config, load_config
from ragkv.decoding import Decoding
from ragkv.errors import ConfigError, KVMismatchError, UsageError
from ragkv.index.answer import AnswerStream
from ragkv.index.background import AsyncAnswerStream
from ragkv.index.encoders import Encoders, check_factory, retrieval_defaults
from ragkv.index.finder import Finder
from ragkv.index.recall import Ahead, Keeper, Recall
from ragkv.index.search import Retrieval, SearchSettings, search_settings
from ragkv.index.selection import match
from ragkv.index.upkeep import (
    IndexMender,
    collect_index,
    copy_index,
    delete_document,
    repair_index,
    verify_index,
)
from ragkv.ingest import Ingester, IngestProgress, IngestReport, ReadyDocument, Recipe, SourceFile, preview
from ragkv.model.checkpoint import MINI, resolve
from ragkv.model.prompt import Prompt, render
from ragkv.store import (
    STORE_FILES,
    Collection,
    Copy,
    DocumentStats,
    Holder,
    MemoryUse,
    Notify,
    Repair,
    Store,
    StoredDocument,
    StoreStats,
    Verification,
    codec_from_config,
)
from ragkv.types import Answer, Chunk, Encoding, KVUse, ScoredChunk

if TYPE_CHECKING:
    from ragkv.engines import Engine, Request
    from ragkv.model.language import LanguageModel
    from ragkv.retrievers import Embedder, Reranker

__all__ = ["QueryOptions", "RagKV", "new_config"]

NEW_CONFIG_FILE = f"{CONFIG_FILE}.new"

logger = logging.getLogger(__name__)


class QueryOptions(Retrieval, total=False):
    """What `RagKV.stream` takes besides the question."""

    engine: str | None
    top_k: int | None
    max_new_tokens: int
    decoding: Decoding | Mapping[str, Any] | None
    logits_processors: Sequence[Any]
    stopping_criteria: Sequence[Any]
    chunks: Sequence[ScoredChunk] | None
    keep: bool


class RagKV:
    """An index: documents, chunks and their KV, and the model that reads them.

    Make one with `create`, reopen it with `open`; both are context managers. The model is loaded when a question or
    a changed document first needs it. Threads may share one; engines keep nothing between requests.
    """

    def __init__(self, folder: Path, config: IndexConfig, store: Store, *, device: str | None = None) -> None:
        self.folder = folder
        self.config = config
        self._store = store
        self._device = device
        self._lock = threading.RLock()
        self._model: LanguageModel | None = None
        self.encoders = Encoders(folder, config, store, device)
        """Its embedder and reranker, and whose vectors it holds."""
        self._keeper = Keeper(store)
        self._finder = Finder(self, self._keeper)
        self.recall = Recall(self, self._keeper)
        """The KV of the index's chunks, for its model and prompt."""

    @classmethod
    def create(cls, index: str | Path, *, device: str | None = None, **settings: Any) -> Self:
        """Make an index; `settings` are the fields of `IndexConfig` (`model="mini"`, `chunk_tokens=…`, `codec=…`).

        Unset, `chunk_tokens` and `default_engine` are what the checkpoint recommends; `embedder` and `reranker` are
        the mini ones beside the mini model, and none beside any other (they know nothing of the real world). Raises
        ConfigError when the folder holds something else, ModelLoadError when there is no such model.
        """
        from ragkv.engines import engine_class

        folder = Path(index)
        if (folder / CONFIG_FILE).exists():
            raise ConfigError(f"There is an index at {folder} already; open it, or choose another folder.")
        if folder.exists() and not (folder.is_dir() and _unfinished(folder)):
            raise ConfigError(f"{folder} is not empty and is not an index; choose another folder.")
        config = new_config(settings)
        for name in (*config.engines, config.default_engine):
            engine_class(name)
        codec = codec_from_config({"id": config.codec})
        check_factory(config)
        store = Store.create(folder, codec=codec, exist_ok=True)
        try:
            with store.writing("making the index", timeout=10):
                if (folder / CONFIG_FILE).exists():  # made by another process since we looked
                    raise ConfigError(f"There is an index at {folder} already; open it, or choose another folder.")
                # the configuration comes last: a folder without it is not an index yet
                fresh = folder / NEW_CONFIG_FILE
                fresh.write_text(config.to_toml(), encoding="utf-8")
                fresh.replace(folder / CONFIG_FILE)
        except BaseException:
            store.close()
            raise
        return cls(folder, config, store, device=device)

    @classmethod
    def open(cls, index: str | Path, *, device: str | None = None, readonly: bool | None = None) -> Self:
        """Open an index. Raises ConfigError when there is none, StoreError when it cannot be read.

        `readonly` None: writable where the system permits it. An index that may not be written answers all the same;
        what a question has to encode is then not kept.
        """
        folder = Path(index)
        config = load_config(folder)
        store = Store.open(folder, readonly=readonly, codec=codec_from_config({"id": config.codec}))
        return cls(folder, config, store, device=device)

    def close(self) -> None:
        """Close the store; the model is freed with the object."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def store(self) -> Store:
        """The documents and KV themselves, for those who look after an index rather than ask it."""
        return self._store

    @property
    def model(self) -> LanguageModel:
        """The generation model, loaded once and proved exact."""
        from ragkv.model.language import LanguageModel

        with self._lock:
            if self._model is None:
                started = time.perf_counter()
                self._model = LanguageModel.load(self.config.model, dtype=self.config.dtype, device=self._device)
                logger.info("loaded %s in %.1f s", self.config.model, time.perf_counter() - started)
            return self._model

    @property
    def embedder(self) -> Embedder | None:
        """What turns texts into vectors, loaded once; None for an index that searches by words alone."""
        return self.encoders.embedder

    @property
    def reranker(self) -> Reranker | None:
        """The cross-encoder that judges candidates, loaded once; None for an index without."""
        return self.encoders.reranker

    @cached_property
    def fingerprint(self) -> str:
        """The model's identity now; a local checkpoint is hashed without being loaded."""
        checkpoint = resolve(self.config.model)
        revision = None if checkpoint.local else self.model.revision
        return checkpoint.fingerprint(self.config.dtype, revision)

    @cached_property
    def prompt(self) -> Prompt:
        """The prompt's parts; kept in the store, made anew when the model or `[prompt]` changed."""
        wanted = {"model": self.fingerprint, "config": asdict(self.config.prompt)}
        kept = self._store.get_meta("prompt")
        if isinstance(kept, dict) and {k: kept.get(k) for k in wanted} == wanted:
            return Prompt(**kept["parts"])
        prompt = render(self.config.prompt, self.model.tokens)
        # the prefix's ids tell `gc` which prefix is in use, without the model
        ids = prompt.prefix_ids(self.model.tokens)
        self._keeper.keep(
            lambda: self._store.put_meta("prompt", {**wanted, "parts": asdict(prompt), "prefix_ids": ids})
        )
        return prompt

    def ingest(
        self,
        *paths: str | Path | SourceFile,
        prune: bool = False,
        dry_run: bool = False,
        on_progress: Callable[[IngestProgress], None] | None = None,
        timeout: float | None = None,
        on_wait: Callable[[Holder], None] | None = None,
    ) -> IngestReport:
        """Ingest files and folders; what did not change is left alone, `prune` drops what is gone.

        Bytes that are no file come as `ragkv.ingest.supplied(data, name=…)`. `dry_run` reports what would be done.

        One ingest runs at a time: the next one waits for it (`on_wait` is told for whom), `timeout` seconds at most.
        Raises UsageError for a missing path, IngestError when nothing could be read, StoreFullError when the disk is
        full (everything committed before stays), StoreBusyError when the time is over.
        """
        given = [path if isinstance(path, SourceFile) else Path(path) for path in paths]
        if dry_run:
            return preview(self._store, self.recipe.digest(), given, prune=prune)
        command = " ".join(["ragkv ingest", *(p.name if isinstance(p, SourceFile) else str(p) for p in paths)])
        with self._store.writing(textwrap.shorten(command, 120), timeout=timeout, on_wait=on_wait):
            return self._ingest(lambda ingester: ingester.run(given, prune=prune), on_progress=on_progress)

    def add_chunks(
        self,
        documents: Sequence[ReadyDocument],
        *,
        on_progress: Callable[[IngestProgress], None] | None = None,
        timeout: float | None = None,
        on_wait: Callable[[Holder], None] | None = None,
    ) -> IngestReport:
        """Ingest documents that another program has read and cut, their chunk ids kept; else as `ingest`."""
        with self._store.writing(f"adding {len(documents)} documents", timeout=timeout, on_wait=on_wait):
            return self._ingest(lambda ingester: ingester.run_chunks(documents), on_progress=on_progress)

    def _ingest(
        self, run: Callable[[Ingester], IngestReport], *, on_progress: Callable[[IngestProgress], None] | None
    ) -> IngestReport:
        ingester = Ingester(
            self._store,
            self.recipe,
            lambda: self.model,
            embedder=None if self.config.embedder == NONE else lambda: cast("Embedder", self.embedder),
            before_writing=self._note_makers_of_nothing,
            on_progress=on_progress,
        )
        report = run(ingester)
        self._note_makers()
        return report

    @property
    def recipe(self) -> Recipe:
        """How a document becomes chunks, KV and vectors now."""
        return Recipe.of(
            self.config,
            model=self.fingerprint,
            prompt=self.prompt,
            encodings=_encodings(self.config.engines),
            embedder=self.encoders.fingerprint,
        )

    def _note_makers_of_nothing(self) -> None:
        """Of an empty index, already now: what an ingest leaves behind that does not come to its end is all theirs."""
        if next(self._store.documents(), None) is None:
            self._note_makers()

    def _note_makers(self) -> None:
        """Say in the store which model and embedder made all of it; while documents of another remain, the old."""
        makers: dict[str, dict[str, str]] = {"model": {"name": self.config.model, "fingerprint": self.fingerprint}}
        if (embedder := self.encoders.fact()) is not None:
            makers["embedder"] = embedder
        kept = {kind: self._store.get_meta(kind) for kind in makers}
        if any(kept[kind] and kept[kind]["fingerprint"] != made["fingerprint"] for kind, made in makers.items()):
            digest = self.recipe.digest()
            if any(stored.recipe != digest for stored in self._store.documents()):
                return
        for kind, made in makers.items():
            if kept[kind] != made:
                self._store.put_meta(kind, made)

    def query(
        self,
        question: str,
        *,
        engine: str | None = None,
        top_k: int | None = None,
        max_new_tokens: int = 128,
        decoding: Decoding | Mapping[str, Any] | None = None,
        logits_processors: Sequence[Any] = (),
        stopping_criteria: Sequence[Any] = (),
        chunks: Sequence[ScoredChunk] | None = None,
        keep: bool = False,
        **retrieval: Unpack[Retrieval],
    ) -> Answer:
        """Answer one question; see `stream` for the arguments and errors."""
        stream = self.stream(
            question,
            engine=engine,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            decoding=decoding,
            logits_processors=logits_processors,
            stopping_criteria=stopping_criteria,
            chunks=chunks,
            keep=keep,
            **retrieval,
        )
        for _ in stream:
            continue
        return stream.answer

    def stream(
        self,
        question: str,
        *,
        engine: str | None = None,
        top_k: int | None = None,
        max_new_tokens: int = 128,
        decoding: Decoding | Mapping[str, Any] | None = None,
        logits_processors: Sequence[Any] = (),
        stopping_criteria: Sequence[Any] = (),
        chunks: Sequence[ScoredChunk] | None = None,
        keep: bool = False,
        **retrieval: Unpack[Retrieval],
    ) -> AnswerStream:
        """Answer piece by piece: iterate over the text, then read `.answer`.

        `decoding` is a `Decoding`, or a mapping of the settings that differ from the index's `[decoding]` table
        (`{"temperature": 0.7, "seed": 1}`). Processors and criteria are transformers' own kinds of object; they are
        given the generated tokens, and must not be shared between requests if they keep state. `retrieval`, `rerank`,
        `candidates` and `where` are those of `retrieve`; `search_for` is what to search by, in place of the question.

        `chunks`, best first, are answered from instead of what `retrieve` finds; they need not be the index's own
        (`chunk` makes one of any text), and with `keep` the KV of those that are not is stored until the next `gc`.

        Raises UsageError for an unknown engine, `top_k` below 1, an empty question or a bad decoding setting;
        RetrievalError when no chunk matches; KVMismatchError when the index was made by another model.
        """
        from ragkv.engines import make_engine

        chosen = engine or self.config.default_engine
        limit = self.config.top_k if top_k is None else top_k
        if not question.strip():
            raise UsageError("The question is empty; ask something.")
        if max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens must be at least 1, not {max_new_tokens}.")
        if isinstance(decoding, Decoding):
            settings = decoding
        else:
            settings = build_config(Decoding, asdict(self.config.decoding) | dict(decoding or {}), "decoding")
        return AnswerStream(
            self,
            question.strip(),
            make_engine(chosen, self.config.tuning),
            search_settings(self.config, limit, **retrieval),
            max_new_tokens,
            settings,
            logits_processors=logits_processors,
            stopping_criteria=stopping_criteria,
            chunks=chunks,
            keep=keep,
        )

    def query_many(self, questions: Iterable[str], **options: Unpack[QueryOptions]) -> list[Answer]:
        """Answer questions one after another, in their order; `options` are those of `stream`.

        Chunks and prefix that several of them need are read from the store once, as far as `memory_budget` goes: the
        later questions find them in memory (`kv.memory_hits`). Answers are those of asking one by one.
        """
        return [self.query(question, **options) for question in questions]

    async def aquery(self, question: str, **options: Unpack[QueryOptions]) -> Answer:
        """`query` without blocking the event loop; cancelling the task ends the answer at its next token."""
        async with self.astream(question, **options) as stream:
            async for _ in stream:
                continue
        return stream.answer

    def astream(self, question: str, **options: Unpack[QueryOptions]) -> AsyncAnswerStream:
        """`stream` for `async for`: the text piece by piece, then `.answer`; errors come with the first piece."""
        return AsyncAnswerStream(lambda: self.stream(question, **options))

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

    def retrieve(self, question: str, *, top_k: int | None = None, **retrieval: Unpack[Retrieval]) -> list[ScoredChunk]:
        """The best chunks for a question, best first, with raw and fused scores (PCED Eqs. 4-7).

        `retrieval` is a mode of `ragkv.index.search`; `rerank` whether the reranker judges the best `candidates` of it,
        of which `top_k` remain; `where` are conditions on documents, "source=notes/*.md". Unset: as `ragkv.toml` says.
        Raises UsageError for a wrong setting, RetrievalError when the index has not what a mode needs.
        """
        return self.find(question, search_settings(self.config, top_k or self.config.top_k, **retrieval))

    def find(
        self,
        question: str,
        search: SearchSettings,
        on_candidates: Callable[[list[ScoredChunk]], None] | None = None,
    ) -> list[ScoredChunk]:
        """As `retrieve`; `on_candidates` gets the likely winners before the reranker begins."""
        return self._finder.find(
            search.search_for or question,
            mode=search.mode,
            top_k=search.top_k,
            candidates=search.candidates,
            rerank=search.rerank,
            where=search.where,
            on_candidates=on_candidates,
        )

    def stats(self) -> StoreStats:
        """Counts and sizes of the store."""
        return self._store.stats()

    def document_stats(self) -> list[DocumentStats]:
        """Each document's part of the store, in the order of their ids."""
        return list(self._store.document_stats())

    # Upkeep (docs/operations.md). What writes takes the writer's lock, as an ingest does; `timeout` and `on_wait` are
    # those of `ingest`.

    def verify(self, *, quick: bool = False, on_progress: Notify | None = None) -> Verification:
        """Check every row, checksum and reference; `quick` leaves out the payloads of KV."""
        return verify_index(self, self._store, quick=quick, on_progress=on_progress)

    def repair(
        self,
        *,
        encode: bool = True,
        dry_run: bool = False,
        timeout: float | None = None,
        on_wait: Callable[[Holder], None] | None = None,
        on_progress: Notify | None = None,
    ) -> Repair:
        """Put right what `verify` finds; the model is loaded when KV has to be made again.

        `encode=False` drops bad KV, which the first question that asks for it makes again.
        """
        mender = IndexMender(self, _encodings(self.config.engines))
        with nullcontext() if dry_run else self._store.writing("ragkv repair", timeout=timeout, on_wait=on_wait):
            return repair_index(self, self._store, mender, encode=encode, dry_run=dry_run, on_progress=on_progress)

    def gc(
        self,
        *,
        dry_run: bool = False,
        timeout: float | None = None,
        on_wait: Callable[[Holder], None] | None = None,
        on_progress: Notify | None = None,
    ) -> Collection:
        """Drop what nothing needs: orphan KV, old prefixes' KV, stale derived files.

        Only while no ingest runs: until its document is complete, what it has staged looks like garbage.
        """
        with nullcontext() if dry_run else self._store.writing("ragkv gc", timeout=timeout, on_wait=on_wait):
            return collect_index(self, self._store, dry_run=dry_run, on_progress=on_progress)

    def backup(self, path: str | Path, *, verify: bool = False, on_progress: Notify | None = None) -> Copy:
        """A copy of the index at `path`, of one moment, while others read and write."""
        return copy_index(self, self._store, Path(path), compact=False, verify=verify, on_progress=on_progress)

    def compact(self, path: str | Path, *, verify: bool = False, on_progress: Notify | None = None) -> Copy:
        """As `backup`, without free pages: smaller, and rid of what was deleted."""
        return copy_index(self, self._store, Path(path), compact=True, verify=verify, on_progress=on_progress)

    def match(self, names: Sequence[str]) -> list[StoredDocument]:
        """The documents that ids, source names, paths or patterns mean; UsageError for none or, unasked, several."""
        return match(list(self._store.documents()), names)

    def delete(
        self, document_id: str, *, timeout: float | None = None, on_wait: Callable[[Holder], None] | None = None
    ) -> bool:
        """Drop a document and all that only it needed, the retrieval index with its words too; False when there is
        none."""
        with self._store.writing("ragkv delete", timeout=timeout, on_wait=on_wait):
            return delete_document(self, self._store, document_id)

    @property
    def derived(self) -> Path:
        """Folder of the retrieval indexes."""
        return self.folder / "derived"

    def require_same_model(self) -> None:
        """Refuse to read chunks that another version of the model has cut and encoded: KVMismatchError."""
        made = self._made_by()
        if made is not None and made != self.fingerprint:
            raise KVMismatchError(
                f"The index at {self.folder} was made by another version of model {self.config.model!r} than the one "
                "there now; run ragkv ingest on all of its documents again, or put the model back."
            )

    def _made_by(self) -> str | None:
        """Fingerprint of the model that cut every chunk; it changes only when the last document was made anew.

        A document that is still in another model's tokens would be read as noise.
        """
        made = self._store.get_meta("model")
        return made["fingerprint"] if isinstance(made, dict) else None

    def request(
        self,
        engine: Engine,
        question: str,
        scored: Sequence[ScoredChunk],
        ahead: Ahead | None = None,
        *,
        keep: bool = False,
    ) -> tuple[Request, KVUse]:
        """What the engine starts from, and how much of it came from the store.

        `ahead` has begun to load it; `keep` is `stream`'s.
        """
        from ragkv.engines import ContextChunk, Request

        kvs, use = self.recall.chunks(engine.encoding, scored, ahead, keep=keep)
        request = Request(
            prefix_ids=self.recall.prefix_ids,
            prefix=None if engine.encoding is None else self.recall.prefix(),
            chunks=tuple(
                ContextChunk(token_ids=s.chunk.token_ids, score=s.score, kv=kv)
                for s, kv in zip(scored, kvs, strict=True)
            ),
            suffix_ids=self.prompt.suffix_ids(self.model.tokens, question),
            question=question,
            prompt=self.prompt,
        )
        return request, use

    def memory_use(self) -> MemoryUse:
        """What this process keeps of the index's KV in memory, and how often that was of use; loads the model."""
        return self.recall.memory().use()


def _unfinished(folder: Path) -> bool:
    """Whether all that is in the folder is what a `create` that was killed leaves behind, or nothing."""
    store = folder / "store"
    inside = {path.name for path in store.iterdir()} if store.is_dir() else set()
    return {path.name for path in folder.iterdir()} <= {"store", NEW_CONFIG_FILE} and inside <= STORE_FILES


def new_config(settings: Mapping[str, Any]) -> IndexConfig:
    """What `create` makes of `settings`: those that are not set follow from the model."""
    recommended = resolve(settings.get("model", MINI)).recommended
    defaults = {"default_engine": "block" if recommended.get("block_tuned") else "ape"}
    if "chunk_tokens" in recommended:
        defaults["chunk_tokens"] = recommended["chunk_tokens"]
    return IndexConfig(**(defaults | retrieval_defaults(settings) | dict(settings)))


def _encodings(engines: Sequence[str]) -> list[Encoding]:
    """What has to be stored so that these engines never miss."""
    from ragkv.engines import engine_class

    return sorted({encoding for name in engines if (encoding := engine_class(name).encoding) is not None})
