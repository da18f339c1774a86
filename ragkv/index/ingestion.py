"""An ingest into an open index: its recipe, its models, and the record of which models made everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from ragkv.config import CONFIG_FILE, NONE, load_config
from ragkv.errors import ConfigError
from ragkv.index.index import Index
from ragkv.ingest import Ingester, IngestProgress, IngestReport, Limits

if TYPE_CHECKING:
    from ragkv.retrievers import Embedder

__all__ = ["run_ingest"]

_BUILT_WITH = ("model", "dtype", "chunk_tokens", "codec", "engines", "embedder", "vectors", "prompt")
"""What the documents of an index are made with."""


def run_ingest(
    index: Index,
    run: Callable[[Ingester], IngestReport],
    *,
    on_progress: Callable[[IngestProgress], None] | None = None,
) -> IngestReport:
    """Give `run` an ingester for this index, then record whose model and embedder made what the index holds.

    Raises ConfigError when the index has other settings now than when it was opened.
    """
    _require_config(index)

    def before_writing() -> None:
        # Record the model before the first write, so that an interrupted ingest is attributed to it.
        if index.store.empty:
            index.note_makers()

    ingester = Ingester(
        index.store,
        index.recipe,
        lambda: index.model,
        embedder=None if index.config.embedder == NONE else lambda: cast("Embedder", index.encoders.embedder),
        before_writing=before_writing,
        on_progress=on_progress,
        limits=Limits.of(index.config.ingest),
    )
    report = run(ingester)
    if index.loaded_model is not None:
        _ = index.shape  # noted in the store, for those who look at it without the model
    index.note_makers()
    return report


def _require_config(index: Index) -> None:
    """Refuse to write by settings that are no longer the index's: another process made it anew while it was empty, or
    somebody edited its `ragkv.toml`."""
    now = load_config(index.folder)
    for name in _BUILT_WITH:
        if getattr(now, name) != getattr(index.config, name):
            raise ConfigError(
                f"The index at {index.folder} has another {name} in its {CONFIG_FILE} than when it was opened; open it "
                "again."
            )
