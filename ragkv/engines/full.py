"""Full attention, the yardstick: prefix, chunks and question prefilled anew as one causal sequence (DESIGN §5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragkv.engines.base import CausalStream, Engine, Request

if TYPE_CHECKING:
    from ragkv.model import LanguageModel

__all__ = ["FullAttention", "FullConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullConfig:
    """Nothing to set."""


class FullAttention(Engine):
    """One causal part; no stored KV is read. With `top_k = 1` this is the papers' "single"."""

    name = "full"
    encoding = None
    Config = FullConfig

    def start(self, model: LanguageModel, request: Request) -> CausalStream:
        ids = [
            *request.prefix_ids,
            *(i for chunk in request.chunks for i in chunk.token_ids),
            *request.suffix_ids,
        ]
        return CausalStream(model, ids, start=0)
