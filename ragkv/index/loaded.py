"""The models of a new index, loaded before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragkv.config import IndexConfig
from ragkv.index.encoders import load_embedder_of, load_reranker_of

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel
    from ragkv.retrievers import Embedder, Reranker

__all__ = ["Loaded"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A language model, and the embedder and reranker if the index has them."""

    model: LanguageModel
    embedder: Embedder | None
    reranker: Reranker | None

    @classmethod
    def load(cls, config: IndexConfig, device: str | None) -> Loaded:
        """Load all of them, the small ones first. Raises the ModelLoadError or UnsupportedModelError of the first."""
        from ragkv.model.language import LanguageModel

        embedder, reranker = load_embedder_of(config, device), load_reranker_of(config, device)
        return cls(LanguageModel.load(config.model, dtype=config.dtype, device=device), embedder, reranker)
