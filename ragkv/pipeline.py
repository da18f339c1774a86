"""`RagKV`: an index on disk and the questions asked of it; the only place where store meets engines at query time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ragkv.answer import AnswerStream
from ragkv.checkpoint import MINI, resolve
from ragkv.config import CONFIG_FILE, IndexConfig, load_config
from ragkv.errors import ConfigError, KVMismatchError, RetrievalError, StoreError, UsageError
from ragkv.ingest import Ingester, IngestProgress, IngestReport, Recipe
from ragkv.prompt import Prompt, render
from ragkv.retrievers import BM25, Retriever, fuse, normalise_retrieval
from ragkv.store import KVIdentity, Store, StoreStats, codec_from_config
from ragkv.types import Answer, Encoding, KVUse, ScoredChunk

if TYPE_CHECKING:
    from ragkv.engines import Engine, Request
    from ragkv.kv import ChunkKV
    from ragkv.model import LanguageModel

__all__ = ["RagKV"]

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
        self._retriever: Retriever | None = None

    @classmethod
    def create(cls, index: str | Path, *, device: str | None = None, **settings: Any) -> Self:
        """Make an index; `settings` are the fields of `IndexConfig` (`model="mini"`, `chunk_tokens=…`, `codec=…`).

        Unset, `chunk_tokens` and `default_engine` are what the checkpoint recommends. Raises ConfigError when the
        folder holds something else, ModelLoadError when there is no such model.
        """
        from ragkv.engines import engine_class

        folder = Path(index)
        if (folder / CONFIG_FILE).exists():
            raise ConfigError(f"There is an index at {folder} already; open it, or choose another folder.")
        begun = Store.exists(folder)  # a create that was killed before its last step left an empty store
        if folder.exists() and (
            not folder.is_dir() or {p.name for p in folder.iterdir()} - ({"store"} if begun else set())
        ):
            raise ConfigError(f"{folder} is not empty and is not an index; choose another folder.")
        recommended = resolve(settings.get("model", MINI)).recommended
        defaults = {"default_engine": "block" if recommended.get("block_tuned") else "ape"}
        if "chunk_tokens" in recommended:
            defaults["chunk_tokens"] = recommended["chunk_tokens"]
        config = IndexConfig(**(defaults | settings))
        for name in (*config.engines, config.default_engine):
            engine_class(name)
        codec = codec_from_config({"id": config.codec})
        folder.mkdir(parents=True, exist_ok=True)
        store = Store.open(folder, codec=codec) if begun else Store.create(folder, codec=codec)
        # the configuration comes last: a folder without it is not an index yet
        fresh = folder / f"{CONFIG_FILE}.new"
        fresh.write_text(config.to_toml(), encoding="utf-8")
        fresh.replace(folder / CONFIG_FILE)
        return cls(folder, config, store, device=device)

    @classmethod
    def open(cls, index: str | Path, *, device: str | None = None) -> Self:
        """Open an index. Raises ConfigError when there is none, StoreError when it cannot be read."""
        folder = Path(index)
        config = load_config(folder)
        store = Store.open(folder, codec=codec_from_config({"id": config.codec}))
        return cls(folder, config, store, device=device)

    def close(self) -> None:
        """Close the store; the model is freed with the object."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        self._store.put_meta("prompt", {**wanted, "parts": asdict(prompt)})
        return prompt

    @cached_property
    def _prefix_ids(self) -> tuple[int, ...]:
        return self.prompt.prefix_ids(self.model.tokens)

    def ingest(
        self,
        *paths: str | Path,
        prune: bool = False,
        on_progress: Callable[[IngestProgress], None] | None = None,
    ) -> IngestReport:
        """Ingest files and folders; what did not change is left alone, `prune` drops what is gone.

        Raises UsageError for a missing path, IngestError when nothing could be read, StoreFullError when the disk is
        full (everything committed before stays).
        """
        recipe = Recipe.of(
            self.config,
            model=self.fingerprint,
            prompt=self.prompt,
            encodings=_encodings(self.config.engines),
        )
        ingester = Ingester(self._store, recipe, lambda: self.model, on_progress=on_progress)
        report = ingester.run([Path(p) for p in paths], prune=prune)
        made = self._made_by()
        if (
            made is None
            or made == self.fingerprint
            or all(d.recipe == recipe.digest() for d in self._store.documents())
        ):
            self._store.put_meta("model", {"name": self.config.model, "fingerprint": self.fingerprint})
        self._retriever = None
        return report

    def query(
        self, question: str, *, engine: str | None = None, top_k: int | None = None, max_new_tokens: int = 128
    ) -> Answer:
        """Answer one question; see `stream` for the arguments and errors."""
        stream = self.stream(question, engine=engine, top_k=top_k, max_new_tokens=max_new_tokens)
        for _ in stream:
            continue
        return stream.answer

    def stream(
        self, question: str, *, engine: str | None = None, top_k: int | None = None, max_new_tokens: int = 128
    ) -> AnswerStream:
        """Answer piece by piece: iterate over the text, then read `.answer`.

        Raises UsageError for an unknown engine, `top_k` below 1 or an empty question; RetrievalError when no chunk
        matches; KVMismatchError when the index was made by another model.
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
        return AnswerStream(self, question.strip(), make_engine(chosen, self.config.tuning), limit, max_new_tokens)

    def retrieve(self, question: str, *, top_k: int | None = None) -> list[ScoredChunk]:
        """The best chunks for a question, best first, with raw and fused scores (PCED Eqs. 4-7)."""
        retriever = self._ready_retriever()
        hits = retriever.search(question, top_k or self.config.top_k)
        chunks = self._store.chunk_many(hit.chunk_id for hit in hits)
        documents = {chunk.document_id for chunk in chunks.values()}
        sources = {d: found.document.source for d in documents if (found := self._store.document(d))}
        return [
            ScoredChunk(
                chunk=chunk,
                source=sources.get(chunk.document_id, chunk.document_id),
                retrieval_score=hit.score,
                rerank_score=None,
                score=fuse(normalise_retrieval(hit.score, retriever.score_kind), None),
            )
            for hit in hits
            if (chunk := chunks.get(hit.chunk_id)) is not None  # gone since the retriever was built
        ]

    def stats(self) -> StoreStats:
        """Counts and sizes of the store."""
        return self._store.stats()

    def _ready_retriever(self) -> Retriever:
        """The retrieval index at the store's generation: kept, read from disk, or built again."""
        with self._lock:
            generation = self._store.generation
            if self._retriever is not None and self._retriever.generation == generation:
                return self._retriever
            folder = self.folder / "derived" / self.config.retrieval
            try:
                found: Retriever = BM25.load(folder)
            except RetrievalError as error:
                logger.info("retrieval index is built again: %s", error)
                found = BM25()
            if found.generation != generation:
                found = BM25()
                found.build(((chunk.chunk_id, chunk.text) for chunk in self._store.chunks()), generation)
                try:
                    found.save(folder)
                except RetrievalError as error:  # no room, or a read-only index: it still answers
                    logger.warning("retrieval index is not kept: %s", error)
            self._retriever = found
            return found

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

    def request(self, engine: Engine, question: str, scored: Sequence[ScoredChunk]) -> tuple[Request, KVUse]:
        """What the engine starts from, and how much of it came from the store."""
        from ragkv.engines import ContextChunk, Request

        kvs, use = self._load_kv(engine, scored)
        request = Request(
            prefix_ids=self._prefix_ids,
            prefix=None if engine.encoding is None else self._prefix_kv(),
            chunks=tuple(
                ContextChunk(
                    token_ids=s.chunk.token_ids,
                    score=s.score,
                    kv=None if kv is None else kv.to(self.model.device),
                )
                for s, kv in zip(scored, kvs, strict=True)
            ),
            suffix_ids=self.prompt.suffix_ids(self.model.tokens, question),
        )
        return request, use

    def _load_kv(self, engine: Engine, chunks: Sequence[ScoredChunk]) -> tuple[list[ChunkKV | None], KVUse]:
        """Each chunk's KV in the engine's encoding: from the store, or encoded now and stored."""
        if engine.encoding is None:
            return [None] * len(chunks), KVUse(hits=0, misses=0, bytes=0, tokens=0)
        identities = [self._identity(engine.encoding, scored.chunk.token_ids) for scored in chunks]
        found = {identity: self._store.get_kv(identity) for identity in dict.fromkeys(identities)}
        hits = [kv for identity in identities if (kv := found[identity]) is not None]
        lost = [identity for identity, kv in found.items() if kv is None]
        if lost:
            prefix = self._prefix_kv() if engine.encoding is Encoding.PREFIXED else None
            encoded = self.model.encode([identity.chunk_ids for identity in lost], prefix=prefix)
            found.update(zip(lost, encoded, strict=True))
            owners = {identity: scored.chunk.chunk_id for identity, scored in zip(identities, chunks, strict=True)}
            self._keep(
                lambda: [
                    self._store.put_kv(identity, kv, chunk_id=owners[identity])
                    for identity, kv in zip(lost, encoded, strict=True)
                ]
            )
        use = KVUse(
            hits=len(hits),
            misses=len(chunks) - len(hits),
            bytes=sum(kv.nbytes for kv in hits),
            tokens=sum(kv.tokens for kv in hits),
        )
        return [found[identity] for identity in identities], use

    def _keep(self, write: Callable[[], object]) -> None:
        """Store what a query had to encode; an index that cannot be written still answers."""
        try:
            write()
        except StoreError as error:
            logger.warning("encoded KV is not kept: %s", error)

    def _prefix_kv(self) -> ChunkKV:
        """The prefix's own KV, standalone; from the store after its first use."""
        identity = self._identity(Encoding.STANDALONE, self._prefix_ids)
        kv = self._store.get_kv(identity)
        if kv is None:
            [made] = self.model.encode([self._prefix_ids])
            self._keep(lambda: self._store.keep_kv(identity, made))
            return made
        return kv

    def _identity(self, encoding: Encoding, chunk_ids: tuple[int, ...]) -> KVIdentity:
        return KVIdentity(
            model=self.fingerprint,
            encoding=encoding,
            prefix_ids=self._prefix_ids if encoding is Encoding.PREFIXED else (),
            chunk_ids=chunk_ids,
        )


def _encodings(engines: Sequence[str]) -> list[Encoding]:
    """What has to be stored so that these engines never miss."""
    from ragkv.engines import engine_class

    return sorted({encoding for name in engines if (encoding := engine_class(name).encoding) is not None})
