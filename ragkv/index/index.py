"""An open index: its folder, its configuration, its store, and the models that it was built with.

Recall, search, upkeep and answers take an `Index`, so that they depend on it and not on each other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.config import IndexConfig, RuntimeConfig, load_config
from ragkv.errors import AnswerInterruptedError, CorruptStoreError, KVMismatchError
from ragkv.index.budget import memory_budget, memory_of
from ragkv.index.encoders import Encoders
from ragkv.index.fact import read_fact
from ragkv.index.keeper import Keeper
from ragkv.index.loaded import Loaded
from ragkv.ingest import Recipe
from ragkv.model.checkpoint import resolve
from ragkv.model.prompt import Prompt, render
from ragkv.store import Store
from ragkv.types import Encoding, ScoredChunk

if TYPE_CHECKING:
    from ragkv.attention.shape import KVShape
    from ragkv.engines.apb import APBConfig
    from ragkv.model.language import LanguageModel
    from ragkv.runtime import Limits, Runtime

__all__ = ["Index"]

logger = logging.getLogger(__name__)


class Index:
    """An open index. Models load when they are first needed; threads may share an index.

    `device` None is CUDA if there is one, else the CPU. `loaded` holds models that the caller has already loaded.
    `limits` override those of `[runtime]`.
    """

    def __init__(
        self,
        folder: Path,
        config: IndexConfig,
        store: Store,
        *,
        device: str | None = None,
        loaded: Loaded | None = None,
        limits: RuntimeConfig | None = None,
    ) -> None:
        self.folder = folder
        self.config = config
        self.store = store
        self.keeper = Keeper(store, self.open_budget, statistics=config.kv == "all" and config.budget is None)
        embedder, reranker = (None, None) if loaded is None else (loaded.embedder, loaded.reranker)
        self.encoders = Encoders(folder, config, store, device, embedder=embedder, reranker=reranker)
        """The embedder and reranker, and which embedder made the vectors."""
        self.device = device
        self._lock = threading.RLock()
        self._closed = False
        self._budgeted = False
        self._threads: set[threading.Thread] = set()
        self._model: LanguageModel | None = None if loaded is None else loaded.model
        self.limits = config.runtime if limits is None else config.runtime.overridden(limits)
        """How many questions are answered at a time."""
        self._runtime: Runtime | None = None

    @property
    def derived(self) -> Path:
        """The folder of the retrieval indexes, which are made from the store and may be deleted at any time."""
        return self.folder / "derived"

    @property
    def model(self) -> LanguageModel:
        """The generation model, loaded once and proved exact."""
        from ragkv.model.language import LanguageModel

        with self._lock:
            if self._model is None:
                started = time.perf_counter()
                self._model = LanguageModel.load(self.config.model, dtype=self.config.dtype, device=self.device)
                logger.info("loaded %s in %.1f s", self.config.model, time.perf_counter() - started)
            return self._model

    @property
    def runtime(self) -> Runtime:
        """Where the index's questions are answered, those of all threads together."""
        from ragkv.runtime import runtime_of

        with self._lock:
            if self._runtime is None:
                self._runtime = runtime_of(self.model, self.run_limits)
                self.store.spare(self._runtime.pool.holds)
                if self._closed:  # meanwhile
                    self._runtime.close(self, self._interrupted)
            return self._runtime

    @property
    def run_limits(self) -> Limits:
        """How much its runtime does at a time: what the user has set, the rest from this machine's memory."""
        from ragkv.runtime import limits_for

        place = self.model.place
        budget = memory_budget(self.config.memory_budget, place)
        return limits_for(self.model, memory=memory_of(place), budget=budget, **self.limits.given)

    def close(self) -> None:
        """End the answers that are on their way (AnswerInterruptedError), then close the store."""
        self._closed = True
        if self._runtime is not None:
            self._runtime.close(self, self._interrupted)
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join()
        self.keeper.close()
        self.store.close()

    def require_open(self) -> None:
        """AnswerInterruptedError once the index was closed: for what began before."""
        if self._closed:
            raise AnswerInterruptedError(self._interrupted)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def _interrupted(self) -> str:
        return f"The index at {self.folder} was closed before the answer was finished."

    def start_thread(self, work: Callable[[], object], *, name: str) -> threading.Thread:
        """A running thread that `close` waits for: none outlives the index."""

        def run() -> None:
            try:
                work()
            finally:
                self._threads.discard(thread)

        thread = threading.Thread(target=run, name=name)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.discard(thread)
            raise
        return thread

    def open_budget(self) -> None:
        """Bring the store's budget up to the one in `ragkv.toml`, which may have been edited since it was opened."""
        if not self._budgeted:
            self._budgeted = True
            self.store.set_budget(load_config(self.folder).budget)

    @property
    def loaded_model(self) -> LanguageModel | None:
        """The model if it is loaded, else None; asking does not load it."""
        return self._model

    @cached_property
    def fingerprint(self) -> str:
        """The model's identity now; a local checkpoint is hashed without being loaded."""
        checkpoint = resolve(self.config.model)
        revision = None if checkpoint.local else self.model.revision
        return checkpoint.fingerprint(self.config.dtype, revision, device=self.device)

    @cached_property
    def prompt(self) -> Prompt:
        """The parts of the prompt. They are kept in the store, and made again when the model or `[prompt]` changes."""
        wanted = {"model": self.fingerprint, "config": self.config.prompt.facts()}
        kept = self._kept_prompt()
        if kept is not None and kept.get("parts") and {k: kept.get(k) for k in wanted} == wanted:
            return Prompt(**kept["parts"])
        prompt = render(self.config.prompt, self.model.tokens)
        # `gc` has no model; from these ids it knows which prefix is in use
        ids = prompt.prefix_ids(self.model.tokens)
        self.keeper.keep(lambda: self.store.put_meta("prompt", {**wanted, "parts": prompt.facts(), "prefix_ids": ids}))
        return prompt

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """The token ids of the prompt's prefix. They are kept with the prompt, so that they do not need the model."""
        prompt, kept = self.prompt, self._kept_prompt()
        if kept is not None and kept.get("model") == self.fingerprint and kept.get("parts") == prompt.facts():
            with suppress(KeyError):  # earlier versions did not record the ids
                return tuple(kept["prefix_ids"])
        return prompt.prefix_ids(self.model.tokens)

    def _kept_prompt(self) -> Any:
        """The prompt that the store holds; None if it is damaged, so that it is made again."""
        try:
            return read_fact(self.store, "prompt")
        except CorruptStoreError as error:
            logger.warning("the prompt is made again: %s", error)
            return None

    @cached_property
    def shape(self) -> KVShape:
        """The shape of the model's KV, from encoding one token: what an index says about it cannot be trusted.

        It is also recorded in the store for `verify`, which has no model.
        """
        shape = self.model.kv_shape
        self.keeper.keep(lambda: self.store.keep_shape(self.fingerprint, shape))
        return shape

    def knows(self, ids: Sequence[int]) -> bool:
        """Whether there are tokens, and all of them are in the model's embedding table."""
        return bool(ids) and max(ids) < self.model.config.vocab_size

    def require_known_tokens(self, scored: Sequence[ScoredChunk]) -> None:
        """CorruptStoreError for token ids outside the model's embedding table: the index may come from anyone."""
        named = [(f"chunk {each.chunk.chunk_id!r}", each.chunk.token_ids) for each in scored]
        for what, ids in (*named, ("the prompt", (*self.prefix_ids, 0))):
            if not self.knows(ids):
                raise CorruptStoreError(
                    f"{what} of the index at {self.folder} holds no tokens, or tokens that its model does not have: "
                    "delete its document, or ingest into a new index"
                )

    @property
    def encodings(self) -> Sequence[Encoding]:
        """The encodings that have to be stored so that the configured engines never miss."""
        from ragkv.engines import engine_class

        kinds = map(engine_class, self.config.engines)
        found = {kind.encoding for kind in kinds if not kind.whole_documents}
        return sorted(encoding for encoding in found if encoding is not None)

    @property
    def blocks(self) -> APBConfig | None:
        """How long documents are cut into blocks that an ingest stores; None where it stores none."""
        from ragkv.engines import engine_class, make_engine

        found = [name for name in self.config.engines if engine_class(name).whole_documents]
        settled: APBConfig | None = make_engine(found[0], self.config.tuning).config if found else None
        return settled

    @property
    def recipe(self) -> Recipe:
        """How an ingest makes chunks, KV and vectors of a document now."""
        return Recipe.of(
            self.config,
            model=self.fingerprint,
            prompt=self.prompt,
            encodings=self.encodings,
            embedder=self.encoders.fingerprint,
            blocks=None if self.blocks is None else asdict(self.blocks),
        )

    def note_makers(self) -> None:
        """Record in the store which model and embedder made everything in it.

        As long as documents of another model or embedder remain, the store keeps the old names.
        """
        makers: dict[str, dict[str, str]] = {"model": {"name": self.config.model, "fingerprint": self.fingerprint}}
        if (embedder := self.encoders.fact()) is not None:
            makers["embedder"] = embedder
        kept = {kind: read_fact(self.store, kind) for kind in makers}
        if any(kept[kind] and kept[kind]["fingerprint"] != made["fingerprint"] for kind, made in makers.items()):
            digest = self.recipe.digest()
            if any(stored.recipe != digest for stored in self.store.documents()):
                return
        for kind, made in makers.items():
            if kept[kind] != made:
                self.store.put_meta(kind, made)

    def require_same_model(self) -> None:
        """KVMismatchError if another version of the model has cut and encoded the chunks.

        The store records the new model only after the last document was ingested again: to it, a document in another
        model's tokens would be noise.
        """
        made = read_fact(self.store, "model")
        if made is not None and made["fingerprint"] != self.fingerprint:
            raise KVMismatchError(
                f"The index at {self.folder} was made by another version of model {self.config.model!r} than the one "
                "there now; run ragkv ingest on all of its documents again, or put the model back."
            )
