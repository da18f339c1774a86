"""Run an ingest into an open index, and record which models made everything in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, cast

from ragkv.config import CONFIG_FILE, NONE, byte_count, load_config
from ragkv.errors import ConfigError
from ragkv.index.encoders import settle_vectors
from ragkv.index.finder import Finder
from ragkv.index.index import Index
from ragkv.ingest import Ingester, IngestProgress, IngestReport, Limits

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel
    from ragkv.retrievers import Embedder

__all__ = ["run_ingest"]

_BUILT_WITH = ("model", "dtype", "chunk_tokens", "codec", "engines", "embedder", "vectors", "prompt")
"""The settings that decide what an ingest stores for a document."""


def run_ingest(
    index: Index,
    finder: Finder,
    run: Callable[[Ingester], IngestReport],
    *,
    on_progress: Callable[[IngestProgress], None] | None = None,
    memory: int | str | None = None,
) -> IngestReport:
    """Call `run` with an ingester for this index, record which model and embedder made its contents, and let the search
    indexes of `finder` follow.

    By then all documents are in the store. So whatever ends the search indexes early, as `on_progress` may by raising,
    only leaves them to the next ingest or question.

    `memory` overrides `[ingest] memory` of the index.

    Raises ConfigError if the settings of the index have changed since it was opened.
    """
    settings = index.config.ingest if memory is None else replace(index.config.ingest, memory=memory)
    _require_config(index)
    settle_vectors(index.config, fetch=True)  # somebody may have set a mode that these vectors cannot serve
    index.open_budget()
    last: IngestProgress | None = None

    def tell(progress: IngestProgress) -> None:
        nonlocal last
        last = progress
        if on_progress is not None:
            on_progress(progress)

    def follow(name: str, done: int, total: int) -> None:
        assert last is not None, "an ingest tells its progress at its end"
        tell(replace(last, current=f"search index {name}", building=name, built=done, to_build=total))

    def before_writing() -> None:
        # Record the model before the first write, so that an interrupted ingest is attributed to it.
        if index.store.empty:
            index.note_makers()

    ingester = Ingester(
        index.store,
        index.recipe,
        lambda: _able_model(index),
        embedder=None if index.config.embedder == NONE else lambda: cast("Embedder", index.encoders.embedder),
        before_writing=before_writing,
        on_progress=tell,
        limits=Limits.of(settings),
        memory=byte_count("ingest.memory", settings.memory),
        afford=lambda tokens: _afford(index, tokens),
        blocks=index.blocks,
    )
    report = run(ingester)
    if report.tokens:
        index.store.record_uses({}, seconds_per_token=report.encode_seconds / report.tokens)
    if index.loaded_model is not None:
        _ = index.shape  # records the shape in the store, for `verify`, which has no model
    index.note_makers()
    finder.catch_up(tell=follow)
    report.seconds = report.seconds if last is None else last.seconds
    return report


def _able_model(index: Index) -> LanguageModel:
    """The model, if it runs all engines that the index stores KV for; else UnsupportedModelError."""
    from ragkv.engines import make_engine, require_able

    for name in index.config.engines:
        require_able(make_engine(name, index.config.tuning), index.model)
    return index.model


def _afford(index: Index, tokens: Sequence[int]) -> int:
    """Of how many of these chunks, from the first on, an ingest may make KV now: none on demand, else what has room."""
    if index.config.kv == "on-demand":
        return 0
    budget = index.store.budget
    if budget is None:
        return len(tokens)
    room = budget - index.store.kv_bytes
    return sum(end <= room for end in accumulate(map(index.shape.nbytes, tokens)))


def _require_config(index: Index) -> None:
    """ConfigError if settings that decide what is stored have changed since the index was opened.

    Another process may have replaced the index while it was empty, or somebody may have edited its `ragkv.toml`.
    """
    now = load_config(index.folder)
    for name in _BUILT_WITH:
        if getattr(now, name) != getattr(index.config, name):
            raise ConfigError(
                f"The index at {index.folder} has another {name} in its {CONFIG_FILE} than when it was opened; open it "
                "again."
            )
