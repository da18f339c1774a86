"""The embedder and the reranker of an index, loaded when first needed, and the check that they made its vectors."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ragkv.config import NONE, VECTORS, IndexConfig
from ragkv.errors import ConfigError, RetrievalError
from ragkv.index.fact import read_fact
from ragkv.index.mode import refusal
from ragkv.model.checkpoint import MINI
from ragkv.store import Store

if TYPE_CHECKING:
    from ragkv.retrievers import Embedder, Reranker, ScoreKind

__all__ = ["Encoders", "check_factory", "retrieval_defaults", "settle_vectors"]

USUAL_WIDTH = 1024  # of bge-m3's vectors
FACT = "embedder"
"""The fact in the store that says which embedder made every vector: name, fingerprint, stamp."""


def retrieval_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a new index: mini's embedder and reranker with the mini model, none with any other.

    mini's encoders know only the words of generated worlds and find less than BM25 on other text (docs/retrieval.md).
    So with them, questions search by words unless they ask for something else.
    """
    mini = MINI if settings.get("model", MINI) == MINI else NONE
    embedder = settings.get("embedder", mini)
    return {
        "embedder": embedder,
        "reranker": mini if embedder == MINI else NONE,
        "rerank": embedder != MINI or "reranker" in settings,
        "retrieval": "bm25" if embedder in (NONE, MINI) else "dense",
    }


def check_factory(config: IndexConfig) -> None:
    """Refuse a factory string that FAISS does not know (ConfigError) before anything is embedded."""
    from ragkv.retrievers import DenseConfig

    if config.embedder != NONE:
        DenseConfig(factory=config.index_factory).check(USUAL_WIDTH)


def settle_vectors(config: IndexConfig, *, fetch: bool) -> IndexConfig:
    """The configuration with the vectors that its embedder gives, unless it names some of its own.

    ConfigError for a mode of retrieval that these vectors cannot serve. Without `fetch`, an embedder that is not on
    this machine yet is not asked.
    """
    from ragkv.retrievers import embedder_modes

    given = None if config.embedder == NONE else embedder_modes(config.embedder, fetch=fetch)
    if given is None:
        return config
    if absent := set(config.vectors) - given if config.vectors != VECTORS else set():
        raise ConfigError(
            f"Embedder {config.embedder!r} gives {', '.join(sorted(given))} vectors, not {', '.join(sorted(absent))}; "
            "choose an embedder in bge-m3's layout, or other vectors."
        )
    kept = tuple(kind for kind in config.vectors if kind in given)
    if why := refusal(config.retrieval, kept, f"Embedder {config.embedder!r}"):
        raise ConfigError(why)
    return replace(config, vectors=kept)


def load_embedder_of(config: IndexConfig, device: str | None) -> Embedder | None:
    """Load the embedder of an index; None for an index that searches only by words."""
    from ragkv.model.language import pick_device
    from ragkv.retrievers import load_embedder

    if config.embedder == NONE:
        return None
    modes = cast("tuple[ScoreKind, ...]", config.vectors)
    return load_embedder(
        config.embedder,
        device=str(pick_device(device)),
        modes=None if modes == VECTORS else modes,  # by default all that the embedder has
    )


def load_reranker_of(config: IndexConfig, device: str | None) -> Reranker | None:
    """Load the cross-encoder of an index; None for an index without one."""
    from ragkv.model.language import pick_device
    from ragkv.retrievers import load_reranker

    return None if config.reranker == NONE else load_reranker(config.reranker, device=str(pick_device(device)))


class Encoders:
    """The embedder and the reranker of one index; threads may share one. `device` None is CUDA if there is one.

    Pass `embedder` and `reranker` if they are loaded already.
    """

    def __init__(
        self,
        folder: Path,
        config: IndexConfig,
        store: Store,
        device: str | None,
        *,
        embedder: Embedder | None = None,
        reranker: Reranker | None = None,
    ) -> None:
        self._folder = folder
        self._config = config
        self._store = store
        self._device = device
        self._lock = threading.Lock()
        self._embedder = embedder
        self._reranker = reranker

    @property
    def embedder(self) -> Embedder | None:
        """The model that turns texts into vectors; None for an index that searches only by words."""
        with self._lock:
            if self._embedder is None:
                self._embedder = load_embedder_of(self._config, self._device)
            return self._embedder

    @property
    def reranker(self) -> Reranker | None:
        """The cross-encoder that scores candidates; None for an index without one."""
        with self._lock:
            if self._reranker is None:
                self._reranker = load_reranker_of(self._config, self._device)
            return self._reranker

    def load(self, *, embedder: bool, reranker: bool) -> None:
        """Load now what a question will need, so that its times do not include loading."""
        if embedder:
            _ = self.embedder
        if reranker:
            _ = self.reranker

    @property
    def kinds(self) -> frozenset[ScoreKind]:
        """The kinds of vectors that the index keeps; loads the embedder."""
        embedder = self.embedder
        return frozenset() if embedder is None else embedder.modes & frozenset(self._config.vectors)

    @cached_property
    def fingerprint(self) -> str | None:
        """The embedder's identity now, without loading it; None for an index without vectors."""
        from ragkv.retrievers import embedder_fingerprint

        return None if self._config.embedder == NONE else embedder_fingerprint(self._config.embedder)

    def fact(self) -> dict[str, str] | None:
        """What the store records about the embedder, once it has made all vectors."""
        from ragkv.retrievers import embedder_stamp

        if self.fingerprint is None:
            return None
        name = self._config.embedder
        return {"name": name, "fingerprint": self.fingerprint, "stamp": embedder_stamp(name)}

    def require_same(self) -> str:
        """The fingerprint of the embedder that made the vectors; RetrievalError if the embedder is another one now.

        The embedder's files are hashed only if their sizes or times have changed since: a checkpoint has gigabytes,
        so an ingest hashes it, but not every question.
        """
        from ragkv.retrievers import embedder_stamp

        name = self._config.embedder
        if name == NONE:
            raise RetrievalError(
                "This index was made without an embedder, so that it can only be searched with --retrieval bm25; "
                "to have vectors, ingest into another --index with --embedder."
            )
        made = read_fact(self._store, FACT)
        if made is None and self._store.empty:
            return str(self.fingerprint)  # there is nothing to compare with
        if isinstance(made, dict) and (
            made.get("stamp") == embedder_stamp(name) or made["fingerprint"] == self.fingerprint
        ):
            return str(made["fingerprint"])
        raise RetrievalError(
            f"The vectors of the index at {self._folder} were made by "
            + ("another version of the" if made else "no")
            + f" embedder {name!r}; run ragkv ingest on all of its documents again, or search with --retrieval bm25."
        )
