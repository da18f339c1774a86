"""The searches that are compared with each other: every mode of retrieval, with and without the reranker.

On the user's own index they are those of `ragkv query`. On a benchmark's corpus they are the same code on vectors
outside any index: passages are embedded but never prefilled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from ragkv.config import MODES, NONE, Mode
from ragkv.errors import RetrievalError, UsageError
from ragkv.evaluation.batch import Batches
from ragkv.evaluation.judgement import Task
from ragkv.evaluation.memo import MemoEmbedder, MemoReranker
from ragkv.evaluation.progress import Progress
from ragkv.evaluation.retrieval import Search
from ragkv.evaluation.searcher import build_searcher
from ragkv.index.mode import indexes_of, kinds_of, refusal, served, useful_kinds
from ragkv.pipeline import RagKV
from ragkv.retrievers import Embedder, Reranker, ScoreKind, embedder_modes, load_embedder, load_reranker

__all__ = ["CANDIDATES", "Settings", "corpus_searches", "index_searches", "load_models"]

CANDIDATES = 50
"""The default number of a benchmark's passages that the reranker reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure. None means all modes, both with and without a reranker, and the index's candidates."""

    modes: Sequence[str] | None = None
    rerank: bool | None = None
    candidates: int | None = None

    def __post_init__(self) -> None:
        for mode in self.modes or ():
            if mode not in MODES:
                raise UsageError(f"--modes are any of {', '.join(MODES)}, not {mode!r}.")


def index_searches(rag: RagKV, settings: Settings) -> dict[str, Search]:
    """The searches of an index, by name."""
    modes = _modes(settings.modes, rag.index.encoders.kinds, f"the index at {rag.folder}")
    variants = _variants(settings.rerank, rag.config.reranker != NONE, "set `reranker` in the index's ragkv.toml")

    def search(mode: Mode, rerank: bool, question: str, k: int) -> list[str]:
        found = rag.retrieve(question, top_k=k, retrieval=mode, rerank=rerank, candidates=settings.candidates)
        return [each.chunk.chunk_id for each in found]

    return {_name(mode, rerank): partial(search, mode, rerank) for mode in modes for rerank in variants}


def load_models(
    settings: Settings,
    embedder: str | None,
    reranker: str | None,
    *,
    device: str | None = None,
    max_tokens: int | None = None,
) -> tuple[Embedder | None, Reranker | None]:
    """Load the models that are named. The embedder only computes the kinds of vectors that the modes need."""
    from ragkv.model.language import pick_device

    place = str(pick_device(device))
    kinds = None if settings.modes is None else _needed(settings.modes)
    if kinds and embedder and settings.modes is not None:
        kinds |= _kinds(settings.modes) & (embedder_modes(embedder) or frozenset())
    return (
        load_embedder(embedder, device=place, max_tokens=max_tokens, modes=kinds)
        if embedder and kinds != frozenset()
        else None,
        load_reranker(reranker, device=place) if reranker and settings.rerank is not False else None,
    )


def corpus_searches(
    task: Task,
    settings: Settings,
    embedder: Embedder | None = None,
    reranker: Reranker | None = None,
    *,
    work: Path,
    on_progress: Progress | None = None,
) -> dict[str, Search]:
    """The searches of a benchmark's corpus, by name. Its vectors are made now and kept in `work`, batch by batch.

    `on_progress` counts passages. Raises RetrievalError if `work` cannot be written.
    """
    assert task.passages is not None
    what = "this run without --embedder" if embedder is None else f"embedder {embedder.name!r}"
    modes = _modes(settings.modes, () if embedder is None else embedder.modes, what)
    variants = _variants(settings.rerank, reranker is not None, "give --reranker")
    texts = {passage.passage_id: passage.text for passage in task.passages}
    vectors: dict[ScoreKind, Iterable[tuple[str, Any]]] = {}
    colbert = None
    if embedder is not None and (kinds := _kinds(modes) & embedder.modes):
        batches = Batches(work, embedder, task.passages, sorted(kinds))
        batches.embed(None if on_progress is None else lambda done, total: on_progress(done, total, embedder.name))
        readers: dict[ScoreKind, Any] = {"dense": batches.dense, "sparse": batches.sparse}
        vectors = {kind: read() for kind, read in readers.items() if kind in kinds}
        colbert = batches.colbert
    searcher = build_searcher(
        texts,
        vectors=vectors,
        colbert=colbert,
        bm25=any("bm25" in indexes_of(mode, vectors) for mode in modes),
        embedder=None if embedder is None else MemoEmbedder(embedder),
        reranker=None if reranker is None else MemoReranker(reranker),
    )
    candidates = settings.candidates or CANDIDATES

    def search(mode: Mode, rerank: bool, question: str, k: int) -> list[str]:
        found = searcher.search(question, mode=mode, top_k=k, candidates=candidates, rerank=rerank)
        return [each.chunk_id for each in found]

    return {_name(mode, rerank): partial(search, mode, rerank) for mode in modes for rerank in variants}


def _needed(modes: Iterable[str]) -> frozenset[ScoreKind]:
    return frozenset(kind for mode in modes for kind in kinds_of(cast("Mode", mode)))


def _kinds(modes: Iterable[str]) -> frozenset[ScoreKind]:
    return frozenset(kind for mode in modes for kind in useful_kinds(cast("Mode", mode)))


def _name(mode: Mode, rerank: bool) -> str:
    return f"{mode}+rerank" if rerank else mode


def _modes(wanted: Sequence[str] | None, kinds: Collection[ScoreKind], what: str) -> list[Mode]:
    """The wanted modes. Raises RetrievalError for a mode that needs other vectors than `kinds`."""
    for mode in wanted or ():
        if why := refusal(cast("Mode", mode), kinds, f"{what[0].upper()}{what[1:]}"):
            raise RetrievalError(why)
    return [mode for mode in served(kinds) if wanted is None or mode in wanted]


def _variants(wanted: bool | None, there: bool, remedy: str) -> list[bool]:
    if wanted and not there:
        raise RetrievalError(f"--rerank needs a reranker: {remedy}.")
    return [wanted] if wanted is not None else [False, True] if there else [False]
