"""`RagKV`: an index on disk and the questions asked of it; the only place where store meets engines at query time."""

from __future__ import annotations

import logging
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from ragkv.answer import AnswerStream
from ragkv.checkpoint import MINI, resolve
from ragkv.config import CONFIG_FILE, NONE, VECTORS, IndexConfig, build_config, load_config
from ragkv.decoding import Decoding
from ragkv.errors import ConfigError, KVMismatchError, RetrievalError, UsageError
from ragkv.finder import Finder
from ragkv.ingest import Ingester, IngestProgress, IngestReport, Recipe, SourceFile, preview
from ragkv.prompt import Prompt, render
from ragkv.recall import Ahead, Keeper, Recall
from ragkv.search import MODES, Mode, Retrieval, SearchSettings
from ragkv.selection import match, where_filter
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
from ragkv.types import Answer, Encoding, KVUse, ScoredChunk
from ragkv.upkeep import (
    IndexMender,
    collect_index,
    copy_index,
    delete_document,
    repair_index,
    verify_index,
)

if TYPE_CHECKING:
    from ragkv.engines import Engine, Request
    from ragkv.model import LanguageModel
    from ragkv.retrievers import Embedder, Reranker, ScoreKind

__all__ = ["RagKV", "retrieval_defaults"]

USUAL_WIDTH = 1024  # bge-m3's; a factory string that FAISS does not know is refused before anything is embedded
NEW_CONFIG_FILE = f"{CONFIG_FILE}.new"

logger = logging.getLogger(__name__)


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
        self._embedder: Embedder | None = None
        self._reranker: Reranker | None = None
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
        from ragkv.retrievers import DenseConfig

        folder = Path(index)
        if (folder / CONFIG_FILE).exists():
            raise ConfigError(f"There is an index at {folder} already; open it, or choose another folder.")
        if folder.exists() and not (folder.is_dir() and _unfinished(folder)):
            raise ConfigError(f"{folder} is not empty and is not an index; choose another folder.")
        recommended = resolve(settings.get("model", MINI)).recommended
        defaults = {"default_engine": "block" if recommended.get("block_tuned") else "ape"}
        if "chunk_tokens" in recommended:
            defaults["chunk_tokens"] = recommended["chunk_tokens"]
        config = IndexConfig(**(defaults | retrieval_defaults(settings) | settings))
        for name in (*config.engines, config.default_engine):
            engine_class(name)
        codec = codec_from_config({"id": config.codec})
        if config.embedder != NONE:
            DenseConfig(factory=config.index_factory).check(USUAL_WIDTH)
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
        from ragkv.model import LanguageModel

        with self._lock:
            if self._model is None:
                started = time.perf_counter()
                self._model = LanguageModel.load(self.config.model, dtype=self.config.dtype, device=self._device)
                logger.info("loaded %s in %.1f s", self.config.model, time.perf_counter() - started)
            return self._model

    @property
    def embedder(self) -> Embedder | None:
        """What turns texts into vectors, loaded once; None for an index that searches by words alone."""
        from ragkv.retrievers import load_embedder

        if self.config.embedder == NONE:
            return None
        with self._lock:
            if self._embedder is None:
                modes = cast("tuple[ScoreKind, ...]", self.config.vectors)
                self._embedder = load_embedder(
                    self.config.embedder,
                    device=self._place,
                    modes=None if modes == VECTORS else modes,  # by default, whatever there is
                )
            return self._embedder

    @property
    def reranker(self) -> Reranker | None:
        """The cross-encoder that judges candidates, loaded once; None for an index without."""
        from ragkv.retrievers import load_reranker

        if self.config.reranker == NONE:
            return None
        with self._lock:
            if self._reranker is None:
                self._reranker = load_reranker(self.config.reranker, device=self._place)
            return self._reranker

    @cached_property
    def _place(self) -> str:
        from ragkv.model import pick_device

        return str(pick_device(self._device))

    @cached_property
    def embedder_fingerprint(self) -> str | None:
        """The embedder's identity now, without loading it; None for an index without vectors."""
        from ragkv.retrievers import embedder_fingerprint

        return None if self.config.embedder == NONE else embedder_fingerprint(self.config.embedder)

    def embedder_made_by(self) -> str | None:
        """Fingerprint of the embedder that made every vector of the index."""
        made = self._store.get_meta("embedder")
        return made["fingerprint"] if isinstance(made, dict) else None

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
        if dry_run:
            given = [path if isinstance(path, SourceFile) else Path(path) for path in paths]
            return preview(self._store, self.recipe.digest(), given, prune=prune)
        command = " ".join(["ragkv ingest", *(p.name if isinstance(p, SourceFile) else str(p) for p in paths)])
        with self._store.writing(textwrap.shorten(command, 120), timeout=timeout, on_wait=on_wait):
            return self._ingest(paths, prune=prune, on_progress=on_progress)

    def _ingest(
        self,
        paths: Sequence[str | Path | SourceFile],
        *,
        prune: bool,
        on_progress: Callable[[IngestProgress], None] | None,
    ) -> IngestReport:
        ingester = Ingester(
            self._store,
            self.recipe,
            lambda: self.model,
            embedder=None if self.config.embedder == NONE else lambda: cast("Embedder", self.embedder),
            on_progress=on_progress,
        )
        report = ingester.run([p if isinstance(p, SourceFile) else Path(p) for p in paths], prune=prune)
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
            embedder=self.embedder_fingerprint,
        )

    def _note_makers(self) -> None:
        """Say in the store which model and embedder made all of it; while documents of another remain, the old."""
        from ragkv.retrievers import embedder_stamp

        makers = {"model": {"name": self.config.model, "fingerprint": self.fingerprint}}
        if self.embedder_fingerprint is not None:
            name = self.config.embedder
            stamp = embedder_stamp(name)
            makers["embedder"] = {"name": name, "fingerprint": self.embedder_fingerprint, "stamp": stamp}
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
        **retrieval: Unpack[Retrieval],
    ) -> AnswerStream:
        """Answer piece by piece: iterate over the text, then read `.answer`.

        `decoding` is a `Decoding`, or a mapping of the settings that differ from the index's `[decoding]` table
        (`{"temperature": 0.7, "seed": 1}`). Processors and criteria are transformers' own kinds of object; they are
        given the generated tokens, and must not be shared between requests if they keep state. `retrieval`, `rerank`,
        `candidates` and `where` are those of `retrieve`.

        Raises UsageError for an unknown engine, `top_k` below 1, an empty question or a bad decoding setting;
        RetrievalError when no chunk matches; KVMismatchError when the index was made by another model.
        """
        from ragkv.engines import make_engine

        chosen = engine or self.config.default_engine
        limit = self.config.top_k if top_k is None else top_k
        if not question.strip():
            raise UsageError("The question is empty; ask something.")
        if limit < 1:
            raise UsageError(f"--top-k must be at least 1, not {limit}.")
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
            self._search_settings(limit, **retrieval),
            max_new_tokens,
            settings,
            logits_processors=logits_processors,
            stopping_criteria=stopping_criteria,
        )

    def retrieve(self, question: str, *, top_k: int | None = None, **retrieval: Unpack[Retrieval]) -> list[ScoredChunk]:
        """The best chunks for a question, best first, with raw and fused scores (PCED Eqs. 4-7).

        `retrieval` is a mode of `ragkv.search`; `rerank` whether the reranker judges the best `candidates` of it, of
        which `top_k` remain; `where` are conditions on documents, "source=notes/*.md". Unset: as `ragkv.toml` says.
        Raises UsageError for a wrong setting, RetrievalError when the index has not what a mode needs.
        """
        return self.find(question, self._search_settings(top_k or self.config.top_k, **retrieval))

    def find(
        self,
        question: str,
        search: SearchSettings,
        on_candidates: Callable[[list[ScoredChunk]], None] | None = None,
    ) -> list[ScoredChunk]:
        """As `retrieve`; `on_candidates` gets the likely winners before the reranker begins."""
        return self._finder.find(
            question,
            mode=search.mode,
            top_k=search.top_k,
            candidates=search.candidates,
            rerank=search.rerank,
            where=search.where,
            on_candidates=on_candidates,
        )

    def _search_settings(
        self,
        top_k: int,
        *,
        retrieval: str | None = None,
        rerank: bool | None = None,
        candidates: int | None = None,
        where: Sequence[str] = (),
    ) -> SearchSettings:
        if candidates is not None and candidates < 1:
            raise UsageError(f"--candidates must be at least 1, not {candidates}.")
        if retrieval is not None and retrieval not in MODES:
            raise UsageError(f"--retrieval must be one of {', '.join(MODES)}, not {retrieval!r}.")
        where_filter(where)
        return SearchSettings(
            mode=cast("Mode", retrieval) if retrieval else self.config.retrieval,
            top_k=top_k,
            candidates=candidates or self.config.candidates,
            rerank=self.config.reranker != NONE if rerank is None else rerank,
            where=tuple(where),
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

    def require_same_embedder(self) -> str:
        """The fingerprint of what made the vectors; RetrievalError when a question's would be another embedder's."""
        if self.config.embedder == NONE:
            raise RetrievalError(
                "This index was made without an embedder, so that it can only be searched with --retrieval bm25; "
                "to have vectors, ingest into another --index with --embedder."
            )
        made = self.embedder_made_by()
        if made is None or not (self._embedder_untouched() or made == self.embedder_fingerprint):
            raise RetrievalError(
                f"The vectors of the index at {self.folder} were made by "
                + ("no" if made is None else "another version of the")
                + f" embedder {self.config.embedder!r}; run ragkv ingest on all of its documents again, or search "
                "with --retrieval bm25."
            )
        return made

    def _embedder_untouched(self) -> bool:
        """Whether the files of the embedder have the sizes and times that they had when it made the vectors.

        A checkpoint of gigabytes is then not read whole for a question; an ingest always reads it.
        """
        from ragkv.retrievers import embedder_stamp

        made = self._store.get_meta("embedder")
        return bool(made.get("stamp") == embedder_stamp(self.config.embedder))

    def _made_by(self) -> str | None:
        """Fingerprint of the model that cut every chunk; it changes only when the last document was made anew.

        A document that is still in another model's tokens would be read as noise.
        """
        made = self._store.get_meta("model")
        return made["fingerprint"] if isinstance(made, dict) else None

    def request(
        self, engine: Engine, question: str, scored: Sequence[ScoredChunk], ahead: Ahead | None = None
    ) -> tuple[Request, KVUse]:
        """What the engine starts from, and how much of it came from the store; `ahead` has begun to load it."""
        from ragkv.engines import ContextChunk, Request

        kvs, use = self.recall.chunks(engine.encoding, scored, ahead)
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


def retrieval_defaults(settings: Mapping[str, Any]) -> dict[str, str]:
    """The mini embedder and reranker beside the mini model, unless told otherwise."""
    mini = MINI if settings.get("model", MINI) == MINI else NONE
    embedder = settings.get("embedder", mini)
    return {
        "embedder": embedder,
        "reranker": mini if embedder == MINI else NONE,
        "retrieval": "bm25" if embedder == NONE else "dense",
    }


def _encodings(engines: Sequence[str]) -> list[Encoding]:
    """What has to be stored so that these engines never miss."""
    from ragkv.engines import engine_class

    return sorted({encoding for name in engines if (encoding := engine_class(name).encoding) is not None})
