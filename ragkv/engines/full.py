"""Full attention, the yardstick: prefix, chunks and question prefilled anew as one causal sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragkv.engines.base import CausalStream, ContextChunk, Engine, Request

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel

__all__ = ["All", "FullAttention", "FullConfig", "Single"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullConfig:
    """Nothing to set."""


class FullAttention(Engine):
    """One causal part; no stored KV is read."""

    name = "full"
    encoding = None
    Config = FullConfig

    def read(self, request: Request) -> tuple[ContextChunk, ...]:
        """The chunks that stand in the prompt, in ascending relevance."""
        return request.chunks if self.most_chunks is None else request.chunks[-self.most_chunks :]

    def start(self, model: LanguageModel, request: Request) -> CausalStream:
        ids = [
            *request.prefix_ids,
            *(i for chunk in self.read(request) for i in chunk.token_ids),
            *request.suffix_ids,
        ]
        return CausalStream(model, ids, start=0)


class All(FullAttention):
    """`full` under the name of the papers' tables: every retrieved chunk in one prompt (PCED Table 1, "All")."""

    name = "all"


class Single(FullAttention):
    """The best of the retrieved chunks alone (PCED Table 1, "Single")."""

    name = "single"
    most_chunks = 1
